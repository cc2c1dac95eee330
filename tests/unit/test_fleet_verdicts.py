"""What is said of simulated fleets: the one thing that is wrong and its rank, and nothing where all is well."""

from __future__ import annotations

import pytest
from fleet_sim import SHOWN_AFTER_S, Fleet

from pdbus.fleet.history import History
from pdbus.fleet.verdict import Line, lines_of

SAID = {
    "slow rank": {"slow"}, "full rank": {"full"}, "slow link": {"link"}, "queue": {"queue", "full"},
    "cold cache": {"cold"}, "prefill death": {"dead"},
}  # fmt: skip


def watched(situation: str, seed: int) -> tuple[Fleet, list[list[Line]]]:
    """The fleet, and what was said in each second."""
    fleet, history, lines = Fleet(situation, 8, seed), History(), []
    for _ in range(round(fleet.before_s + SHOWN_AFTER_S)):
        history.add(fleet.ask())
        lines.append(lines_of(history, asks_broker=True))
    return fleet, lines


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("situation", SAID)
def test_what_is_wrong_is_said_with_its_rank_and_nothing_before(situation: str, seed: int) -> None:
    fleet, seconds = watched(situation, seed)
    before = round(fleet.before_s) - 1
    assert not any(seconds[:before])
    assert {line.kind for line in seconds[-1]} <= SAID[situation]
    assert sorted(SAID[situation])[-1] in {line.kind for line in seconds[-1]}
    if fleet.odd is not None:
        assert {line.rank for line in seconds[-1]} == {(fleet.odd.instance, fleet.odd.number)}
    else:
        assert "for room at" in seconds[-1][0].text


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("situation", ["all well", "busy but well"])
def test_nothing_is_said_where_all_is_well(situation: str, seed: int) -> None:
    assert not any(watched(situation, seed)[1])
