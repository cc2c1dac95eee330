"""`pdbus status`: every rank as its controller sees it, and what the broker counts."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec
import zmq
from rich import box
from rich.console import Console
from rich.table import Table

from bus import codec
from bus.endpoints import BusAddress, default_bus
from bus.errors import RemoteProtocolError
from bus.messages import FROM_BROKER, BrokerStatus, BrokerStatusQuery, RankStatus, Status
from bus.security import load_keys
from bus.sockets import Sockets
from pdbus.client import Client
from pdbus.commands.common import controller_option, keys_option, wait_for_controller, wait_option

BROKER_WAIT_MS = 1_000


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
        seen = wait_for_controller(client, controller, wait_s)
    broker = ask_broker(address, keys)
    if as_json:
        print(json.dumps(as_dict(seen, broker), indent=2))
    else:
        _show(seen, broker, bus, keys)


def ask_broker(address: BusAddress, keys: str = "") -> BrokerStatus | None:
    """What the broker counts; None when none answers within a second."""
    with Sockets(keys=load_keys(keys, server=False) if keys else None) as sockets:
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
    console = Console(highlight=False)
    methods = ", ".join(f"{role} {method}" for role, method in sorted(seen.methods.items()))
    console.print(f"{seen.controller}, up {seen.uptime_s:.0f} s; methods: {methods}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    roles = not all(rank.instance.startswith(rank.role) for rank in seen.ranks)  # else each name says it
    for name in ("rank", *(["role"] if roles else []), "state"):
        table.add_column(name, no_wrap=True)
    for name in ("age", "run+wait", "KV", "in flight", "estimate", "sent", "ended", "bad"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in sorted(seen.ranks, key=lambda rank: (rank.role != "prefill", rank.instance, rank.dp_rank)):
        table.add_row(*_row(rank, roles))
    console.print(table)
    if seen.ranks:
        models = ", ".join(sorted({rank.model for rank in seen.ranks}))
        console.print(f"[dim]model: {models}; in flight, estimate: requests/tokens; bad: ended, not with ok[/]")
    else:
        console.print("No rank has joined this controller.")
    if broker is None:
        hint = " (with keys it answers those of nodes alone)" if keys else ""
        console.print(f"No broker answers at {bus}{hint}; name another with --bus.")
    else:
        counts = ", ".join(f"{name} {count}" for name, count in broker.counts.items() if count)
        console.print(f"broker, up {broker.uptime_s:.0f} s: {counts or 'nothing yet'}")


def _row(rank: RankStatus, with_role: bool) -> list[str]:
    load = rank.load
    return [
        f"{rank.instance}/{rank.dp_rank}",
        *([rank.role] if with_role else []),
        rank.state,
        f"{rank.report_age_s:.1f}s" if rank.report_age_s >= 0 else "never",
        *([f"{load.running}+{load.waiting}", f"{load.kv_tokens / max(1, load.kv_capacity):.0%}"] if load else "--"),
        f"{rank.in_flight_requests}/{rank.in_flight_tokens}",
        f"{rank.estimate_requests}/{rank.estimate_tokens}",
        str(rank.dispatched_total),
        str(rank.ended_total),
        str(rank.failed_total),
    ]
