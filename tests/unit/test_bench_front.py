"""`front`: the engine that both servers have behind them, and what becomes of the figures."""

from __future__ import annotations

import pytest

from benchmarks import front
from benchmarks.front_engines import IDLE_S, STEP_S, NextToken, Script
from benchmarks.harness import Scope


def test_the_first_token_is_said_at_once_and_the_others_are_said_together_each_step() -> None:
    script: Script[str] = Script()
    assert script.wait_s(0.0) == IDLE_S
    script.begin("a", 3)
    assert script.wait_s(0.0) == 0.0
    assert script.take(0.0) == [NextToken("a", True, False)]
    script.begin("b", 2)
    assert script.take(0.001) == [NextToken("b", True, False)]
    assert script.wait_s(0.004) == pytest.approx(STEP_S - 0.004)
    assert script.take(0.004) == []
    assert sorted(script.take(STEP_S)) == [NextToken("a", False, False), NextToken("b", False, True)]
    assert script.take(2 * STEP_S) == [NextToken("a", False, True)]
    assert script.wait_s(2 * STEP_S) == IDLE_S


def test_a_request_that_was_ended_says_no_more() -> None:
    script: Script[str] = Script()
    script.begin("a", 2)
    script.end("a")
    assert script.take(0.0) == []
    assert script.wait_s(0.0) == IDLE_S


class Server:
    """A process whose processor time the test moves."""

    us = 0.0

    def cpu_s(self) -> float:
        return self.us / 1e6


class Load:
    """The clients: a request costs each server what it does, and one begins later than the other."""

    def __init__(self, servers: dict[int, tuple[Server, float, float, float]]) -> None:
        self.servers = servers

    def ask(self, port: int, tokens: int, count: int, connections: int, output: int) -> dict[str, object]:
        server, request_us, token_us, first_us = self.servers[port]
        server.us += count * (request_us + token_us * (output - 1))
        return {"first_us": [first_us] * count, "events": count * output}


def test_a_request_costs_its_tokens_after_the_first_less_and_the_first_token_is_later_by_the_difference() -> None:
    bus, own = Server(), Server()
    load = Load({1: (bus, 2200.0, 110.0, 3500.0), 2: (own, 2000.0, 88.0, 3000.0)})
    sides = [front.Side("bus", 1, bus), front.Side("own", 2, own)]  # type: ignore[arg-type]
    for side in sides * 2:
        front._measure(side, load, 128, Scope(quick=True))  # type: ignore[arg-type]
    rows = {row.metric: row for row in front._rows(128, [(sides[0], sides[1])])}
    assert rows[front.REQUEST].value == pytest.approx(2200)
    assert rows[front.REQUEST].ratio == pytest.approx(1.1)
    assert rows[front.REQUEST].met
    assert rows[front.TOKEN].value == pytest.approx(110)
    assert not rows[front.TOKEN].met
    later = rows["first token later by"]
    assert (later.value, later.met) == (pytest.approx(0.5), True)


def test_the_interval_is_around_the_median_and_the_narrower_the_more_alike_the_turns_are() -> None:
    low, high = front.interval([[1.0, 1.1, 1.2, 1.3, 1.4] * 4])
    assert 1.0 < low < 1.2 < high < 1.4
    assert front.interval([[1.1] * 20]) == (1.1, 1.1)


def test_the_interval_is_as_wide_as_the_starts_differ() -> None:
    assert front.interval([[1.0] * 5, [1.2] * 5, [1.1] * 5, [1.1] * 5]) == (1.0, 1.2)


def test_the_figures_of_all_starts_count() -> None:
    pairs = []
    for value in (1.0, 2.0, 6.0):
        sides = [front.Side(name, 0, Server()) for name in ("bus", "own")]  # type: ignore[arg-type]
        for side, factor in zip(sides, (3, 1), strict=True):
            for metric in (front.REQUEST, front.TOKEN, front.EVENTS, front.FIRST):
                side.note(128, metric, value * factor)
        pairs.append((sides[0], sides[1]))
    rows = {row.metric: row for row in front._rows(128, pairs)}
    assert (rows[front.REQUEST].value, rows[front.REQUEST].floor) == (6.0, 2.0)
    assert rows["first token later by"].value == 4.0
