"""RoomTable: precedence of claims, exact TTL, limits, the sweep."""

from __future__ import annotations

import gc

import pytest

from bus.broker.rooms import REMOVAL_COST, SHARDS, SWEEPS_PER_TTL, Owner, RoomTable
from bus.wire.messages import Location

TTL_S = 120.0


def owner(dp_rank: int = 0, epoch: int = 1) -> Owner:
    return Owner(Location("prefill-0", dp_rank, epoch, f"tcp://10.0.0.7:{7000 + dp_rank}"))


def test_a_claim_counts_until_its_ttl_and_not_a_moment_longer() -> None:
    """M29."""
    table, rank = RoomTable(TTL_S), owner()
    assert table.register(rank, 7, 1, 10.0) == "new"
    claim = table.find(7, 129.999)
    assert claim is not None
    assert claim.owner.location == rank.location
    assert table.find(7, 130.0) is None


def test_registering_again_refreshes() -> None:
    """M30."""
    table, rank = RoomTable(TTL_S), owner()
    table.register(rank, 7, 1, 0.0)
    assert table.register(rank, 7, 1, 100.0) == "refreshed"
    assert table.find(7, 219.0) is not None
    assert table.find(7, 220.0) is None
    assert table.size == rank.rooms == 1


def test_the_higher_attempt_wins_whoever_comes_first() -> None:
    """M31."""
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 1, 0.0)
    assert table.register(second, 7, 2, 1.0) == "replaced"
    assert table.register(first, 7, 1, 2.0) == "stale"
    claim = table.find(7, 3.0)
    assert claim is not None
    assert (claim.owner, claim.attempt) == (second, 2)
    assert (first.rooms, second.rooms) == (0, 1)


def test_one_attempt_from_two_live_ranks_is_refused() -> None:
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 1, 0.0)
    assert table.register(second, 7, 1, 1.0) == "conflict"
    claim = table.find(7, 2.0)
    assert claim is not None
    assert claim.owner is first
    assert table.counts["conflicts"] == 1


def test_a_silent_owner_yields_its_room_but_keeps_it_until_then() -> None:
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 1, 0.0)
    first.holds = False
    assert table.find(7, 1.0) is not None
    assert table.register(second, 7, 1, 2.0) == "replaced"


def test_a_retired_owners_rooms_vanish_at_once_and_their_memory_soon() -> None:
    """M20."""
    table, first, second = RoomTable(TTL_S), owner(0, epoch=1), owner(0, epoch=2)
    for room in range(5000):
        table.register(first, room, 1, 0.0)
    table.retire(first)
    assert table.alive == 0
    assert table.find(7, 0.1) is None
    assert table.register(second, 7, 1, 0.2) == "new"
    for turn in range(100):
        table.expire(0.2 + turn / 1000, budget=4096)
    assert (table.size, table.alive, first.rooms, second.rooms) == (1, 1, 0, 1)


def test_drop_takes_only_the_owners_own_claim() -> None:
    """M34."""
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 2, 0.0)
    assert not table.drop(second, 7, 2)
    assert not table.drop(first, 7, 1)
    assert not table.drop(first, 8, 1)
    assert table.drop(first, 7, 2)
    assert table.counts["dropped"] == 1
    assert table.find(7, 1.0) is None
    assert table.size == table.alive == first.rooms == 0


def test_a_failure_is_remembered_until_a_new_claim() -> None:
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 1, 0.0)
    assert table.fail(first, 7, 1, "prefill_failed", 1.0) == "refreshed"
    claim = table.find(7, 2.0)
    assert claim is not None
    assert claim.code == "prefill_failed"
    assert table.find(7, 121.0) is None
    assert table.register(second, 7, 1, 2.0) == "replaced"
    claim = table.find(7, 3.0)
    assert claim is not None
    assert claim.code == "ok"


def test_a_failure_of_somebody_elses_room_is_ignored() -> None:
    """M34."""
    table, first, second = RoomTable(TTL_S), owner(0), owner(1)
    table.register(first, 7, 1, 0.0)
    assert table.fail(second, 7, 1, "prefill_failed", 1.0) == "stale"
    claim = table.find(7, 2.0)
    assert claim is not None
    assert claim.code == "ok"


def test_a_failure_needs_no_registration_before_it() -> None:
    table, rank = RoomTable(TTL_S), owner()
    assert table.fail(rank, 7, 1, "engine_failed", 0.0) == "new"
    claim = table.find(7, 1.0)
    assert claim is not None
    assert claim.code == "engine_failed"


def test_limits_refuse_what_is_over_and_free_what_is_dropped() -> None:
    table, first, second = RoomTable(TTL_S, max_rooms=3, max_rooms_per_publisher=2), owner(0), owner(1)
    assert [table.register(first, room, 1, 0.0) for room in (1, 2, 3)] == ["new", "new", "full"]
    assert table.register(second, 3, 1, 0.0) == "new"
    assert table.register(second, 4, 1, 0.0) == "full"
    assert table.register(first, 1, 1, 0.0) == "refreshed"
    assert table.register(first, 3, 2, 0.0) == "full", "taking a room over counts against the taker"
    table.drop(first, 1, 1)
    assert table.register(second, 4, 1, 0.0) == "new"
    assert table.counts["refused"] == 3


def test_the_sweep_keeps_to_its_budget_and_gives_all_memory_back() -> None:
    table, rank = RoomTable(TTL_S), owner()
    for room in range(50_000):
        table.register(rank, room, 1, 0.0)
    largest_shard = 50_000 // SHARDS + 1
    now, most, turns = TTL_S, 0, 0
    while table.size:
        now += 0.025
        most = max(most, table.expire(now, budget=400))
        turns += 1
        assert turns < 4000
    assert most <= 400 // (1 + REMOVAL_COST) + largest_shard
    assert table.alive == rank.rooms == 0
    assert table.counts["expired"] == 50_000


def test_idle_sweeping_visits_each_claim_a_fixed_number_of_times() -> None:
    table, rank = RoomTable(TTL_S), owner()
    table.register(rank, 7, 1, 0.0)
    removed_at = next(step * 0.5 for step in range(1000) if table.expire(step * 0.5))
    assert TTL_S <= removed_at <= TTL_S * (1 + 1 / SWEEPS_PER_TTL) + 0.5


def test_rooms_of_one_message_share_a_claim() -> None:
    table, rank = RoomTable(TTL_S), owner()
    table.register(rank, 1, 1, 5.0)
    table.register(rank, 2, 1, 5.0)
    assert table.find(1, 6.0) is table.find(2, 6.0)


def test_a_collection_takes_no_longer_for_all_the_rooms() -> None:
    """A million of them would stop the broker for a moment each time."""
    table, rank = RoomTable(TTL_S), owner()
    before = len(gc.get_objects())
    for room in range(10_000):
        table.register(rank, room, 1, room * 1e-6)
    assert len(gc.get_objects()) - before < 100


@pytest.mark.parametrize("step", [SHARDS, 8, 1])
def test_any_pattern_of_room_numbers_is_kept(step: int) -> None:
    table, rank = RoomTable(TTL_S), owner()
    for number in range(1000):
        table.register(rank, number * step, 1, 0.0)
    assert all(table.find(number * step, 1.0) for number in range(1000))
