"""Transitions of the cores: those that a trial makes are counted, and those that nothing makes are seen."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.apart import run
from simulation.run import trial
from simulation.spec import Fault, NodeSpec, RequestSpec, Spec
from simulation.transitions import MAY_BE, Transition, never, watched

NODES = tuple(NodeSpec(f"unified-{n}", "h0", "unified", "unified", 2, n, 1) for n in range(2))
PROMPT = tuple(range(3, 67))  # eight steps until the first token
AGAIN = ("request at its controller", "running", "again", "queued")
HUNG = ("rank at a controller", "", "", "hung")
# both ranks compute prompts when one of them is killed
CRASH = Spec(
    seed=1, tcp=False, hosts=1, nodes=NODES, controllers=1, clients=1, paired=False, settings=(), kv_tokens=256,
    max_running=4, chunk_tokens=8, step_s=0.05, hwm=10_000, retries=6, fickle=False,
    requests=tuple(RequestSpec(n, 1.0 + n / 100, 0, 0, PROMPT, 5) for n in range(4)),
    faults=(Fault(1.2, "crash", "unified-0"),), busy_s=2.0,
)  # fmt: skip


def met_in(spec: Spec) -> Counter[Transition]:
    with watched() as met:
        trial(spec)
    return met


def test_each_transition_that_is_met_is_one_that_may_be() -> None:
    met = met_in(CRASH)
    tables = {each[0] for each in MAY_BE if each[1]}
    assert met[AGAIN] > 0
    assert {each for each in met if each[0] in tables} <= MAY_BE
    silent = {"room at the broker", "rank of itself"}  # unified ranks have no rooms, and none leaves
    assert {each[0] for each in met} == {each[0] for each in MAY_BE} - silent
    assert HUNG in never(met)


def test_a_transition_that_is_cut_is_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AGAIN not in never(met_in(CRASH))
    monkeypatch.setattr("controller.requests.life.verdict", lambda *_: "fail")
    assert AGAIN in never(met_in(CRASH))


def test_nothing_is_watched_but_while_somebody_asks() -> None:
    met = met_in(CRASH)
    before = met.total()
    trial(CRASH)
    assert met.total() == before


def test_a_campaign_lists_them() -> None:
    code, said = run("-m", "simulation.run", "1:3", "--small", "--tables")
    assert code == 0, said
    assert "transitions met" in said
    assert "request at its client: submitted, accepted: running" in said
    assert "never rank at a controller: " in said
