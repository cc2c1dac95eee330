"""The lab's verdicts at small size: which method beats which, and what late, lost or unshared knowledge costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming
from pdbus.lab.choosers import METHODS
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.metrics import Summary, summarise
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest

PREFILL_ONLY = LabConfig(decode_ranks=0)


@functools.cache
def trace() -> Trace:
    return generate(250, seed=1)


@functools.cache
def long() -> Trace:
    """For the order of a queue: what it gains is seen when a burst has lasted."""
    return generate(400, seed=1)


@functools.cache
def made_up(seed: int) -> Callable[[], Trace]:
    return functools.cache(functools.partial(generate, 300, seed=seed))


@functools.cache
def early() -> Trace:
    return generate(100, seed=1)


@functools.cache
def bare() -> Trace:
    """The same without prefixes: no luck with caches blurs what knowledge is worth."""
    return Trace("bare", tuple(replace(request, hashes=()) for request in trace().requests))


@functools.cache
def run(method: str, *, of: Callable[[], Trace] = trace, **settings: Any) -> Summary:
    config = replace(PREFILL_ONLY, **{"load": 0.7 if of is bare else 0.9} | settings)
    return summarise(simulate(of(), method, config), config)


def test_the_same_call_gives_the_same_outcome() -> None:
    small, config = trace().first(60), LabConfig(report_loss=0.2, controllers=2)
    assert simulate(small, "cache_aware", config) == simulate(small, "cache_aware", config)
    assert simulate(small, "cache_aware", config) != simulate(small, "cache_aware", replace(config, seed=2))


@pytest.mark.parametrize(("first_at_decode", "first_s", "end_s"), [(False, 1.0, 3.5), (True, 2.5, 4.5)])
def test_where_decode_makes_the_first_token_it_comes_a_fetch_and_a_step_later(
    first_at_decode: bool, first_s: float, end_s: float
) -> None:
    """And the decode rank does one step more for each request. Alone, then among others that decode."""
    config = LabConfig(
        ranks=1, decode_ranks=1, load=0.0, hop_s=0.0, timing=SimTiming(1.0, 0.0, 0.0, 0.0), kv_fetch_token_s=0.5 / 16,
        first_at_decode=first_at_decode,
    )  # fmt: skip
    alone, later = TraceRequest(0.0, 16, 3), TraceRequest(100.0, 16, 3)
    for course in simulate(Trace("two", (alone, later), 16), "round_robin", config).courses:
        assert course.first_token_s - course.request.arrival_s == pytest.approx(first_s)
        assert course.finished_s - course.request.arrival_s == pytest.approx(end_s)
    long = TraceRequest(0.0, 16, 100)
    among = simulate(Trace("among", (long, replace(later, arrival_s=20.0)), 16), "round_robin", config).courses[1]
    assert among.first_token_s - 20.0 == pytest.approx(first_s, abs=1.0)
    assert among.finished_s - among.first_token_s == pytest.approx(end_s - first_s, abs=1.0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_every_request_once(method: str) -> None:
    small, config = trace().first(60), LabConfig(report_delay_s=0.05, report_loss=0.1, controllers=2)
    outcome = simulate(small, method, config)
    assert len(outcome.courses) == len(small)
    for course in outcome.courses:
        assert 0 <= course.prefill_rank < config.ranks
        assert 0 <= course.decode_rank < config.decode_ranks
        assert course.request.arrival_s < course.first_token_s <= course.finished_s
        assert 0 <= course.cached_tokens < course.request.prompt_tokens
        assert course.regret_tokens is not None
        assert course.regret_tokens >= 0


@pytest.mark.timeout(900)  # ten seconds of computing
def test_the_order_of_methods() -> None:
    mean = {name: run(name).ttft_mean_s for name in METHODS}
    assert mean["follow_bootstrap_room"] > mean["round_robin"] > 1.2 * mean["total_tokens"]
    assert mean["power_of_two"] > mean["total_tokens"]
    assert mean["total_tokens"] > 1.4 * mean["cache_aware"]
    assert mean["follow_bootstrap_room"] > 3 * mean["cache_aware"]
    blind = {name: run(name, of=bare).ttft_mean_s for name in ("total_requests", "vllm_counts", "power_of_two")}
    assert min(blind.values()) > 1.05 * run("total_tokens", of=bare).ttft_mean_s


def test_knowledge_that_is_late_or_lost_costs_little() -> None:
    oracle = run("oracle", of=bare)
    late = run("total_tokens", of=bare, report_delay_s=0.1, report_loss=0.05)
    later = run("total_tokens", of=bare, report_delay_s=1.0, report_loss=0.05)
    for found, most in ((late, 1.03), (later, 1.06)):
        assert found.ttft_mean_s < most * oracle.ttft_mean_s
        assert found.ttft_p99_s < most * oracle.ttft_p99_s


def test_cache_aware_needs_no_fresh_reports() -> None:
    def mean_s(method: str) -> float:
        return sum(run(method, of=made_up(seed), report_delay_s=1.0, report_loss=0.05).ttft_mean_s for seed in (1, 2))

    assert mean_s("cache_aware") < 1.08 * mean_s("oracle_cache")


def test_reports_without_acknowledgement_lose_work_in_flight() -> None:
    assert run("overwrite", of=bare).ttft_mean_s > 1.03 * run("total_tokens", of=bare).ttft_mean_s
    assert run("overwrite", of=bare).regret_mean_tokens > 1.5 * run("total_tokens", of=bare).regret_mean_tokens


def test_shared_counters_make_several_controllers_decide_as_one() -> None:
    one = run("total_tokens", of=bare, report_delay_s=0.25)
    four = run("total_tokens", of=bare, report_delay_s=0.25, controllers=4)
    apart = run("total_tokens", of=bare, report_delay_s=0.25, controllers=4, shared_counters=False)
    assert four.ttft_mean_s < 1.1 * one.ttft_mean_s
    assert apart.ttft_mean_s > 1.05 * four.ttft_mean_s


def test_cache_aware_finds_prefixes_and_computes_less() -> None:
    aware, blind = run("cache_aware"), run("total_tokens")
    assert aware.cache_hit_rate > 1.5 * blind.cache_hit_rate
    assert aware.prefill_busy < blind.prefill_busy


def test_without_prefixes_cache_aware_is_total_tokens() -> None:
    first, second = (simulate(bare(), method, PREFILL_ONLY).courses for method in ("cache_aware", "total_tokens"))
    assert [course.prefill_rank for course in first] == [course.prefill_rank for course in second]


def test_the_order_slo_keeps_more_slos_under_a_burst_and_costs_nothing_without() -> None:
    before, ordered = (run("cache_aware", of=long, load=1.3, queue_order=order) for order in ("arrival", "slo"))
    assert ordered.slo_attainment > 1.2 * before.slo_attainment
    assert ordered.ttft_mean_s < 0.8 * before.ttft_mean_s
    assert ordered.ttft_p999_s < 2.5 * before.ttft_p999_s
    before, ordered = (run("cache_aware", load=0.3, queue_order=order) for order in ("arrival", "slo"))
    assert ordered.ttft_mean_s < 1.01 * before.ttft_mean_s


def test_the_order_slo_needs_no_single_controller() -> None:
    before = run("cache_aware", of=long, load=1.2, controllers=4)
    ordered = run("cache_aware", of=long, load=1.2, controllers=4, queue_order="slo")
    assert ordered.slo_attainment > 1.1 * before.slo_attainment


def test_how_far_others_overtake_is_bounded() -> None:
    tight, wide = (
        run("total_tokens", load=1.3, queue_order="slo", overtake_tokens=tokens) for tokens in (50_000, 1 << 40)
    )
    assert tight.ttft_p999_s < wide.ttft_p999_s
    assert tight.slo_attainment < wide.slo_attainment


def test_decode_admission_keeps_the_time_per_token_and_costs_nothing_where_steps_are_short() -> None:
    few = {"decode_ranks": 1, "slo_tpot_s": 0.015, "queue_order": "slo"}
    free, kept = (run("cache_aware", of=early, **few, tpot_admission=admission) for admission in (False, True))
    assert kept.slo_attainment > free.slo_attainment + 0.3
    assert kept.tpot_p99_s < 0.017 < free.tpot_p50_s
    for without in ({"decode_ranks": 8, "queue_order": "slo"}, {"decode_ranks": 1, "slo_tpot_s": 0.015}):
        kept = run("cache_aware", of=early, **without, tpot_admission=True)
        assert repr(kept) == repr(run("cache_aware", of=early, **without)), "NaN is not equal to itself"


@pytest.mark.parametrize("method", ["oracle", "overwrite", "power_of_two"])
def test_the_order_slo_is_for_what_a_controller_can_run(method: str) -> None:
    with pytest.raises(ConfigError, match=f"which {method} is not"):
        simulate(trace(), method, LabConfig(queue_order="slo"))


def test_what_cannot_be_held_is_said() -> None:
    with pytest.raises(ConfigError, match="--cache-blocks 2 of 512 tokens cannot hold"):
        simulate(trace(), "round_robin", LabConfig(cache_blocks=2))
    with pytest.raises(ConfigError, match="--decode-kv-tokens 100 cannot hold"):
        simulate(trace(), "round_robin", LabConfig(decode_kv_tokens=100))
    with pytest.raises(ConfigError, match="unknown method 'best' for replay: choose from round_robin, "):
        simulate(trace(), "best", LabConfig())


def test_memory_is_counted_in_whole_blocks() -> None:
    """A request that fits in the tokens, and not in the blocks, is refused in words."""
    requests = (TraceRequest(0.0, 990, 9), TraceRequest(1.0, 10, 1))
    with pytest.raises(ConfigError, match="--decode-kv-tokens 1000 cannot hold"):
        simulate(Trace("t", requests), "round_robin", LabConfig(decode_kv_tokens=1000))
    simulate(Trace("t", requests), "round_robin", LabConfig(decode_kv_tokens=1024))
