"""Due times: never early, at most a slot late, and nothing is left of what was removed."""

from __future__ import annotations

from retained import retained

from bus.timer_slots import TimerSlots


def test_deadlines_come_due_at_most_a_slot_late_and_never_early() -> None:
    wheel = TimerSlots[str](100.0, step_s=0.05)
    for n in range(100):
        wheel.add(f"r{n}", 100.0 + n / 100)
    now = 100.0
    while len(wheel):
        now += 0.013
        for rid in wheel.take(now):
            due = 100.0 + int(rid[1:]) / 100
            assert due <= now <= due + 0.05 + 0.013 + 1e-6


def test_a_removed_deadline_leaves_nothing_and_one_in_the_past_comes_at_once() -> None:
    wheel = TimerSlots[str]()
    before = retained(wheel)
    wheel.add("a", 3600.0)
    wheel.remove("a", 3600.0)
    assert retained(wheel) <= before
    wheel.take(10.0)
    wheel.add("b", 5.0)
    assert wheel.take(10.1) == ["b"]
    wheel.add("c", 20.0)
    assert wheel.take(10_000_000.0) == ["c"]


def test_a_key_can_be_removed_by_who_does_not_know_its_time() -> None:
    wheel = TimerSlots[str]()
    before = retained(wheel)
    wheel.add("a", 7.0)
    wheel.add("b", 7.0)
    wheel.discard("a")
    assert list(wheel) == ["b"]
    wheel.discard("nobody")
    wheel.discard("b")
    assert retained(wheel) <= before


def test_what_exceeds_the_bound_comes_with_the_next_calls_and_can_be_removed_meanwhile() -> None:
    wheel = TimerSlots[int]()
    for n in range(10):
        wheel.add(n, 1.0 + (n >= 5))
    assert wheel.take(5.0, 3) == [0, 1, 2]
    wheel.remove(3, 1.0)
    wheel.add(10, 0.5)
    assert wheel.take(5.0, 4) == [4, 10, 5, 6]
    wheel.remove(7, 2.0)
    assert wheel.take(5.0, 4) == [8, 9]
    assert len(wheel) == 0
