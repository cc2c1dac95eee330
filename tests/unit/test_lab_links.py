"""KV transfers in the lab: shared links, fetches by layer, and decode ranks with a cache, against sums by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming
from nodes.own.sequence import Sequence
from pdbus.lab.choosers import METHODS
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.links import Links
from pdbus.lab.live import LiveEngine, run_live
from pdbus.lab.metrics import summarise
from pdbus.lab.outcome import RequestOutcome
from pdbus.lab.pool import RunPool
from pdbus.lab.scheduler import LabScheduler
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest

PREFILL = [("prefill", n) for n in range(4)]
DECODE = [("decode", n) for n in range(4)]
A_STEP = LabConfig(
    ranks=1, decode_ranks=1, load=0.0, hop_s=0.0, timing=SimTiming(1.0, 0.0, 0.0, 0.0), link_s_per_token=0.25,
    chunk_tokens=16,
)  # fmt: skip
FAR = TraceRequest(500.0, 16, 1)  # a trace has two requests


def ends(*transfers: tuple[float, int, int, int]) -> list[float]:
    """When each transfer ends, of those that begin at a time from a prefill rank to a decode rank, with so many tokens
    of a second each."""
    loop, found = VirtualLoop(), [0.0] * len(transfers)
    links = Links(loop, 1.0)
    for number, (at_s, source, target, tokens) in enumerate(transfers):
        arguments = PREFILL[source], DECODE[target], tokens, lambda number: found.__setitem__(number, loop.now), number
        loop.call_at(at_s, links.send, *arguments)
    loop.run(lambda now: all(found))
    return found


# --- links --------------------------------------------------------------------------------------------------------


def test_one_transfer_has_its_link_alone() -> None:
    assert ends((3.0, 0, 0, 8)) == [11.0]


@pytest.mark.parametrize("ranks", [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 0)], ids=["sender", "receiver", "pair"])
def test_two_transfers_share_a_link_while_both_are_under_way(ranks: tuple[int, int, int, int]) -> None:
    """The second comes when half of the first is there. Each has half of the speed until the first ends; then the
    second goes on alone."""
    first_source, first_target, source, target = ranks
    assert ends((0.0, first_source, first_target, 8), (4.0, source, target, 8)) == [12.0, 16.0]


def test_transfers_apart_do_not_share() -> None:
    assert ends((0.0, 0, 0, 8), (0.0, 1, 1, 8), (0.0, 2, 3, 4)) == [8.0, 8.0, 4.0]


def test_a_rank_sends_and_receives_at_once() -> None:
    loop, found = VirtualLoop(), []
    links = Links(loop, 1.0)
    for source, target in ((PREFILL[0], DECODE[0]), (DECODE[0], PREFILL[0])):
        links.send(source, target, 8, lambda: found.append(loop.now))
    loop.run(lambda now: len(found) == 2)
    assert found == [8.0, 8.0]


def test_between_two_busy_ends_it_has_the_lesser_of_two_shares() -> None:
    """Rank 0 sends two, rank 0 receives three, and one of each is the same transfer. It has a third of the speed, as
    the others that rank 0 receives; the other that rank 0 sends has its half."""
    assert ends((0.0, 0, 0, 6), (0.0, 0, 1, 6), (0.0, 1, 0, 6), (0.0, 2, 0, 6)) == [18.0, 12.0, 18.0, 18.0]


@pytest.mark.parametrize("seed", range(5))
def test_no_link_carries_more_than_it_can_and_all_is_carried(seed: int) -> None:
    """However they come, what one end has carried took at least its time, and a transfer never takes longer than in a
    queue of all."""
    rng = random.Random(seed)
    transfers = [(rng.random() * 40, rng.randrange(3), rng.randrange(3), rng.randrange(1, 20)) for _ in range(60)]
    found = ends(*transfers)
    first_s, all_tokens = min(each[0] for each in transfers), sum(each[3] for each in transfers)
    for (at_s, _, _, tokens), end_s in zip(transfers, found, strict=True):
        assert at_s + tokens - 1e-9 <= end_s <= at_s + all_tokens
    for end in (1, 2):
        for rank in range(3):
            mine = [number for number, each in enumerate(transfers) if each[end] == rank]
            assert max(found[n] for n in mine) >= first_s + sum(transfers[n][3] for n in mine) - 40


# --- in a run -----------------------------------------------------------------------------------------------------


def outcome_of(config: LabConfig, *requests: TraceRequest) -> list[RequestOutcome]:
    return simulate(Trace("t", (*requests, FAR), 16), "round_robin", config).courses[:-1]


def test_one_fetch_takes_its_tokens_and_hops() -> None:
    """A step for the prompt, then two hops to fetch it and one to say that it is there, and a step of decode."""
    (course,) = outcome_of(A_STEP, TraceRequest(0.0, 16, 2))
    assert (course.prefilled_s, course.fetched_s, course.finished_s) == (1.0, 5.0, 6.0)
    (course,) = outcome_of(replace(A_STEP, hop_s=1 / 64), TraceRequest(0.0, 16, 2))
    assert course.fetched_s - course.prefilled_s == 4.0 + 3 / 64


def test_a_link_with_one_fetch_at_a_time_is_as_quick_as_without_sharing() -> None:
    request = TraceRequest(0.0, 16, 2)
    (shared,) = outcome_of(replace(A_STEP, hop_s=1 / 64), request)
    (apart,) = outcome_of(replace(A_STEP, hop_s=1 / 64, link_s_per_token=0.0, kv_fetch_token_s=0.25), request)
    assert shared == apart


def test_two_prefill_ranks_share_the_link_of_a_decode_rank() -> None:
    """Both prompts end at 1 s; each of the fetches takes twice its time."""
    courses = outcome_of(replace(A_STEP, ranks=2), TraceRequest(0.0, 16, 2), TraceRequest(0.0, 16, 2))
    assert [course.fetched_s for course in courses] == [9.0, 9.0]
    apart = replace(A_STEP, ranks=2, decode_ranks=2)
    courses = outcome_of(apart, TraceRequest(0.0, 16, 2), TraceRequest(0.0, 16, 2))
    assert [course.fetched_s for course in courses] == [5.0, 5.0]


@pytest.mark.parametrize("link_s_per_token", [0.0, 0.25])
def test_by_layer_a_fetch_ends_with_the_prompt_or_takes_its_time_from_its_beginning(link_s_per_token: float) -> None:
    """The prompt takes four steps of a second and 16 s to move, then, on a link 16 times as quick, 1 s."""
    by_layer = replace(A_STEP, fetch_by_layer=True, link_s_per_token=link_s_per_token, kv_fetch_token_s=0.25)
    request = TraceRequest(0.0, 64, 2)
    (course,) = outcome_of(by_layer, request)
    assert (course.prefilled_s, course.fetched_s, course.finished_s) == (4.0, 16.0, 17.0)
    quick = replace(by_layer, link_s_per_token=link_s_per_token / 16, kv_fetch_token_s=0.25 / 16, hop_s=1 / 64)
    (course,) = outcome_of(quick, request)
    assert course.fetched_s - course.prefilled_s == 1 / 64
    (after,) = outcome_of(replace(quick, fetch_by_layer=False), request)
    assert after.fetched_s - after.prefilled_s == 1.0 + 3 / 64


def test_by_layer_the_last_layer_comes_a_hop_after_the_prompts_end() -> None:
    """The rest is there half a hop sooner: two hops lie before the prompt's beginning, and three before the
    transfer's, which takes 4 s less 2.5 hops."""
    hop_s = 1 / 64
    config = replace(A_STEP, fetch_by_layer=True, link_s_per_token=(4 - 2.5 * hop_s) / 64, hop_s=hop_s)
    (course,) = outcome_of(config, TraceRequest(0.0, 64, 2))
    assert (course.prefilled_s, course.fetched_s) == (4 + 2 * hop_s, 4 + 3 * hop_s)


def test_by_layer_a_prompt_without_a_second_token_moves_nothing() -> None:
    (course,) = outcome_of(replace(A_STEP, fetch_by_layer=True), TraceRequest(0.0, 64, 1))
    assert (course.moved_tokens, course.finished_s) == (0, 4.0)


# --- decode ranks with a cache ------------------------------------------------------------------------------------

FIRST = TraceRequest(0.0, 40, 24, (1, 2), 0)
LATER = TraceRequest(0.0, 100, 2, (1, 2, 3, 4, 5, 6), 0, (0,), 1.0)
KEEPING = replace(A_STEP, concurrency=1, decode_cache=True, load=0.9)


def turns(config: LabConfig, *requests: TraceRequest) -> list[RequestOutcome]:
    return simulate(Trace("t", requests, 16, timed=False), "round_robin", config).courses


def test_a_decode_rank_fetches_only_what_it_lacks() -> None:
    """Turn one leaves 63 tokens there: three full blocks, the third with tokens that were generated. Prefill has two of
    them and computes the rest in five steps."""
    first, later = turns(KEEPING, FIRST, LATER)
    assert (first.moved_tokens, later.moved_tokens) == (40, 100 - 48)
    assert later.cached_tokens == 32
    assert later.fetched_s - later.prefilled_s == 52 * 0.25
    without = turns(replace(KEEPING, decode_cache=False), FIRST, LATER)
    assert [course.moved_tokens for course in without] == [40, 100]
    in_vain = turns(replace(KEEPING, outputs_cached=False), FIRST, LATER)
    assert [course.moved_tokens for course in in_vain] == [40, 100 - 32]


def test_a_prompt_that_is_partly_there_is_held_once() -> None:
    scheduler = LabScheduler(RunPool(8, 16), max_running=4, chunk_tokens=64)
    for number in (1, 2):
        scheduler.add(Sequence(number, range(40), 2, imported=True, hashes=[7, 8]))
        assert [each.id for each in scheduler.take_admitted()] == [number]
        scheduler.start(number, 0)
        scheduler.pool.validate()
        assert scheduler.sequence(number).computed == 40
    assert scheduler.sequence(2).cached_tokens == 32


def test_it_keeps_what_it_used_last() -> None:
    """Memory for seven blocks of 16: the second session needs five, so of the first one's four the last two go, and a
    third turn fetches them again."""
    other = TraceRequest(0.0, 70, 2, (11, 12, 13, 14), 1)
    again = replace(LATER, prompt_tokens=70, hashes=(1, 2, 3, 4), after=(0, 1))
    kept, short = (
        turns(replace(KEEPING, decode_kv_tokens=16 * blocks), FIRST, replace(other, after=(0,), session=0), again)
        for blocks in (12, 7)
    )
    assert [course.moved_tokens for course in kept] == [40, 70, 70 - 48]
    assert [course.moved_tokens for course in short] == [40, 70, 70 - 32]


def test_prefixes_are_shared_as_soon_as_they_are_there() -> None:
    """The second request comes while the first decodes: it finds the first one's prompt."""
    long, short = TraceRequest(0.0, 40, 200, (1, 2)), TraceRequest(30.0, 40, 2, (1, 2))
    first, second = outcome_of(replace(KEEPING, concurrency=0, load=0.0), long, short)
    assert second.fetched_s < first.finished_s
    assert second.moved_tokens == 8


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_every_request_over_links_and_caches_once(method: str) -> None:
    config = LabConfig(
        ranks=2, decode_ranks=2, unified_ranks=1, load=0.5, decode_kv_tokens=600_000, unified_kv_tokens=600_000,
        decode_method="cache_aware", decode_cache=True, fetch_by_layer=True, link_s_per_token=1e-5, report_loss=0.1,
        controllers=2,
    )  # fmt: skip
    sessions = generate_sessions(6, seed=2)
    outcome = simulate(sessions, method, config)
    assert len(outcome.courses) == len(sessions)
    for course in outcome.courses:
        assert course.arrived_s < course.first_token_s <= course.finished_s
        assert course.moved_tokens <= course.request.prompt_tokens
        assert (course.moved_tokens > 0) == (course.decode_rank >= 0 and course.request.output_tokens > 1)
        assert not course.moved_tokens or course.prefilled_s < course.fetched_s < course.finished_s
    found = summarise(outcome, config)
    assert 0.05 < found.moved_share < 0.9
    assert found.fetch_mean_s > 0


def test_a_policy_that_knows_caches_finds_those_of_decode_ranks() -> None:
    config = LabConfig(
        ranks=2, decode_ranks=4, concurrency=4, decode_kv_tokens=1_500_000, decode_cache=True, link_s_per_token=2.6e-6
    )
    sessions = generate_sessions(8, seed=3)
    blind, aware = (
        summarise(simulate(sessions, "cache_aware", each), each)
        for each in (config, replace(config, decode_method="cache_aware"))
    )
    assert aware.moved_share < 0.5 * blind.moved_share


def test_transfers_of_this_kind_are_not_live() -> None:
    for settings in ({"link_s_per_token": 1e-6}, {"fetch_by_layer": True}):
        config = replace(LabConfig(), **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="--fetch-by-layer are for virtual time, not --live"):
            run_live(generate_sessions(2), "cache_aware", config, LiveEngine(), print)
    alone = replace(LabConfig(), decode_cache=True)
    with pytest.raises(ConfigError, match="--live needs --decode-cache and --decode-prefills together"):
        run_live(generate_sessions(2), "cache_aware", alone, LiveEngine(), print)
    both = replace(alone, decode_prefills=True)
    with pytest.raises(ConfigError, match="--decode-cache is for our own engines, not --live --engine vllm"):
        run_live(generate_sessions(2), "cache_aware", both, LiveEngine("vllm", "m"), print)
    with pytest.raises(ConfigError, match="--link-s-per-token must not be negative"):
        LabConfig(link_s_per_token=-1e-9)
