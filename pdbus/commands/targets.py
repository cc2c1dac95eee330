"""`pdbus targets`: the metrics addresses of all parts, for Prometheus: printed once, or kept in a file until the
command is ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

from bus.errors import ConfigError, PeerLost
from bus.runtime import cli, settings
from bus.wire.messages import Status
from bus.wire.status import targets as targets_of
from pdbus.client import Client
from pdbus.commands.common import (
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)


@settings.command("targets")
@controller_option
@click.option(
    "--watch",
    metavar="FILE",
    default="",
    help="Write them to FILE for file_sd, and keep it up to date until the command ends.",
)
@click.option("--interval-s", type=cli.Seconds(0.1), default=5.0, show_default=True, help="How often to ask.")
@keys_option
@wait_option
def targets(controller: str, watch: str, interval_s: float, keys: str, wait_s: float) -> None:
    """Print the targets of all parts that have metrics, in the format of Prometheus's file_sd."""
    leave_on_signals()
    with Client(controller, keys=keys) as client:
        written = _text(wait_for_controller(client, controller, wait_s, keys))
        if not watch:
            print(written, end="")
            return
        _write(Path(watch), written)
        while True:
            time.sleep(interval_s)
            try:
                text = _text(client.status(timeout_s=wait_s))
            except PeerLost:
                continue  # the last targets stay; Prometheus itself sees which of them are down
            if text != written:
                _write(Path(watch), text)
                written = text


def _text(status: Status) -> str:
    ranks = [rank for rank in status.ranks if rank.state != "gone"]
    return json.dumps(targets_of(status.scraped, ranks), indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, because Prometheus may read it at any time."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)
