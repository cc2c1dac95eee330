"""The common part of several subcommands: options, progress lines, and waiting for a controller."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from bus.endpoints import default_bus, default_controller, unresolved, why_silent
from bus.errors import ConfigError, PeerLost
from bus.runtime import cli
from bus.wire.messages import Status
from pdbus.client import Client

PROGRESS_S = 2.0

controller_option = click.option(
    "--controller",
    default=default_controller,
    show_default=default_controller(),
    metavar="BASE",
    help="The controller: ipc:///dir/controller or tcp://host:port.",
)
bus_option = click.option(
    "--bus",
    default=default_bus,
    show_default=default_bus(),
    metavar="BASE",
    help="The broker, which is asked for its counts.",
)
wait_option = click.option(
    "--wait-s",
    type=cli.Seconds(0.1),
    default=10.0,
    show_default=True,
    help="How long to wait for a controller, and for its first rank where one is needed.",
)
keys_option = click.option("--keys", default="", metavar="DIR", help="Directory of CURVE keys.")
tokenizers_option = click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="[MODEL=]DIR",
    help="A folder with tokenizer.json and chat template, or the word bytes; of one model or of all  [default: the "
    "model's own files]",
)


class ProgressLine:
    """One line of progress on stderr. A terminal shows it live; elsewhere a line is printed each PROGRESS_S at most,
    the first one after as long, or `at_once`."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status: Any = None
        self._shown_at = -math.inf if at_once else time.monotonic()

    def show(self, line: str) -> None:
        """Show `line` as the present progress, without control characters."""
        line = cli.printable(line)
        if self._status is not None:
            self._status.update(escape(line))
        elif time.monotonic() - self._shown_at >= PROGRESS_S:
            self._shown_at = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def showing(self) -> Iterator[ProgressLine]:
        """Keep the line on the terminal inside the `with` block, and remove it at its end; on a terminal, `show`
        outside of it prints as elsewhere."""
        if not self.console.is_terminal:
            yield self
            return
        with self.console.status("") as self._status:
            try:
                yield self
            finally:
                self._status = None


def curl_line(url: str, model: str) -> str:
    """Return a curl command that sends a prompt to the HTTP edge at `url`."""
    body = {"model": model, "messages": [{"role": "user", "content": "What is a load balancer?"}]}
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def check_http_installed(command: str) -> None:
    """Raise ConfigError unless the packages are installed that serve HTTP."""
    missing = [name for name in ("uvicorn", "httptools", "uvloop") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}: pip install {' '.join(missing)}")


def leave_on_signals(handler: Callable[[int, FrameType | None], None] = signal.default_int_handler) -> None:
    """Have SIGINT, SIGTERM, and SIGHUP unless it is ignored, call `handler`; by default they raise KeyboardInterrupt,
    as Ctrl-C does, so that the command cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def wait_for_controller(
    client: Client, address: str, wait_s: float, keys: str, events_from: int | None = None
) -> Status:
    """Wait until the controller at `address` answers `client`, with a progress line, and return its status, with its
    events from a number on (None: without). `keys` is only for the error's text. Raises ConfigError when its host
    cannot be resolved, and PeerLost when it does not answer within `wait_s` seconds."""
    if reason := unresolved(address):
        raise ConfigError(f"{reason}: check the address {address}")
    began = time.monotonic()
    with ProgressLine().showing() as progress:
        while True:
            left_s = began + wait_s - time.monotonic()
            try:
                return client.status(timeout_s=min(1.0, max(0.05, left_s)), events_from=events_from)
            except PeerLost:
                if left_s <= 1.0:
                    raise PeerLost(
                        f"no controller answers at {address} (waited {wait_s:g} s): {why_silent(address, keys)} "
                        "(start a cluster with: pdbus up)"
                    ) from None
            waited_s = time.monotonic() - began
            progress.show(f"waiting for a controller at {address} ({waited_s:.0f} s of {wait_s:g} s)")
