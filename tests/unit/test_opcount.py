"""The counter that guards the hot paths counts, and counts the same every time."""

from __future__ import annotations

import sys

from opcount import count


def loop(times: int) -> int:
    total = 0
    for number in range(times):
        total += abs(number)
    return total


def test_the_same_script_counts_the_same() -> None:
    assert count(lambda: loop(50)) == count(lambda: loop(50))


def test_each_turn_of_a_loop_adds_the_same() -> None:
    ten, twenty, thirty = (count(lambda times=times: loop(times)) for times in (10, 20, 30))
    assert twenty.instructions - ten.instructions == thirty.instructions - twenty.instructions > 0
    assert (twenty.c_calls - ten.c_calls, thirty.c_calls - twenty.c_calls) == (10, 10)


def test_tracers_of_others_come_back() -> None:
    before = sys.gettrace(), sys.getprofile()
    count(lambda: loop(3))
    assert (sys.gettrace(), sys.getprofile()) == before
