"""The highest rate that keeps a share: bisection over runs that are made up, and over real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from bus.errors import ConfigError
from pdbus.lab.compare import Result, Run, compare
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.keep import PRECISION, WIDEST, keep, search
from pdbus.lab.metrics import Summary, estimate
from pdbus.lab.tables import markdown_of
from pdbus.lab.traces import Trace, TraceRequest

TRACE = Trace("t", tuple(TraceRequest(0.5 * n, 1000, 100) for n in range(101)))
CONFIG = LabConfig(rate=1.0)


def found(limit: float, start: float, share: float = 0.9) -> tuple[float, list[float]]:
    """What is found, and the rates that were tried, where all rates up to `limit` keep more than the share."""
    searching, tried, kept = search(share, start), [], None
    while True:
        try:
            tried.append(searching.send(kept))  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value, tried
        kept = 0.95 if tried[-1] <= limit else 0.85


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 1.01, 2.0, 3.7, 200.0])
def test_the_highest_rate_is_found_wherever_it_lies(limit: float) -> None:
    rate, tried = found(limit, 1.0)
    assert limit / PRECISION <= rate <= limit
    assert len(tried) < 18
    assert tried[0] == 1.0


def test_the_search_ends_where_all_rates_keep_it_and_where_none_does() -> None:
    assert found(math.inf, 2.0)[0] == 2.0 * WIDEST
    assert found(0.0, 2.0)[0] == 0.0


class Ranks:
    """Runs that keep more than asked for up to a limit of their method and seed."""

    def __init__(self, limits: dict[str, float]) -> None:
        self.limits = limits
        self.calls: list[int] = []

    def run(self, runs: Sequence[Run]) -> list[Result]:
        self.calls.append(len(runs))
        return [self.result(each) for each in runs]

    def result(self, run: Run) -> Result:
        kept = 0.95 if run.config.rate <= self.limits[run.method] * run.config.seed else 0.85
        figures = dict.fromkeys((field.name for field in fields(Summary)), 1.0) | {"slo_attainment": kept}
        return Result(run.method, run.config.seed, Summary(**figures), [], 1.0, [])


def test_each_method_and_seed_has_its_own_search_and_seeds_are_pairs() -> None:
    """Seeds differ by much and methods by the same factor: the ratio has a narrow interval, the rates a wide one."""
    ranks = Ranks({"round_robin": 1.0, "total_tokens": 3.0})
    runs = [Run(TRACE, method, replace(CONFIG, seed=seed)) for method in ranks.limits for seed in (1, 2, 3)]
    results = keep(runs, 0.9, ranks.run)
    assert [(each.method, each.seed) for each in results] == [(run.method, run.config.seed) for run in runs]
    for result in results:
        limit = ranks.limits[result.method] * result.seed
        assert limit / PRECISION <= result.summary.kept_rate_per_s <= limit
        assert result.summary.slo_attainment == 0.95
    ratio = estimate([result.summary.kept_ratio for result in results[3:]])
    assert ratio.mean == pytest.approx(3.0, rel=0.03)
    assert ratio.half_width < 0.1 < estimate([result.summary.kept_rate_per_s for result in results[3:]]).half_width
    assert {result.summary.kept_ratio for result in results[:3]} == {1.0}
    assert max(ranks.calls) == ranks.calls[0] == len(runs)
    heading, _, first, second = markdown_of(results).splitlines()
    assert "| highest rate/s | to the first |" in heading
    assert " ±" in first
    assert " ±" in second


def test_where_no_rate_is_low_enough_that_is_said() -> None:
    with pytest.raises(ConfigError, match=r"total_tokens seed 1 keeps 90% at no rate from 0\.0039 starts/s on"):
        keep([Run(TRACE, "total_tokens", CONFIG)], 0.9, Ranks({"total_tokens": 0.0}).run)


def test_a_rate_that_is_found_keeps_its_share_and_a_higher_one_does_not() -> None:
    trace = generate(60, seed=3)
    config = LabConfig(ranks=2, decode_ranks=2, slo_ttft_s=5.0)
    (result,) = keep([Run(trace, "total_tokens", config)], 0.9, compare)
    rate = result.summary.kept_rate_per_s
    assert result.summary.slo_attainment >= 0.9
    again, higher = compare([Run(trace, "total_tokens", replace(config, rate=each)) for each in (rate, rate * 1.5)])
    assert again.ttfts == result.ttfts
    assert higher.summary.slo_attainment < 0.9
