"""One home for defaults: what a rank promises and what others count on fit together, and the docs say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from controller_world import World, hello

from bus import defaults
from bus.defaults import IDLE_INTERVALS, INTERVAL_MAX_S, STALE_INTERVALS, STALE_S, bounded_interval_s
from bus.embed.publications import PublisherCore
from bus.embed.publisher import Publisher
from bus.wire.messages import Load, Member
from controller.config import ControllerConfig
from controller.events import Published, Tick
from controller.load.rank import RankLoad
from nodes.config import NodeConfig

DOCS = Path(__file__).parents[2] / "docs"
TICK_S = 0.05


def stale_share(interval_s: float) -> float:
    """The share of time for which a controller does not believe an idle embedded rank, in virtual time."""
    world = World()
    world.join(hello("e"))
    publisher = PublisherCore(
        instance="e", dp_rank=0, epoch=1, role="unified", model="m", dp_size=2, endpoint="", interval_s=interval_s,
        state="ready",
    )  # fmt: skip
    publisher.report(
        Load(seq=0, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=1000, max_running=4),
        world.now,
    )
    rank = world.core.table.ranks[("e", 0)]
    for publication in publisher.tick(world.now):
        world.feed(Published(publication.message))
    due, stale, ticks = publisher.due_s(world.now), 0, round(60 * IDLE_INTERVALS * interval_s / TICK_S)
    for _ in range(ticks):
        world.now += TICK_S
        if world.now >= due:
            for publication in publisher.tick(world.now):
                world.feed(Published(publication.message))
            due = world.now + publisher.due_s(world.now)
        world.feed(Tick())
        stale += rank.stale
    return stale / ticks


def default_interval_s() -> float:
    return float(inspect.signature(Publisher).parameters["interval_s"].default)


@pytest.mark.parametrize("interval_s", [default_interval_s(), 1.0, 5.0])
def test_an_idle_embedded_rank_is_never_stale(interval_s: float) -> None:
    assert stale_share(interval_s) == 0


def test_all_parts_that_share_a_default_have_it() -> None:
    assert default_interval_s() == NodeConfig.report_interval_s == defaults.REPORT_INTERVAL_S
    core = PublisherCore(
        instance="i", dp_rank=0, epoch=1, role="unified", model="m", dp_size=1, endpoint="tcp://127.0.0.1:1"
    )
    assert core.interval_s == defaults.REPORT_INTERVAL_S
    assert STALE_S > IDLE_INTERVALS * defaults.REPORT_INTERVAL_S
    assert STALE_INTERVALS > 1
    assert IDLE_INTERVALS * defaults.REPORT_INTERVAL_S == 1.0  # as protocol.md says
    assert ControllerConfig.stale_s == STALE_S


def report(world: World, seq: int, declared_s: float) -> RankLoad:
    """A membership with a load, as an embedded rank of any make may publish it."""
    load = Load(seq=seq, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=1000, max_running=4)
    world.feed(Published(Member("e", 0, 1, seq, load, "unified", "m", 2, "ready", "", False, 0, declared_s)))
    return world.core.table.ranks[("e", 0)]


def believed_s(world: World, rank: RankLoad) -> float:
    began = world.now
    while not rank.stale:
        world.now += TICK_S
        world.core.table.age(world.now)
    return world.now - began


@pytest.mark.parametrize(
    ("declared_s", "expected_s"),
    [(0.25, STALE_S), (4.0, STALE_INTERVALS * 4), (1e9, STALE_INTERVALS * INTERVAL_MAX_S)],
)
def test_a_report_is_believed_by_what_its_rank_declares_within_bounds(declared_s: float, expected_s: float) -> None:
    world = World()
    world.join(hello("e"))
    rank = report(world, 1, declared_s)
    assert world.core.health.liveness[rank.key].interval_s <= INTERVAL_MAX_S  # so it falls silent some time, too
    assert believed_s(world, rank) == pytest.approx(expected_s, abs=2 * TICK_S)


def test_a_rank_that_begins_to_report_often_is_not_believed_for_as_long_as_before() -> None:
    world = World()
    world.join(hello("e"))
    rank = report(world, 1, 20.0)
    world.now += 15
    world.core.table.age(world.now)
    report(world, 2, 0.25)
    assert believed_s(world, rank) <= 2 * STALE_S + TICK_S
    report(world, 3, 0.25)
    assert believed_s(world, rank) == pytest.approx(STALE_S, abs=2 * TICK_S)


def test_a_declared_interval_is_taken_within_bounds() -> None:
    assert [bounded_interval_s(declared) for declared in (0.0, 1.5, 1e300)] == [0.05, 1.5, 60.0]


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("protocol.md", rf"\| beacon \| {defaults.BEACON_S:g} s \|"),
        ("protocol.md", rf"\| member and load report \| {defaults.REPORT_INTERVAL_S:g} s or more often; of an idle"),
        ("protocol.md", rf"\| rank silent to the broker \| {defaults.SILENT_INTERVALS:g} of its intervals \|"),
        ("protocol.md", rf"\| a declared interval counts as \| {defaults.INTERVAL_MIN_S} s to {INTERVAL_MAX_S:g} s \|"),
        ("protocol.md", rf"\| load report believed \| {STALE_S:g} s, or {STALE_INTERVALS:g} of its rank's intervals"),
        ("protocol.md", rf"\| lease of a node at a controller \| {defaults.LEASE_S:g} s \|"),
        ("protocol.md", rf"\| room TTL \| {defaults.ROOM_TTL_S:g} s \|"),
        ("failures.md", rf"`lost` \| {defaults.LEASE_S:g} s \| `--lease-s`"),
        ("failures.md", rf"`hung` \| {ControllerConfig.hang_s:g} s \| `--hang-s`"),
        ("failures.md", rf"\| a load report is believed \| {STALE_S:g} s, or {STALE_INTERVALS:g} of"),
    ],
)  # fmt: skip
def test_the_docs_say_so(page: str, row: str) -> None:
    assert re.search(row, (DOCS / page).read_text("utf-8")), row
