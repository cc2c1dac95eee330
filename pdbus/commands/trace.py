"""`pdbus trace RID`: the life of one request, hop by hop. A request that no part remembers is a BusError."""

from __future__ import annotations

import json
import os
import sys

import click
from rich.console import Console

from bus.errors import BusError, ConfigError
from bus.runtime import settings
from pdbus.client import Client
from pdbus.commands.common import (
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)
from pdbus.trace.hops import as_dict, unknown
from pdbus.trace.waterfall import waterfall, why

WIDTH = 120  # of output outside a terminal
RID_MAX = 128


@settings.command(
    "trace",
    epilog="The rid is in the log lines of all parts. For a request of an edge, its x-request-id is enough: the rid "
    "begins with it. Several answers to one request have rids that end with -0, -1 and so on.",
)
@click.argument("rid")
@controller_option
@click.option("--why", "reasons", is_flag=True, help="Say why each leg went to its rank, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object (docs/tracing.md).")
@keys_option
@wait_option
def trace(rid: str, controller: str, reasons: bool, as_json: bool, keys: str, wait_s: float) -> None:
    """Show the steps of a request and their times, as controller and ranks recorded them."""
    if not 0 < len(rid) <= RID_MAX:
        raise ConfigError(f"a rid has 1 to {RID_MAX} characters")
    try:
        rid.encode()
    except UnicodeEncodeError:
        raise ConfigError("a rid is text in UTF-8") from None
    leave_on_signals()
    with Client(controller, keys=keys) as client:
        wait_for_controller(client, controller, wait_s, keys)
        answer = client.trace(rid, timeout_s=wait_s)
    if not answer.parts:
        raise BusError(unknown(rid, answer))
    if as_json:
        print(json.dumps(as_dict(rid, answer), indent=2))
        return
    shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if shown else WIDTH)
    console.print(waterfall(rid, answer, console.width))
    if reasons:
        console.print(why(answer))
