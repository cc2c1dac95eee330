"""Verdicts on ranks: which sign means what, and that a quiet bus blames nobody."""

from __future__ import annotations

import pytest
from controller_world import load

from bus.wire.messages import NodeState, RankState
from controller.health import Health

KEY = ("i", 0)
LEASE, HANG = 3.0, 10.0


def health(*, idle: bool = True, declared: NodeState = "ready", settle_s: float = 0.0) -> Health:
    health = Health(lease_s=LEASE, hang_s=HANG, settle_s=settle_s, now=0.0)
    health.hello(KEY, 1, declared, idle=idle, now=0.0)
    return health


def state(health: Health, now: float) -> RankState:
    return health.state(health.liveness[KEY], now)


def run(health: Health, until: float, *, connection: bool = True, reports: bool = True, others: bool = True,
        busy: bool = False, moving: bool = True, start: float = 0.0) -> RankState:  # fmt: skip
    """Half a second at a time, with the signs asked for."""
    now, step = start, int(start * 10) if moving else 0
    while now < until:
        now += 0.5
        step += moving
        if connection:
            health.seen(KEY, now)
            health.moved(KEY, step, busy, now)
        if reports:
            health.bus_seen(now)
            health.report(KEY, load(int(now * 2), step=step, running=int(busy)), now)
        if others:
            health.bus_seen(now)
            health.loads_at = now
    return state(health, now)


def test_an_idle_rank_is_ready_at_once_and_a_busy_one_with_its_first_report() -> None:
    assert state(health(), 0.0) == "ready"
    busy = health(idle=False)
    assert state(busy, 0.1) == "starting"
    busy.report(KEY, load(1), 0.2)
    assert state(busy, 0.2) == "ready"


def test_a_rank_that_never_reports_is_taken_after_a_lease_when_there_is_no_bus() -> None:
    lonely = health(idle=False)
    assert run(lonely, LEASE + 0.5, reports=False, others=False) == "ready"


@pytest.mark.parametrize("declared", ["starting", "draining", "gone"])
def test_what_the_node_declares_counts(declared: NodeState) -> None:
    assert state(health(declared=declared), 0.0) == declared


def test_all_signs_well_is_ready() -> None:
    assert run(health(), 60.0, busy=True) == "ready"


def test_silence_of_the_connection_is_lost_within_the_lease() -> None:
    rank = health()
    assert run(rank, LEASE, connection=False) == "ready"
    assert state(rank, LEASE + 0.1) == "lost"
    rank.seen(KEY, LEASE + 0.2)
    assert state(rank, LEASE + 0.2) == "ready"


def test_a_connection_that_is_gone_is_lost_at_once() -> None:
    rank = health()
    rank.unreachable(KEY, 1.0)
    assert state(rank, 0.0) == "lost"
    rank.hello(KEY, 1, "ready", idle=True, now=0.1)
    assert state(rank, 0.1) == "ready"


def test_cut_off_from_a_living_bus_is_silent() -> None:
    rank = health()
    assert run(rank, LEASE, reports=False) == "ready"
    assert run(rank, LEASE + 1, reports=False, start=LEASE) == "silent"
    rank.report(KEY, load(1), LEASE + 1)
    assert state(rank, LEASE + 1) == "ready"


def test_a_bus_that_is_quiet_for_all_blames_nobody_not_even_on_its_return() -> None:
    rank = health()
    assert run(rank, 5.0) == "ready"
    assert run(rank, 60.0, reports=False, others=False, start=5.0) == "ready"
    rank.bus_seen(60.5)  # the broker is back, the rank has not reported yet
    assert state(rank, 60.5) == "ready"
    assert run(rank, 60.5 + LEASE + 1, reports=False, start=60.5) == "silent"


def test_busy_without_a_step_is_hung_and_idle_without_one_is_not() -> None:
    assert run(health(), HANG * 3, moving=False) == "ready"
    rank = health()
    assert run(rank, HANG, busy=True, moving=False) == "ready"
    assert run(rank, HANG + 1, busy=True, moving=False, start=HANG) == "hung"
    rank.moved(KEY, 10**6, True, HANG + 2)
    assert state(rank, HANG + 2) == "ready"


def test_a_pong_overtaken_by_a_report_is_no_movement() -> None:
    rank = health()
    rank.moved(KEY, 7, True, 0.0)
    for n in range(1, 13):
        rank.seen(KEY, float(n))
        rank.moved(KEY, 5 + n % 2, True, float(n))
    assert state(rank, 12.0) == "hung"


def test_an_operators_drain_lasts_for_the_epoch() -> None:
    rank = health()
    rank.drain(KEY)
    rank.hello(KEY, 1, "ready", idle=True, now=0.1)
    assert state(rank, 0.1) == "draining"
    rank.hello(KEY, 2, "ready", idle=True, now=0.2)
    assert state(rank, 0.2) == "ready"


def test_changes_are_told_once() -> None:
    rank = health()
    change = rank.assess(KEY, 0.0)
    assert change is not None
    assert (change.old, change.new) == ("starting", "ready")
    assert rank.assess(KEY, 0.1) is None
    changes = [c.new for tenth in range(1, 10 * int(LEASE + 2)) for c in rank.sweep(tenth / 10)]
    assert changes == ["lost"]
    assert rank.sweep(LEASE + 2) == []


def test_the_picture_settles_when_every_known_rank_has_reported_or_after_a_lease() -> None:
    rank = health(idle=False, settle_s=0.5)
    assert not rank.settled(0.6)
    rank.report(KEY, load(1), 0.7)
    assert rank.settled(0.7)
    assert not health(settle_s=0.5).settled(0.4)
    assert health(settle_s=0.5).settled(0.5)
    assert health(idle=False, settle_s=0.5).settled(LEASE)


def test_the_first_word_of_a_rank_after_an_absence_of_our_own_does_not_show_it_hung() -> None:
    paused = health(idle=False)
    paused.report(KEY, load(1, step=1, running=1), 0.1)
    paused.sweep(0.2)
    now = HANG + LEASE
    paused.hello(KEY, 1, "ready", idle=False, now=now)  # before the next sweep
    assert paused.assess(KEY, now) is None


def test_an_absence_of_our_own_is_held_against_nobody() -> None:
    paused = health(idle=False)
    paused.report(KEY, load(1, step=1, running=1), 0.1)
    assert paused.sweep(0.2)[0].new == "ready"
    for pause in (1, 2, 3):  # the process was stopped for ten leases, three times
        now = pause * 10 * LEASE
        assert not paused.sweep(now), "nobody is lost or hung for what we did not hear"
        paused.seen(KEY, now + 0.1)
        paused.moved(KEY, 1 + pause, True, now + 0.1)
        assert not paused.sweep(now + 0.2)
    changes = [change for tenth in range(3, 10 * int(LEASE + 2)) for change in paused.sweep(now + tenth / 10)]
    assert [change.new for change in changes] == ["lost"], "but who then stays silent is lost within its lease"
