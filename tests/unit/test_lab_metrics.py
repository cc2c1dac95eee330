"""Figures of a run, against a run small enough to work out by hand."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming
from pdbus.lab.capacity import offered_load, stretch
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import quantile, summarise
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.traces import Trace, TraceRequest


def test_quantile() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50.0, 99.0, 100.0, 1.0]
    assert math.isnan(quantile([], 0.5))


def test_summary_by_hand() -> None:
    courses = [
        RequestOutcome(
            TraceRequest(0.0, 1000, 11),
            0,
            0,
            arrived_s=0.0,
            first_token_s=1.0,
            finished_s=2.0,
            cached_tokens=500,
            regret_tokens=4,
        ),
        RequestOutcome(
            TraceRequest(1.0, 3000, 1),
            1,
            0,
            arrived_s=1.0,
            first_token_s=4.0,
            finished_s=4.0,
            cached_tokens=0,
            regret_tokens=0,
        ),
        RequestOutcome(
            TraceRequest(2.0, 1000, 5), 0, 1, arrived_s=2.0, first_token_s=2.5, finished_s=2.7, cached_tokens=500
        ),
    ]
    outcome = Outcome("x", courses, 1.0, load=[array("q", [30, 10]), array("q", [0, 0]), array("q", [10, 10])])
    s = summarise(outcome, LabConfig(ranks=2, slo_ttft_s=2.0, slo_tpot_s=0.06))
    assert s.ttft_mean_s == pytest.approx((1.0 + 3.0 + 0.5) / 3)
    assert (s.ttft_p50_s, s.ttft_p99_s) == (1.0, 3.0)
    assert s.tpot_mean_s == pytest.approx((0.1 + 0.05) / 2)
    assert s.slo_attainment == pytest.approx(1 / 3)  # the first is slow by TPOT, the second by TTFT
    assert s.cache_hit_rate == pytest.approx(0.2)
    assert s.imbalance == pytest.approx(2 * (30 + 10) / 60)
    assert s.regret_mean_tokens == 2.0  # over those of which it is known


def test_the_shares_of_trips_are_those_that_the_controller_counts_where_requests_do_not_say() -> None:
    courses = [
        RequestOutcome(TraceRequest(0.0, 10, 2), 0, 0, moved_tokens=10),
        RequestOutcome(TraceRequest(0.0, 10, 2), 0, 1),
    ]
    config = LabConfig(ranks=2, decode_ranks=2, decode_cache=True)
    said = summarise(Outcome("x", courses, 1.0), config)
    assert (said.whole_share, said.delta_share, said.moved_share) == (0.5, 0.0, 0.5)
    counted = summarise(
        Outcome("x", courses, 1.0, trips={"at_decode": 0, "delta": 1, "read_back": 1, "whole": 0}), config
    )
    assert (counted.whole_share, counted.delta_share, counted.back_share) == (0.0, 0.5, 0.5)
    assert math.isnan(counted.moved_share)
    assert math.isnan(counted.read_share)


def test_load_is_the_share_of_time_that_cold_prompts_would_take() -> None:
    timing = SimTiming(base_s=0.0, per_prefill_token_s=1e-3, per_decode_row_s=0.0, per_context_token_s=0.0)
    trace = Trace("t", tuple(TraceRequest(float(n), 1000, 1) for n in range(11)))  # 11 s of work in 10 s
    config = LabConfig(ranks=2, load=0.5, timing=timing)
    assert offered_load(trace, config) == pytest.approx(0.55)
    assert stretch(trace, config).duration_s == pytest.approx(11.0)
    assert stretch(trace, LabConfig(ranks=2, load=0.0, timing=timing)).duration_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranks": 0}, "--ranks must be at least 1"),
        ({"load": -1.0}, "--load must not be negative"),
        ({"load": float("nan")}, "--load must not be negative"),
        ({"report_loss": 1.0}, "--report-loss must lie in 0..1"),
        ({"report_interval_s": 0.0}, "--report-interval-s must be at least"),
        ({"queue_order": "random"}, "--queue-order is arrival or slo"),
        ({"overtake_tokens": 0}, "--overtake-tokens must be at least 1"),
        ({"controllers": 65}, "--controllers must be at most 64"),
        ({"ranks": 10**8}, "--ranks must be at most 4096"),
        ({"decode_ranks": 4097}, "--decode-ranks must be at most 4096"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LabConfig(**settings)
