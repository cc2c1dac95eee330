"""Watches: ended exactly once, by an answer, a deadline, an unwatch or a lost peer."""

from __future__ import annotations

from bus.broker.watches import GRAIN_S, Watches


def test_take_ends_every_watch_of_a_room() -> None:
    watches = Watches()
    watches.add(b"a", 1, 7, 10.0)
    watches.add(b"a", 2, 7, 10.0)
    watches.add(b"b", 1, 7, 10.0)
    watches.add(b"b", 1, 8, 10.0)
    assert sorted(watches.take(7)) == [(b"a", 1), (b"a", 2), (b"b", 1)]
    assert watches.take(7) == []
    assert watches.size == 1
    assert watches.due(11.0) == [(b"b", 1, 8)]
    assert watches.size == 0


def test_a_deadline_is_kept_to_within_the_grain_and_never_early() -> None:
    watches = Watches()
    watches.add(b"a", 1, 7, 1.01)
    assert watches.due(1.009) == []
    assert watches.due(1.01 + GRAIN_S) == [(b"a", 1, 7)]
    assert watches.due(99.0) == []


def test_asking_again_moves_the_deadline() -> None:
    watches = Watches()
    watches.add(b"a", 1, 7, 1.0)
    watches.add(b"a", 1, 7, 5.0)
    assert watches.size == 1
    assert watches.due(4.9) == []
    assert watches.due(5.1) == [(b"a", 1, 7)]


def test_unwatch_is_for_the_peer_that_says_so() -> None:
    watches = Watches()
    watches.add(b"a", 1, 7, 1.0)
    watches.add(b"b", 1, 7, 1.0)
    assert watches.drop(b"a", [7, 9]) == 1
    assert watches.take(7) == [(b"b", 1)]


def test_a_lost_peer_leaves_nothing_behind() -> None:
    watches = Watches()
    for room in range(100):
        watches.add(b"a", 1, room, 1.0)
    watches.add(b"b", 1, 5, 1.0)
    assert watches.forget(b"a") == 100
    assert watches.forget(b"a") == 0
    assert watches.due(2.0) == [(b"b", 1, 5)]
    assert 5 not in watches


def test_limits_per_peer_and_in_total() -> None:
    watches = Watches(max_per_peer=2, max_total=3)
    assert watches.fits(b"a", 2)
    assert not watches.fits(b"a", 3)
    watches.add(b"a", 1, 1, 1.0)
    watches.add(b"a", 1, 2, 1.0)
    assert not watches.fits(b"a", 1)
    assert watches.fits(b"b", 1)
    assert not watches.fits(b"b", 2)


def test_a_budget_bounds_a_turn_and_the_rest_follows() -> None:
    watches = Watches()
    for room in range(10):
        watches.add(b"a", 1, room, 1.0)
    ended = [watches.due(2.0, budget=4) for _ in range(4)]
    assert [len(some) for some in ended] == [4, 4, 2, 0]
    assert len({watch for some in ended for watch in some}) == 10


def test_many_rounds_leave_no_residue() -> None:
    watches = Watches()
    for turn in range(1000):
        watches.add(b"a", 1, turn, turn * 0.01 + 30.0)
        watches.take(turn)
        watches.due(turn * 0.01)
    assert watches.size == 0
    assert not watches._due._slots
    assert watches.due(100.0) == []
    assert not watches._by_room
    assert not watches._by_peer
