"""The lockstep model by hand, and its verdict on placements."""

from __future__ import annotations

import pytest

from nodes.own.engines.timing import SimTiming
from pdbus.lab.generator import generate
from pdbus.lab.lockstep import PLACEMENTS, examine
from pdbus.lab.traces import Trace, TraceRequest

TIMING = SimTiming(base_s=1.0, per_prefill_token_s=0.0, per_decode_row_s=0.0, per_context_token_s=0.1)


def test_by_hand() -> None:
    trace = Trace("t", (TraceRequest(0.0, 10, 3), TraceRequest(0.0, 30, 2), TraceRequest(0.5, 5, 2)))
    found = examine(trace, "total_tokens", 2, timing=TIMING)
    # step 1: contexts 10 and 30 -> 4 s, the second request ends; the third (from 4 s on) joins the empty rank;
    # step 2: 11 and 5 -> 2.1 s, all end
    assert found.tpot_mean_s == pytest.approx((6.1 / 2 + 4.0 + 2.1) / 3)
    assert found.imbalance == pytest.approx((3.0 + 1.1) / (2.0 + 0.8))
    assert found.rows == pytest.approx(2.0)


def test_placement_by_tokens_keeps_the_heaviest_rank_light() -> None:
    trace = generate(200, seed=1).scaled(0.05)
    tpot = {name: examine(trace, name, 8).tpot_mean_s for name in PLACEMENTS}
    assert tpot["random"] > tpot["total_requests"] > tpot["total_tokens"]
    assert tpot["step_time"] == pytest.approx(tpot["total_tokens"], rel=0.02)
