"""Live decision regret: seen when a report acknowledges a dispatch."""

from __future__ import annotations

from typing import Any

from controller_world import EPOCH, World, hello, submit

BIG: dict[str, Any] = {"kv_capacity": 100_000, "max_context": 100_000, "max_running": 100}


def test_regret_is_what_the_chosen_rank_had_queued_beyond_the_best() -> None:
    world = World(unified_method="round_robin")
    nodes = [hello("u", dp_rank, **BIG) for dp_rank in range(2)]
    for node in nodes:
        world.join(node)
    world.report(nodes[0], waiting_tokens=700)
    world.report(nodes[1], waiting_tokens=100)
    world.submit(submit("a", prompt_tokens=50))
    chosen = world.dispatches()[0].dp_rank
    world.now += 1.0
    world.report(nodes[chosen], waiting_tokens=(700, 100)[chosen] + 50, acks=[(EPOCH, 1, 50)])
    tally = world.core.tally()
    assert tally["regret_dispatches"] == 1
    assert tally["regret_tokens"] == (600, 0)[chosen]
    world.submit(submit("b", prompt_tokens=30))
    other = world.dispatches()[1].dp_rank
    assert other != chosen
    world.now += 1.0
    world.report(nodes[other], waiting_tokens=(700, 100)[other] + 30, acks=[(EPOCH, 1, 30)])
    tally = world.core.tally()
    assert tally["regret_dispatches"] == 2
    best_of_the_other = 150 if other == 0 else 130
    assert tally["regret_tokens"] == (600, 0)[chosen] + max(0, (700, 100)[other] - best_of_the_other)


def test_reports_that_acknowledge_nothing_new_are_no_samples_and_samples_are_thinned() -> None:
    world = World(unified_method="round_robin")
    node = hello("u", 0, **BIG)
    world.join(node)
    world.report(node)
    for number in range(5):
        world.submit(submit(f"r{number}"))
        world.report(node, acks=[(EPOCH, number + 1, 10 * (number + 1))])  # all at one moment
        world.report(node, acks=[(EPOCH, number + 1, 10 * (number + 1))])
    assert world.core.tally()["regret_dispatches"] == 1
