"""`pdbus status`: every rank as its controller sees it, and the broker's counts, as a table or JSON. Exit code 1: a
rank or role that should serve does not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bus.endpoints import BusAddress
from bus.runtime import cli, settings
from bus.wire.messages import RankStatus, Status
from controller.trips import TRIPS, Trip
from pdbus.client import Client
from pdbus.commands.common import (
    bus_option,
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)
from pdbus.fleet.figures import Sample, slo_of, trouble_of
from pdbus.fleet.formatting import queue_words
from pdbus.fleet.history import History, about, text_of
from pdbus.fleet.source import BROKER_WAIT_MS, BrokerStatusClient
from pdbus.fleet.verdict import MARKS, Line, headline_of, lines_of

ONCE_WAIT_MS = 3_000  # for the broker, where nothing is shown again
WIDTH = 132  # of a table outside a terminal
COLUMNS = ("rank", "role", "state", "age", "run+wait", "KV", "in flight", "estimate", "sent", "ended", "bad")
STYLES = {"bad": "bold red", "late": "bold dark_orange", "warn": "yellow"}
WORDS = ("rank", "role", "state")
LEAST_FIRST = (
    "ended",
    "sent",
    "in flight",
    "role",
    "age",
    "bad",
    "KV",
    "run+wait",
    "estimate",
)  # columns left out first on a narrow terminal


@settings.command(
    "status",
    epilog="Exit code 1: a rank that should serve does not (silent, lost, hung), or no rank of a role is ready; a line "
    "for each says so.",
)
@controller_option
@bus_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object (docs/operations.md).")
@click.option(
    "--watch",
    "watch_s",
    type=cli.Seconds(0.1),
    is_flag=False,
    flag_value=2.0,
    default=None,
    metavar="[SECONDS]",
    help="Repeat every 2 seconds, or as often as given; with --json, one object on each line.",
)
@click.option(
    "--events", "events_from", type=click.IntRange(0), metavar="NUMBER",
    help="Show the controller's events from this number on too (0: all that it keeps); with --watch each once.",
)  # fmt: skip
@keys_option
@wait_option
def status(
    controller: str, bus: str, as_json: bool, watch_s: float | None, events_from: int | None, keys: str, wait_s: float
) -> None:
    """Show every rank: role, state, load report and its age, estimate, work in flight, counts."""
    leave_on_signals()
    console, history, epoch = _console(), History(), 0
    with Client(controller, keys=keys) as client, BrokerStatusClient(BusAddress(bus), keys) as broker_client:
        while True:
            seen = wait_for_controller(client, controller, wait_s, keys, events_from)
            broker = broker_client.ask(BROKER_WAIT_MS if watch_s else min(ONCE_WAIT_MS, int(wait_s * 1000)))
            sample = Sample(time.monotonic(), time.time(), seen, broker)
            history.add(sample)
            if as_json:
                print(json.dumps(as_dict(sample, history), indent=None if watch_s else 2), flush=True)
            else:
                if watch_s and console.is_terminal:
                    console.clear()
                _show(console, sample, history, bus, keys)
                if events_from is not None:
                    _show_events(console, seen)
            if events_from is not None:
                events_from = 0 if epoch not in (0, seen.epoch) else history.next_event or events_from
            epoch = seen.epoch
            if not watch_s:
                break
            time.sleep(watch_s)
    if trouble_of(seen):
        sys.exit(1)


def as_dict(sample: Sample, history: History) -> dict[str, Any]:
    """Return a sample, the last one of `history`, for JSON output: fields by name, as in docs/protocol.md; `trouble`
    has a sentence for each fault, `conditions` one for each rank that serves badly, `verdict` what the page of a fleet
    says at its top, and `broker` the broker's counts (None if it did not answer)."""
    broker = _named(sample.broker) if sample.broker is not None else None
    trouble, conditions = trouble_of(sample.status), history.sentences()
    lines = _lines(history)
    level, headline = headline_of(lines, history)
    items = [{"level": line.level, "kind": line.kind, "text": line.text, "rank": line.rank} for line in lines]
    verdict = {"level": level, "headline": headline, "lines": items}
    return {
        "trouble": trouble, "conditions": conditions, "verdict": verdict, "controller": _named(sample.status),
        "broker": broker,
    }  # fmt: skip


def _lines(history: History) -> list[Line]:
    """Return the verdict on the cluster without its notes: the table's lines have those, and the broker's state."""
    return [line for line in lines_of(history, asks_broker=False) if line.kind != "note"]


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_named(each) for each in value]
    return value


def _console() -> Console:
    shown = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if shown else WIDTH)


def _show(console: Console, sample: Sample, history: History, bus: str, keys: str) -> None:
    seen, broker = sample.status, sample.broker
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
    _print(console, _requests(seen))
    if seen.queue is not None and seen.queue.requests:
        _print(console, f"queue: {', '.join(queue_words(seen.queue))}")
    if broker is None:
        hint = " (it answers a viewer's or an admin's key alone)" if keys else ""
        _print(console, f"No broker answers at {bus}{hint}; name another with --bus.")
    else:
        counts = ", ".join(f"{name} {count}" for name, count in broker.counts.items() if count)
        _print(console, f"broker, up {broker.uptime_s:.0f} s: {counts or 'nothing yet'}")
    lines = _lines(history)
    level, headline = headline_of(lines, history)
    if len(lines) > 1:
        _print(console, f"{MARKS[level]} {headline}", style=f"bold {STYLES[level]}")
    for line in lines:
        _print(console, f"{MARKS[line.level]} {line.text}", style=STYLES[line.level])


def _show_events(console: Console, seen: Status) -> None:
    if seen.events is None:
        hidden = any(rank.endpoint for rank in seen.ranks) or not seen.ranks
        why = (
            "this controller is older than this pdbus, and keeps none"
            if hidden
            else "they are for a viewer's or an admin's key"
        )
        _print(console, f"events: - ({why})")
    for event in seen.events or ():
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_us / 1e6))
        line = f"{event.number} {clock} {about(event)}: {text_of(event)}"
        _print(console, line, style="red" if event.bad else "")


def _requests(seen: Status) -> str:
    """Return a line of counts: requests by outcome, and refusals."""
    sample, counts = Sample(0.0, 0.0, seen), seen.counts
    numbers = (
        f"{counts.get(name, 0)} {word}"
        for name, word in (("requests", "live"), ("queue_requests", "waiting"), ("done", "done"))
    )
    line = f"requests: {', '.join(numbers)}"
    if slo := slo_of(seen):
        line += f"; first tokens in time: {', '.join(f'{name} {count}' for name, count in slo.items())}"
    trips = {trip: count for trip in TRIPS if (count := counts.get(f"trip_{trip}"))}
    for what, by_name in (("failed", sample.failed), ("refused", sample.refused), ("trips", trips)):
        line += f"; {what}: {', '.join(f'{name} {count}' for name, count in by_name.items())}" if by_name else ""
    return line + _seconds_of(trips, counts)


def _seconds_of(trips: Mapping[Trip, int], counts: Mapping[str, int]) -> str:
    """Return the mean seconds to the first token of each trip, as predicted and as they were; empty: nothing was."""
    means = [
        f"{trip} {taken / number / 1e6:.3f} s ({counts[f'first_token_us_{trip}_predicted'] / number / 1e6:.3f})"
        for trip, number in trips.items()
        if (taken := counts.get(f"first_token_us_{trip}_taken"))
    ]
    return f"; to the first token (predicted): {', '.join(means)}" if means else ""


def _print(console: Console, line: str, style: str = "") -> None:
    """Print a line that has text from peers."""
    console.print(cli.printable(" ".join(line.split())), style=style, markup=False)


def ranks_table(ranks: Sequence[RankStatus], console: Console) -> tuple[Table, list[str]]:
    """Return a table with a row for each rank and as many columns as fit into the console's width, and the names of the
    columns left out."""
    in_order = sorted(ranks, key=lambda rank: (rank.role != "prefill", rank.instance, rank.dp_rank))
    rows = [_row(rank) for rank in in_order]
    names = list(COLUMNS)
    if all(rank.instance.startswith(rank.role) for rank in ranks):
        names.remove("role")  # each name has it
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
        "KV": f"{load.kv_tokens / load.kv_capacity:.0%}" if load and load.kv_capacity else "-",
        "in flight": f"{rank.in_flight_requests}/{rank.in_flight_tokens}",
        "estimate": f"{rank.estimate_requests}/{rank.estimate_tokens}",
        "sent": str(rank.dispatched_total),
        "ended": str(rank.ended_total),
        "bad": str(rank.failed_total),
    }
    return {name: cli.printable(cell) for name, cell in cells.items()}
