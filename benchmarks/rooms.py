"""`rooms`: what finding a room costs, from its registration, in batches, among a million, and while these expire. A
room is the number of a request, by which its decode rank finds the rank that prefills it; the broker keeps them."""

from __future__ import annotations

import statistics
import time

from benchmarks import parts
from benchmarks.harness import Aim, Process, Row, Scope, Workspace, in_child, percentile, row

WATCHED = 500  # rooms in flight of the first case
WATCH_RATE = 500.0
LIVE = (1_000, 100_000, 1_000_000)
BATCHES = (1, 16, 256)
BULK = 256  # registrations in a message
EXPIRY_TTL_S = 12.0
PROBE_GAP_S = 0.0002
AIM_P50 = Aim(2.5)
AIM_OVER_HTTP = Aim(1 / 8)
AIM_MILLION_US = Aim(500, of_ratio=False)
AIM_RATE = Aim(100_000, of_ratio=False, at_least=True)
AIM_PAUSE_MS = Aim(2.0, of_ratio=False)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    return [*_one_room(scope), *_many_rooms(scope), *_expiry(scope)]


def _one_room(scope: Scope) -> list[Row]:
    """Registration published → the decode node that watches has the answer."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    http: list[list[float]] = []
    count = scope.size(WATCHED, 100)
    with Workspace() as space:
        parts.broker(space)
        publisher, watcher = _pair(space)
        echo = space.part("bare:echo", endpoint=space.endpoint("echo"))
        asker = space.part("bare:asker", endpoint=space.endpoint("echo"))
        server = space.part("http_floor:server")
        for process in (echo, asker, server):
            process.wait_ready()
        http_asker = space.part("http_floor:asker", port=server.answer())
        http_asker.wait_ready()
        for number in range(1 + scope.runs):
            scope.show(f"a room's way, run {number} of {scope.runs}")
            first = 10_000_000 + number * count
            assert watcher.ask(do="watch", first=first, count=count) == count
            watcher.command(do="collect", first=first, count=count)
            published = publisher.ask(do="paced", first=first, count=count, rate=WATCH_RATE)
            known = watcher.answer()
            ours.append([(k - p) / 1e3 for p, k in zip(published, known, strict=True)])
            bare.append([s * 1e6 for s in asker.ask(count=count, request_bytes=64, rate=WATCH_RATE)])
            http.append([s * 1e6 for s in http_asker.ask(count=scope.size(150, 30))])
    del ours[0], bare[0], http[0]  # warm-up
    rows = []
    for metric, share, aim in (("p50", 0.5, True), ("p99", 0.99, False)):
        values = [percentile(run, share) for run in ours]
        for case, floors, limit in (("bare round trip", bare, AIM_P50), ("HTTP", http, AIM_OVER_HTTP)):
            floor = [percentile(run, share) for run in floors]
            rows.append(row(f"published to known, over {case}", metric, "µs", values, floor, limit if aim else None))
    return rows


def _many_rooms(scope: Scope) -> list[Row]:
    """Batches against a growing table; registrations a second and bytes a room on the way there."""
    rows: list[Row] = []
    with Workspace() as space:
        broker = parts.broker(space, "--room-ttl-s", "600")
        publisher, watcher = _pair(space)
        echo = space.part("bare:echo", endpoint=space.endpoint("echo"))
        asker = space.part("bare:asker", endpoint=space.endpoint("echo"))
        for process in (echo, asker):
            process.wait_ready()
        empty_bytes = broker.memory_bytes()
        held = 0
        for live in LIVE[: scope.size(3, 2)]:
            scope.show(f"registering {live - held:,} rooms")
            registered = publisher.ask(do="bulk", first=held, count=live - held, batch=BULK)
            if live == LIVE[-1] or scope.quick:
                rate = (live - held) / registered["elapsed_s"]
                rows.append(row(f"{live:,} rooms", "registrations per second", "1/s", [rate], aim=AIM_RATE))
            held = live
            for batch in BATCHES:
                rows.append(_batches(scope, watcher, asker, live, batch))
        used = (broker.memory_bytes() - empty_bytes) / held
        rows.append(row(f"{held:,} rooms", "memory of the broker a room", "B", [used]))
    return rows


def _batches(scope: Scope, watcher: Process, asker: Process, live: int, batch: int) -> Row:
    scope.show(f"batches of {batch} against {live:,} rooms")
    count = scope.size(300, 50)
    ours, bare = [], []
    for number in range(1 + scope.runs):
        times = watcher.ask(do="ask_batches", batch=batch, count=count, live=live)
        floor = asker.ask(count=count, request_bytes=16 + 9 * batch)
        if number:
            ours.append(statistics.median(times) * 1e6)
            bare.append(statistics.median(floor) * 1e6)
    aim = AIM_MILLION_US if (live, batch) == (LIVE[-1], BATCHES[-1]) else None
    return row(f"{batch} of {live:,} rooms", "query p50", "µs", ours, bare, aim)


def _expiry(scope: Scope) -> list[Row]:
    """The longest round trip while a million rooms expire, beside the same probe for as long while none do."""
    rooms = scope.size(1_000_000, 100_000)
    scope.show(f"turns of the table while {rooms:,} rooms expire")
    longest = [1e3 * max(in_child("rooms_parts:expiry_turns", rooms=rooms)) for _ in range(min(3, scope.runs))]
    case = f"{rooms:,} rooms expire"
    own = row(case, "longest turn of the sweep (CPU)", "ms", longest, aim=AIM_PAUSE_MS)
    with Workspace() as space:
        parts.broker(space, "--room-ttl-s", str(EXPIRY_TTL_S))
        publisher, watcher = _pair(space)
        scope.show(f"registering {rooms:,} rooms that live {EXPIRY_TTL_S:g} s")
        publisher.ask(do="bulk", first=0, count=rooms, batch=BULK)
        scope.show("probing while they expire")
        sweeping: list[float] = []
        began = time.perf_counter()
        while watcher.ask(do="count", name="rooms_held"):
            sweeping += watcher.ask(do="probe", seconds=1.0, gap_s=PROBE_GAP_S)
        scope.show("probing a quiet broker for as long")
        quiet = watcher.ask(do="probe", seconds=time.perf_counter() - began, gap_s=PROBE_GAP_S)
    live = [
        row(case, name, "ms", [figure(sweeping) * 1e3], [figure(quiet) * 1e3], aim)
        for name, figure, aim in (
            ("longest pause", max, AIM_PAUSE_MS),
            ("p99.9 round trip", lambda times: percentile(times, 0.999), None),
        )
    ]
    return [own, *live]


def _pair(space: Workspace) -> tuple[Process, Process]:
    publisher = space.part("rooms_parts:publisher", bus=space.endpoint("bus"))
    watcher = space.part("rooms_parts:watcher", bus=space.endpoint("bus"))
    publisher.wait_ready()
    watcher.wait_ready()
    return publisher, watcher
