"""Ranks as they are in the lab: unified ranks, and mixtures of all three roles, against sums made by hand."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming
from pdbus.lab.choosers import METHODS
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import summarise
from pdbus.lab.outcome import Outcome
from pdbus.lab.simulate import simulate, unified_of
from pdbus.lab.traces import Trace, TraceRequest

TIMING = SimTiming(base_s=1.0, per_prefill_token_s=0.25, per_decode_row_s=0.125, per_context_token_s=1 / 1024)
ALONE = LabConfig(
    ranks=0, decode_ranks=0, unified_ranks=1, load=0.0, hop_s=0.0, chunk_tokens=64, timing=TIMING,
    unified_kv_tokens=16 * 200,
)  # fmt: skip
FAR = TraceRequest(500.0, 16, 1)  # a trace has two requests


def drawn(count: int, seed: int = 5) -> Trace:
    """A trace with shared prefixes, by whole numbers and products alone, so that it is the same on each machine."""
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at += 0.4 * rng.random()
        blocks = rng.randrange(1, 24)
        hashes = tuple(range(blocks // 2)) + tuple(rng.getrandbits(60) for _ in range(blocks - blocks // 2))
        requests.append(TraceRequest(at, 512 * blocks + rng.randrange(512), rng.randrange(1, 200), hashes))
    return Trace("drawn", tuple(requests))


def digest(outcome: Outcome) -> str:
    """A short name of all that an outcome of pairs says, its times to a nanosecond: the sum of floats is not the same
    in all versions of Python."""
    courses = [
        (
            course.prefill_rank, course.decode_rank, round(course.first_token_s, 9), round(course.finished_s, 9),
            course.cached_tokens, course.regret_tokens, round(course.arrived_s, 9),
        )
        for course in outcome.courses
    ]  # fmt: skip
    load = [[*row] for row in outcome.load], [[*row] for row in outcome.decode_load]
    busy = round(outcome.prefill_busy, 9), round(outcome.decode_busy, 9), round(outcome.ended_s, 9)
    return hashlib.sha256(repr((courses, load, busy)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("method", "settings", "found"),
    [
        ("cache_aware", {"report_loss": 0.1, "controllers": 2, "report_delay_s": 0.05}, "8828d756228519dc"),
        ("total_tokens", {"load": 1.3, "queue_order": "slo", "tpot_admission": True, "first_at_decode": True,
                          "decode_ranks": 1, "slo_tpot_s": 0.015}, "d459a6dad8a4c703"),
        ("late_cache", {"decode_ranks": 0, "controllers": 2}, "76a0ff810b406b96"),
        ("vllm_counts", {"ranks": 2, "load": 1.0}, "ccf83c25de83b44d"),
        ("oracle_cache", {"ranks": 2, "concurrency": 8}, "f0aff2ac829e922c"),
    ],
)  # fmt: skip
def test_pairs_alone_have_the_outcomes_that_they_had_before_there_were_mixtures(
    method: str, settings: dict[str, object], found: str
) -> None:
    config = replace(LabConfig(ranks=4, decode_ranks=4), **settings)  # type: ignore[arg-type]
    assert digest(simulate(drawn(60), method, config)) == found


# --- unified ranks ----------------------------------------------------------------------------------------------


def test_a_unified_rank_alone_is_the_sum_of_its_steps() -> None:
    """A prompt of 150 tokens takes three chunks, each behind what is computed; then come nine steps of a row each."""
    course = simulate(Trace("t", (TraceRequest(0.0, 150, 10), FAR), 16), "round_robin", ALONE).courses[0]
    first_s = sum(TIMING.step_s(tokens, 0, start) for tokens, start in ((64, 0), (64, 64), (22, 128)))
    steps_s = sum(TIMING.step_s(0, 1, 150 + number) for number in range(9))
    assert course.first_token_s == pytest.approx(first_s, rel=1e-12)
    assert course.finished_s == pytest.approx(first_s + steps_s, rel=1e-12)
    assert (course.prefill_rank, course.decode_rank, course.unified_rank) == (-1, -1, 0)


def test_its_messages_take_three_hops() -> None:
    """Client to controller, controller to rank, and tokens from the rank to the client."""
    config = replace(ALONE, hop_s=0.5, timing=SimTiming(1.0, 0.0, 0.0, 0.0))
    course = simulate(Trace("t", (TraceRequest(0.0, 16, 3), FAR), 16), "round_robin", config).courses[0]
    assert (course.first_token_s, course.finished_s) == (2.5, 4.5)


def test_one_chunk_in_one_batch_makes_the_step_of_all_longer() -> None:
    """One request decodes. The prompt of another comes within its third decode step, and is computed in the fourth."""
    one_s = TIMING.step_s(16, 0, 0)
    steps_s = [TIMING.step_s(0, 1, 16 + number) for number in range(3)]
    came_s = one_s + sum(steps_s) - 0.5
    mixed_s = TIMING.step_s(48, 1, 16 + 3)
    both_s = TIMING.step_s(0, 2, (16 + 4) + 48)
    trace = Trace("t", (TraceRequest(0.0, 16, 7), TraceRequest(came_s, 48, 2)), 16)
    first, second = simulate(trace, "round_robin", ALONE).courses
    chunk_s = one_s + sum(steps_s) + mixed_s
    assert first.first_token_s == pytest.approx(one_s, rel=1e-12)
    assert second.first_token_s == pytest.approx(chunk_s, rel=1e-12)
    assert second.finished_s == pytest.approx(chunk_s + both_s, rel=1e-12)
    assert first.finished_s == pytest.approx(chunk_s + both_s + TIMING.step_s(0, 1, 16 + 5), rel=1e-12)


def test_a_unified_rank_finds_its_own_outputs_in_the_next_turn() -> None:
    """40 + 24 tokens fill four blocks, of which the last lacks one token: the last output is never computed. The next
    turn finds three, and two where outputs are in vain."""
    first = TraceRequest(0.0, 40, 24, (1, 2), 0)
    later = TraceRequest(0.0, 100, 1, (1, 2, 3, 4, 5, 6), 0, (0,), 1.0)
    trace = Trace("t", (first, later), 16, timed=False)
    config = replace(ALONE, concurrency=1)
    assert [c.cached_tokens for c in simulate(trace, "round_robin", config).courses] == [0, 48]
    alike = replace(config, outputs_cached=False)
    assert [c.cached_tokens for c in simulate(trace, "round_robin", alike).courses] == [0, 32]


def test_what_a_request_leaves_is_known_where_a_later_turn_goes_on_from_it() -> None:
    first = TraceRequest(0.0, 40, 30, (1, 2), 0)
    goes_on = TraceRequest(0.0, 100, 1, (1, 2, 3, 4, 5, 6), 0, (0,))
    assert Trace("t", (first, goes_on), 16).kept_hashes() == [(1, 2, 3, 4), goes_on.hashes]
    for other in (replace(goes_on, prompt_tokens=60), replace(goes_on, hashes=(1, 9, 3, 4, 5, 6))):
        assert Trace("t", (first, other), 16).kept_hashes()[0] == (1, 2)
    assert Trace("t", (replace(first, hashes=(1,)), goes_on), 16).kept_hashes()[0] == (1,)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_every_request_of_a_mixture_once(method: str) -> None:
    trace = drawn(80)
    config = LabConfig(
        ranks=2, decode_ranks=2, unified_ranks=3, load=0.7, report_delay_s=0.05, report_loss=0.1, controllers=2
    )
    outcome = simulate(trace, method, config)
    assert [course.unified_rank >= 0 for course in outcome.courses] == unified_of(trace, config)
    assert len({course.unified_rank for course in outcome.courses}) == 4
    for course in outcome.courses:
        assert (course.unified_rank < 0) == (course.prefill_rank >= 0) == (course.decode_rank >= 0)
        assert course.request.arrival_s < course.first_token_s <= course.finished_s
        assert 0 <= course.cached_tokens < course.request.prompt_tokens
        assert course.regret_tokens is not None
        assert course.regret_tokens >= 0
    found = summarise(outcome, config)
    assert 0 < found.unified_busy < 1 > found.prefill_busy > 0
    assert {len(row) for row in outcome.load} == {5}
    assert repr(simulate(trace, method, config)) == repr(outcome), "NaN is not equal to itself"


@pytest.mark.parametrize("controllers", [1, 2])
def test_the_order_slo_serves_unified_ranks(controllers: int) -> None:
    """Where more come than can be computed or held, those that can still be in time go first."""
    config = LabConfig(
        ranks=0, decode_ranks=0, unified_ranks=2, load=2.0, slo_ttft_s=1.5, slo_tpot_s=10.0, unified_kv_tokens=60_000,
        controllers=controllers,
    )  # fmt: skip
    by_arrival, by_slo = (
        summarise(simulate(drawn(150), "cache_aware", each), each).slo_attainment
        for each in (config, replace(config, queue_order="slo"))
    )
    assert by_slo > 5 * by_arrival


def test_sessions_go_one_way_by_the_seed_and_the_share() -> None:
    turns = [TraceRequest(0.1 * n, 16, 1, (), n % 400) for n in range(2000)]
    trace = Trace("t", tuple(turns), 16)
    config = LabConfig(ranks=1, decode_ranks=1, unified_ranks=2)
    for share, expected in ((0.0, 0.5), (0.1, 0.1)):
        ways = unified_of(trace, replace(config, unified_share=share))
        by_session = [set(ways[n::400]) for n in range(400)]
        assert all(len(way) == 1 for way in by_session)
        assert sum(way == {True} for way in by_session) / 400 == pytest.approx(expected, abs=0.08)
        assert ways == unified_of(trace, replace(config, unified_share=share, controllers=3, load=0.1))
    assert unified_of(trace, config) != unified_of(trace, replace(config, seed=2))
    assert set(unified_of(trace, replace(config, ranks=0, decode_ranks=0))) == {True}
    assert set(unified_of(trace, replace(config, unified_ranks=0))) == {False}


def test_more_ranks_of_each_kind_are_quicker() -> None:
    config = LabConfig(ranks=1, decode_ranks=1, unified_ranks=1, load=0.0)
    means = [
        summarise(simulate(drawn(100), "total_tokens", each), each).ttft_mean_s
        for each in (config, replace(config, ranks=2, unified_ranks=2), replace(config, ranks=4, unified_ranks=4))
    ]
    assert all(more < fewer for fewer, more in pairwise(means))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranks": 0, "decode_ranks": 0}, "--ranks must be at least 1 where there are no --unified-ranks"),
        ({"ranks": 0, "unified_ranks": 1}, "--unified-ranks go with --ranks and --decode-ranks together"),
        ({"decode_ranks": 0, "unified_ranks": 1}, "--unified-ranks go with --ranks and --decode-ranks together"),
        ({"unified_ranks": 1, "unified_share": 1.0}, "--unified-share must lie in 0..1"),
        ({"unified_kv_tokens": 0}, "--unified-kv-tokens must be at least 1"),
        ({"unified_ranks": 1_000_000}, "--unified-ranks must be at most "),
    ],
)
def test_what_is_no_mixture_is_said(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(LabConfig(), **settings)  # type: ignore[arg-type]


def test_a_unified_rank_holds_prompt_and_output() -> None:
    config = replace(ALONE, unified_kv_tokens=100)
    with pytest.raises(ConfigError, match="--unified-kv-tokens 100 cannot hold the trace's longest request"):
        simulate(Trace("t", (TraceRequest(0.0, 90, 7), FAR), 16), "round_robin", config)
    simulate(Trace("t", (TraceRequest(0.0, 90, 6), FAR), 16), "round_robin", config)
