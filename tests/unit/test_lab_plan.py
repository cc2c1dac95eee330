"""The planner's search, over runs that are made up: every split, then the rest at the best, then what lies beside."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from bus.errors import ConfigError
from pdbus.commands.plan import command_of, json_of
from pdbus.lab.compare import Result, Run
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Summary
from pdbus.lab.plan import Choice, Found, Plan, plan
from pdbus.lab.traces import Trace, TraceRequest

TRACE = Trace("t", tuple(TraceRequest(0.1 * n, 1000, 100) for n in range(100)))  # a load of 1.0 on one rank


class Ranks:
    """Keeps what `worth` says of a run, and the runs."""

    def __init__(self, best_split: int, best_method: str = "total_tokens", best_order: str = "slo") -> None:
        self.best = best_split, best_method, best_order
        self.steps: list[list[Run]] = []

    def run(self, runs: Sequence[Run]) -> list[Result]:
        self.steps.append([*runs])
        return [self.result(each) for each in runs]

    def result(self, run: Run) -> Result:
        split, method, order = self.best
        kept = 0.9 - 0.05 * abs(run.config.ranks - split)
        kept += 0.01 * (run.method == method) + 0.02 * (run.config.queue_order == order) + 0.0001 * run.config.seed
        figures = dict.fromkeys((field.name for field in fields(Summary)), 1.0)
        figures |= {"slo_attainment": kept, "tpot_p99_s": 0.02}
        return Result(run.method, run.config.seed, Summary(**figures), [], 1.0, [])


def test_every_split_is_tried_once_and_the_rest_at_the_best() -> None:
    ranks = Ranks(best_split=5)
    found = plan([TRACE, TRACE, TRACE], 8, LabConfig(seed=7), ranks.run)
    first, second, third = ranks.steps
    assert [(run.config.ranks, run.config.decode_ranks) for run in first] == [(n, 8 - n) for n in range(1, 8)]
    assert {run.config.seed for run in first} == {7}
    assert {run.config.ranks for run in second} == {5}
    assert len({(run.method, run.config.decode_method, run.config.queue_order) for run in second}) == 8
    assert [run.config.seed for run in second] == [7, 8, 9] * 8
    assert [(run.config.ranks, run.method) for run in third[::3]] == [(4, "total_tokens"), (6, "total_tokens")]
    assert all(run.config.load == 0.0 for step in ranks.steps for run in step), "at the trace's own times"
    best = found.tried[0]
    assert (best.choice.prefill, best.choice.prefill_method, best.choice.queue_order) == (5, "total_tokens", "slo")
    assert best.kept.mean == pytest.approx(0.93 + 0.0008)
    assert best.kept.half_width > 0
    assert [each.choice.prefill for each in found.splits] == [*range(1, 8)]
    assert len(found.tried) == 10


def test_splits_that_cannot_compute_the_prompts_are_not_tried() -> None:
    ranks = Ranks(best_split=1)
    plan([TRACE.scaled(0.1)], 8, LabConfig(), ranks.run)  # ten times as often
    assert ranks.steps[0][0].config.ranks > 1
    with pytest.raises(ConfigError, match=r"4 ranks cannot serve this: its prompts alone take \d+\.\d times what 3 do"):
        plan([TRACE.scaled(0.01)], 4, LabConfig(), ranks.run)


def test_it_goes_on_from_split_to_split_as_long_as_they_get_better() -> None:
    class Steep(Ranks):
        def result(self, run: Run) -> Result:
            if len(self.steps) == 1:
                self.best = (3, *self.best[1:])
            else:
                self.best = (6, *self.best[1:])
            return super().result(run)

    found = plan([TRACE], 8, LabConfig(), Steep(3).run)
    assert found.tried[0].choice.prefill == 6
    assert {each.choice.prefill for each in found.tried} == {2, 3, 4, 5, 6, 7}


def test_decode_admission_is_tried_where_tokens_come_too_slowly() -> None:
    class Slow(Ranks):
        def result(self, run: Run) -> Result:
            found = super().result(run)
            kept = found.summary.slo_attainment + 0.05 * run.config.tpot_admission
            return replace(found, summary=replace(found.summary, slo_attainment=kept, tpot_p99_s=0.08))

    for slo_tpot_s, tried in ((0.05, True), (0.1, False)):
        ranks = Slow(best_split=3)
        best = plan([TRACE], 8, LabConfig(slo_tpot_s=slo_tpot_s), ranks.run).tried[0].choice
        assert (best.prefill, best.queue_order, best.tpot_admission) == (3, "slo", tried)
        admitting = [run.config for step in ranks.steps for run in step if run.config.tpot_admission]
        assert {config.ranks for config in admitting} == ({2, 3, 4} if tried else set())
    assert "order slo with decode admission" in str(replace(best, tpot_admission=True))


def test_the_best_split_may_be_the_last() -> None:
    ranks = Ranks(best_split=7)
    found = plan([TRACE], 8, LabConfig(), ranks.run)
    assert [run.config.ranks for run in ranks.steps[2]] == [6]
    assert found.tried[0].choice.prefill == 7


def test_unified_ranks_are_tried_when_the_split_is_found() -> None:
    """A quarter, half, three quarters and all of them, beside the best split's own proportion."""

    class Together(Ranks):
        def result(self, run: Run) -> Result:
            found = super().result(run)
            kept = 0.99 if run.config.unified_ranks == 4 else found.summary.slo_attainment
            return replace(found, summary=replace(found.summary, slo_attainment=kept))

    ranks = Together(best_split=6)
    found = plan([TRACE, TRACE], 8, LabConfig(), ranks.run, unified=True)
    tried = [(run.config.unified_ranks, run.config.ranks, run.config.decode_ranks) for run in ranks.steps[-1][::4]]
    assert tried == [(8, 0, 0), (6, 1, 1), (4, 3, 1), (2, 4, 2)]
    assert {run.config.queue_order for run in ranks.steps[-1]} == {"slo", "arrival"}
    assert all(run.config.unified_ranks == 0 for step in ranks.steps[:-1] for run in step)
    assert len(plan([TRACE], 2, LabConfig(), Together(1).run, unified=True).tried) == 8 + 2
    best = found.tried[0].choice
    words = "3 + 1 + 4 unified, total_tokens, "
    assert str(best).startswith(words)
    alone = next(each.choice for each in found.tried if each.choice.unified == 8)
    assert str(replace(alone, queue_order="slo")) == "8 unified, total_tokens, order slo"
    command = command_of(Found(best, ()), LabConfig())
    assert "--prefill-method total_tokens --decode-method total_re" in command
    assert "--unified-method total_tokens" in command
    assert command_of(Found(replace(alone, queue_order="arrival"), ()), LabConfig()) == (
        "python -m controller --unified-method total_tokens"
    )


def found(**figures: float) -> Found:
    summary = Summary(**dict.fromkeys((field.name for field in fields(Summary)), 1.0) | figures)
    choice = Choice(1, 1, "cache_aware", "total_tokens", "slo")
    return Found(choice, (Result("cache_aware", 1, summary, [], 1.0, []),))


def test_its_command_is_what_was_found() -> None:
    usual = command_of(found(), LabConfig())
    assert shlex.split(usual)[-4:] == ["--queue-order", "slo", "--ttft-slo-s", f"{LabConfig().slo_ttft_s:g}"]
    searched = command_of(found(), LabConfig(late_tokens=8192, overtake_tokens=1_000_000))
    assert searched == f"{usual} --late-tokens 8192 --overtake-tokens 1000000"


def test_its_json_is_json_where_a_figure_is_none() -> None:
    """As the time per token of outputs of one token."""
    one = found(tpot_mean_s=math.nan, tpot_p99_s=math.nan)
    said = json.loads(json.dumps(json_of(Plan([one], [one])), allow_nan=False))
    assert said["best"]["tpot_mean_s"] is said["best"]["tpot_mean_s_half_width"] is None
