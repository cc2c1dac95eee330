"""`pdbus status`: every rank as its controller sees it, and what the broker counts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec
import zmq
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bus.endpoints import BusAddress, default_bus
from bus.errors import RemoteProtocolError
from bus.runtime import cli
from bus.runtime.keys import load_keys
from bus.runtime.sockets import Sockets
from bus.wire import codec
from bus.wire.messages import FROM_BROKER, BrokerStatus, BrokerStatusQuery, RankStatus, Status
from pdbus.client import Client
from pdbus.commands.common import controller_option, keys_option, wait_for_controller, wait_option

BROKER_WAIT_MS = 1_000
WIDTH = 132  # of a table that no terminal shows
COLUMNS = ("rank", "role", "state", "age", "run+wait", "KV", "in flight", "estimate", "sent", "ended", "bad")
WORDS = ("rank", "role", "state")
LEAST_FIRST = ("ended", "sent", "in flight", "role", "age", "bad", "KV", "run+wait", "estimate")  # where it is narrow


@click.command()
@controller_option
@click.option(
    "--bus", default=default_bus, show_default=default_bus(), metavar="BASE", help="The broker, for its counts."
)
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@keys_option
@wait_option
def status(controller: str, bus: str, as_json: bool, keys: str, wait_s: float) -> None:
    """Show every rank: role, state, load report and its age, estimate, work in flight, counts."""
    address = BusAddress(bus)
    with Client(controller, keys=keys) as client:
        seen = wait_for_controller(client, controller, wait_s, keys)
    broker = ask_broker(address, keys)
    if as_json:
        print(json.dumps(as_dict(seen, broker), indent=2))
    else:
        _show(seen, broker, bus, keys)


def ask_broker(address: BusAddress, keys: str = "") -> BrokerStatus | None:
    """What the broker counts; None when none answers within a second."""
    with Sockets(keys=load_keys(keys, "admins", "clients") if keys else None) as sockets:
        dealer = sockets.dealer(address.bootstrap)
        try:
            dealer.send_multipart([b"", codec.encode(BrokerStatusQuery(1))], zmq.NOBLOCK)
        except zmq.Again:
            return None  # refused already: it does not know our key
        if not dealer.poll(BROKER_WAIT_MS):
            return None
        try:
            answer = codec.decode(dealer.recv_multipart()[-1], FROM_BROKER)
        except RemoteProtocolError:
            return None
        return answer if isinstance(answer, BrokerStatus) else None


def as_dict(seen: Status, broker: BrokerStatus | None) -> dict[str, Any]:
    """For programs: fields by name, as in docs/protocol.md."""
    return {"controller": _named(seen), "broker": _named(broker) if broker is not None else None}


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_named(each) for each in value]
    return value


def _show(seen: Status, broker: BrokerStatus | None, bus: str, keys: str) -> None:
    shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if shown else WIDTH)
    methods = ", ".join(f"{role} {method}" for role, method in sorted(seen.methods.items()))
    _print(console, f"{seen.controller}, up {seen.uptime_s:.0f} s; methods: {methods}")
    table, left_out = ranks_table(seen.ranks, console)
    console.print(table)
    if seen.ranks:
        models = ", ".join(sorted({rank.model for rank in seen.ranks}))
        hidden = f"; left out here: {', '.join(left_out)} (a wider terminal, or --json)" if left_out else ""
        meaning = "in flight, estimate: requests/tokens; bad: ended, not with ok"
        _print(console, f"model: {models}; {meaning}{hidden}", style="dim")
    else:
        console.print("No rank has joined this controller.")
    if broker is None:
        hint = " (it answers an admin's key alone)" if keys else ""
        _print(console, f"No broker answers at {bus}{hint}; name another with --bus.")
    else:
        counts = ", ".join(f"{name} {count}" for name, count in broker.counts.items() if count)
        _print(console, f"broker, up {broker.uptime_s:.0f} s: {counts or 'nothing yet'}")


def _print(console: Console, line: str, style: str = "") -> None:
    """A line with words of peers in it."""
    console.print(cli.printable(" ".join(line.split())), style=style, markup=False)


def ranks_table(ranks: Sequence[RankStatus], console: Console) -> tuple[Table, list[str]]:
    """A row for each rank, with as many columns as `console` has room for; and the names of those left out."""
    in_order = sorted(ranks, key=lambda rank: (rank.role != "prefill", rank.instance, rank.dp_rank))
    rows = [_row(rank) for rank in in_order]
    names = list(COLUMNS)
    if all(rank.instance.startswith(rank.role) for rank in ranks):
        names.remove("role")  # each name says it
    unbounded = console.options.update(width=sys.maxsize)
    left_out: list[str] = []
    table = _table(names, rows)
    for name in LEAST_FIRST:
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
        if name in names:
            names.remove(name)
            left_out.append(name)
            table = _table(names, rows)
    return table, left_out


def _table(names: Sequence[str], rows: Sequence[dict[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    return table


def _row(rank: RankStatus) -> dict[str, str]:
    load = rank.load
    cells = {
        "rank": f"{rank.instance}/{rank.dp_rank}",
        "role": rank.role,
        "state": rank.state,
        "age": f"{rank.report_age_s:.1f}s" if rank.report_age_s >= 0 else "never",
        "run+wait": f"{load.running}+{load.waiting}" if load else "-",
        "KV": f"{load.kv_tokens / max(1, load.kv_capacity):.0%}" if load else "-",
        "in flight": f"{rank.in_flight_requests}/{rank.in_flight_tokens}",
        "estimate": f"{rank.estimate_requests}/{rank.estimate_tokens}",
        "sent": str(rank.dispatched_total),
        "ended": str(rank.ended_total),
        "bad": str(rank.failed_total),
    }
    return {name: cli.printable(cell) for name, cell in cells.items()}
