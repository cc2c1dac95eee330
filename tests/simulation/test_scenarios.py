"""Some scenarios (`scenarios.toml`) end as they state, in the simulation and with real processes.

`make scenarios` plays all of them both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from simulation.processes import processes
from simulation.scenario import Play, Scenario, Verdict, scenarios
from simulation.simulated import simulated

ALL = scenarios()
QUICK = [each for each in ALL if each.quick]


@pytest.mark.fault
@pytest.mark.parametrize("scenario", QUICK, ids=lambda each: each.name)
def test_a_scenario_ends_the_same_simulated_and_with_real_processes(scenario: Scenario, tmp_path: Path) -> None:
    with simulated(scenario.shape) as stage:
        assert Play(scenario, stage).run() == Verdict(scenario.expect, ())
    with processes(scenario.shape, tmp_path) as cluster:
        assert Play(scenario, cluster).run() == Verdict(scenario.expect, ())


def test_ranks_that_give_up_their_start_have_not_died_with_what_they_were_given() -> None:
    """Controllers are there, and send requests; the bus is not."""
    shape = next(each.shape for each in ALL if each.shape.name == "pairs_at_two")
    with simulated(shape, joined=False) as stage:
        stage.pause("broker")
        asked = stage.begin("a", (5, 6, 7), {"max_tokens": 20, "ignore_eos": True}, 0, 1)
        stage.until(lambda: stage.world.by_name["decode-0"].starts == 4 or not asked.lives, "they gave up three times")
        stage.resume("broker")
        stage.until(lambda: not asked.lives, "it ends")
    assert asked.result is not None
    assert asked.result.code != "poison"


def test_each_scenario_has_a_name_of_its_own_and_states_each_end() -> None:
    assert len({each.name for each in ALL}) == len(ALL)
    for scenario in ALL:
        asked = {step.split()[1] for step in scenario.steps if step.startswith("ask ")}
        assert asked == set(scenario.expect), scenario.name


def test_a_verdict_tells_what_is_odd_of_a_request() -> None:
    (scenario,) = [each for each in ALL if each.name == "nothing befalls"]
    with simulated(scenario.shape) as stage:
        play = Play(scenario, stage)
        assert play.run() == Verdict(scenario.expect, ())
    asked = play.asked["a"]
    assert asked.result is not None
    asked.update((5,))
    assert asked.odd() == "a ended 2 times"
    asked.ends = 1
    assert "tokens of another" in asked.odd()
    del asked.ids[10:]
    asked.result = replace(asked.result, ids=tuple(asked.ids))
    assert asked.odd() == "a is not whole: 10 of 20"
