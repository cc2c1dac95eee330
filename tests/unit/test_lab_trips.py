"""The trips of a pair in the lab: who computes the prompt, and what moves, against sums by hand."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bus.errors import BusError, ConfigError
from bus.wire.hashing import pack_hashes
from bus.wire.messages import Submit
from controller.policies import make_policy
from controller.policies.guard import Guard
from controller.trips import TRIPS, Trip
from nodes.own.engines.timing import SimTiming
from nodes.own.sequence import Phase, Sequence
from pdbus.lab.choosers import TableChooser
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.live import LiveEngine, run_live
from pdbus.lab.metrics import summarise
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.pool import RunPool
from pdbus.lab.rank import VirtualRank
from pdbus.lab.scheduler import LabScheduler
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest

HOP_S = 1 / 64
ONE = LabConfig(
    ranks=1, decode_ranks=1, concurrency=1, hop_s=HOP_S, timing=SimTiming(1.0, 0.0, 0.0, 0.0), link_s_per_token=0.25,
    chunk_tokens=16, decode_cache=True, decode_method="cache_aware",
)  # fmt: skip
"""Each step takes a second, a KV token a quarter of one on a link."""
FIRST = TraceRequest(0.0, 40, 24, (1, 2), 0)
LATER = TraceRequest(0.0, 100, 2, (1, 2, 3, 4, 5, 6), 0, (0,), 1.0)
"""When it comes, the decode rank has 48 of its 100 tokens, and the prefill rank has 32."""
HEAD = "from controller.policies.methods import CacheAware\n\n\nclass Mine(CacheAware):\n"


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    """Return the name of a policy that is cache_aware but for the method given."""

    def made(method: str) -> str:
        (tmp_path / "mine.py").write_text(f"{HEAD}    {method}\n")
        return f"{tmp_path / 'mine.py'}:Mine"

    return made


def turns(config: LabConfig, *requests: TraceRequest) -> list[RequestOutcome]:
    return simulate(Trace("t", requests, 16, timed=False), "cache_aware", config).courses


def by_trip(trip: str, **settings: Any) -> LabConfig:
    return replace(ONE, trip=trip, decode_prefills=trip == "at_decode", **settings)


# --- one flow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trip", "computed", "read", "moved"),
    [("at_decode", 52, 0, 0), ("delta", 68, 0, 52), ("read_back", 52, 16, 52), ("whole", 68, 0, 100)],
)
def test_each_trip_is_the_sum_of_its_parts(trip: str, computed: int, read: int, moved: int) -> None:
    """A prompt's steps of 16 tokens; before them, reading back takes two hops and its tokens. After them, what moves
    takes three hops and its tokens, and a step of decode follows."""
    _, later = turns(by_trip(trip), FIRST, LATER)
    assert (later.trip, later.read_tokens, later.moved_tokens) == (trip, read, moved)
    assert later.cached_tokens == 100 - computed
    came_s = later.arrived_s + 2 * HOP_S
    read_s = 2 * HOP_S + 0.25 * read if read else 0.0
    prefilled_s = came_s + read_s - (-computed // 16)
    if trip == "at_decode":
        assert later.first_token_s == prefilled_s + HOP_S
        assert later.finished_s == prefilled_s + 1.0 + HOP_S
    else:
        assert later.prefilled_s == prefilled_s
        assert later.fetched_s == prefilled_s + 3 * HOP_S + 0.25 * moved
        assert later.finished_s == later.fetched_s + 1.0 + HOP_S


def test_a_link_with_one_flow_is_as_quick_as_without_sharing() -> None:
    shared = turns(by_trip("read_back"), FIRST, LATER)
    apart = turns(by_trip("read_back", link_s_per_token=0.0, kv_fetch_token_s=0.25), FIRST, LATER)
    assert repr(shared) == repr(apart), "NaN is not equal to itself"


def test_by_layer_the_delta_follows_the_computation_not_the_reading() -> None:
    """The four steps of the prompt begin after the reading. The delta, on a quick link, ends with them."""
    quick = 1 / 256
    _, later = turns(by_trip("read_back", fetch_by_layer=True, link_s_per_token=quick), FIRST, LATER)
    read_s = 2 * HOP_S + 16 * quick
    assert later.prefilled_s == later.arrived_s + 2 * HOP_S + read_s + 4.0
    assert later.fetched_s == later.prefilled_s + HOP_S


def test_what_prefill_has_itself_is_not_read() -> None:
    """Without its outputs decode has no more than prefill: the trip is the delta, to the last field."""
    settings = {"outputs_cached": False}
    read, delta = (turns(by_trip(trip, **settings), FIRST, LATER) for trip in ("read_back", "delta"))
    assert repr(read) == repr(delta)
    assert [course.trip for course in read] == ["whole", "delta"]


# --- shared links ---------------------------------------------------------------------------------------------------


def test_two_that_read_from_one_decode_rank_share_its_link() -> None:
    """Two sessions, each on a prefill rank of its own. One's turn comes a second after the other's: that one has the
    link alone for a second, both share it for 6 s, and this one has it alone for a second."""
    other = replace(FIRST, hashes=(11, 12), session=1)
    later = replace(LATER, after=(1,), hashes=(11, 12, 13, 14, 15, 16), session=1)
    courses = turns(by_trip("read_back", ranks=2, concurrency=2), FIRST, other, LATER, later)
    second = sorted((each for each in courses if each.request.after), key=lambda each: each.arrived_s)
    assert {course.prefill_rank for course in second} == {0, 1}
    assert second[1].arrived_s - second[0].arrived_s == 1.0
    for course in second:
        assert course.read_tokens == 16
        assert course.prefilled_s == course.arrived_s + 4 * HOP_S + 7.0 + 4.0


def test_reading_back_does_not_slow_what_goes_the_other_way() -> None:
    """A rank sends and receives at once: the prompt of another session comes to the decode rank while it is read
    from, and takes its tokens."""
    alone = turns(by_trip("read_back"), FIRST, LATER)[1]
    beside = TraceRequest(alone.arrived_s - 2.25, 32, 2, (21, 22), 1)
    config = by_trip("read_back", ranks=2, concurrency=0, load=0.0)
    courses = simulate(Trace("t", (FIRST, LATER, beside), 16), "cache_aware", config).courses
    reader, other = (course for course in courses if course.request.hashes != FIRST.hashes)
    assert (reader.arrived_s, reader.prefilled_s) == (alone.arrived_s, alone.prefilled_s)
    assert other.prefill_rank != reader.prefill_rank
    assert other.prefilled_s < reader.arrived_s < reader.prefilled_s - 4.0 < other.fetched_s, "they overlap"
    assert other.fetched_s - other.prefilled_s == 3 * HOP_S + 32 * 0.25


# --- who decides ----------------------------------------------------------------------------------------------------

ASKED = """def read_back(self, rank, prefill, request):
        assert (rank.info.role, prefill.info.role) == ("decode", "prefill")
        known = self.costs.cached(rank, request), self.costs.cached(prefill, request)
        assert known == (48, 32), "it is asked only where there is something to read"
        return {}"""


@pytest.mark.parametrize("says", [True, False])
def test_the_policy_of_decode_ranks_says_which_prompts_are_read_back(mine: Any, says: bool) -> None:
    by_policy = turns(replace(ONE, decode_method=mine(ASKED.format(says))), FIRST, LATER)
    fixed = turns(by_trip("read_back" if says else "delta"), FIRST, LATER)
    assert repr(by_policy) == repr(fixed)


def test_a_fixed_trip_asks_no_policy(mine: Any) -> None:
    method = mine("read_back = prefill_here = lambda self, *asked: 1 // 0")
    for trip in TRIPS:
        config = replace(ONE, trip=trip, decode_prefills=True, decode_method=method)
        assert [course.trip for course in turns(config, FIRST, LATER)][1] == trip


def test_a_policy_that_fails_there_ends_the_replay(mine: Any) -> None:
    method = mine("def read_back(self, rank, prefill, request):\n        1 // 0")
    with pytest.raises(BusError, match=r"policy .*Mine failed in read_back: ZeroDivisionError"):
        turns(replace(ONE, decode_method=method), FIRST, LATER)
    faults: list[str] = []
    guard = Guard(make_policy(method).policy, lambda hook, why: faults.append(hook))  # type: ignore[attr-defined]
    assert guard.read_back(None, None, None) is False  # type: ignore[arg-type]
    assert faults == ["read_back"]


def test_the_prefill_rank_is_charged_what_it_computes() -> None:
    chooser = TableChooser(make_policy("cache_aware"), "prefill", 1, 0, ONE, 16)
    for rid, read, charge in (("a", 0, 100), ("b", 48, 52), ("c", 99, 1)):
        asked = Submit(rid, "pair", 100, 2, block_tokens=16, block_hashes=pack_hashes([ord(rid)]))
        assert chooser.pick(asked, 0.0, read)[1] == charge


# --- what is read ---------------------------------------------------------------------------------------------------


def test_what_decode_no_longer_has_is_computed() -> None:
    """The controller, whose news of caches is very late, believes that decode has what it has given up since: prefill
    asks for it, gets 0 tokens or fewer than it hoped for, and computes the rest."""
    other = TraceRequest(0.0, 90, 30, (11, 12, 13, 14, 15), 0, (0,))
    again = replace(LATER, after=(1,))
    config = by_trip("read_back", decode_kv_tokens=16 * 8, report_delay_s=20.0)
    _, _, last = turns(config, replace(FIRST, output_tokens=24), other, again)
    assert last.read_tokens == 0
    assert last.cached_tokens == 32
    assert last.trip in ("delta", "whole")


def test_a_reader_counts_what_it_will_compute_and_holds_its_slot() -> None:
    scheduler = LabScheduler(RunPool(12, 16), max_running=1, chunk_tokens=64)
    hashes = array("Q", (1, 2, 3, 4, 5, 6))
    reader = Sequence(1, range(100), 1, hold=True, hashes=hashes, read=3)
    scheduler.add(reader)
    assert scheduler.waiting_tokens == 52
    assert scheduler.take_admitted() == [reader]
    assert (scheduler.running, scheduler.waiting_tokens) == (1, 52)
    assert scheduler.begin_step(SimTiming()) is None, "there is nothing to compute yet"
    scheduler.has_read(1, 2)
    assert (scheduler.waiting_tokens, scheduler.kv_tokens, scheduler.pool.cached) == (68, 32, 2), "it got less"
    while reader.phase is Phase.PROMPT:
        assert scheduler.begin_step(SimTiming()) is not None
        scheduler.end_step(1.0)
    assert (reader.phase, scheduler.waiting_tokens, scheduler.computed_tokens_total) == (Phase.HELD, 0, 68)
    scheduler.release(1)
    scheduler.validate()


def test_a_reader_that_has_found_it_all_here_computes_at_once() -> None:
    scheduler = LabScheduler(RunPool(12, 16), max_running=2, chunk_tokens=64)
    hashes = array("Q", (1, 2, 3))
    scheduler.add(Sequence(1, range(60), 1, hold=True, hashes=hashes))
    scheduler.take_admitted()
    scheduler.begin_step(SimTiming())
    scheduler.end_step(1.0)
    scheduler.release(1)
    reader = Sequence(2, range(60), 1, hold=True, hashes=hashes, read=2)
    scheduler.add(reader)
    assert scheduler.take_admitted() == []
    assert (reader.phase, scheduler.waiting_tokens) == (Phase.PROMPT, 12)


def test_what_is_read_stays_until_it_is_read() -> None:
    loop = VirtualLoop()
    rank = VirtualRank(
        loop, ("decode", 0), blocks=4, block_tokens=16, max_running=4, chunk_tokens=64, timing=SimTiming(),
        on_output=lambda seq: None, on_admitted=lambda sequence: None,
    )  # fmt: skip
    hashes = array("Q", (1, 2, 3, 4))
    rank.ingest(Sequence(1, range(64), 1, hashes=hashes), 1, 64)
    loop.run(lambda now: False)
    assert rank.pool.cached == 4
    assert rank.pin(hashes[:3]) == (48, [2])
    rank.ingest(Sequence(2, range(40), 1, hashes=array("Q", (7, 8))), 1, 40)
    loop.run(lambda now: False)
    assert (rank.scheduler.waiting, rank.pool.cached_tokens(hashes)) == (1, 64), "there is memory for one block more"
    rank.unpin([2])
    loop.run(lambda now: False)
    assert (rank.scheduler.waiting, rank.pool.cached_tokens(hashes)) == (0, 16)
    rank.pool.validate()


# --- in all -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"controllers": 2, "report_loss": 0.1, "report_delay_s": 0.1},
        {"queue_order": "slo", "fetch_by_layer": True},
        {"link_s_per_token": 1e-4, "first_at_decode": True, "unified_ranks": 1, "unified_kv_tokens": 600_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("trip", TRIPS)
def test_each_trip_ends_every_request_and_is_counted(trip: Trip, settings: dict[str, Any]) -> None:
    config = LabConfig(
        ranks=2, decode_ranks=2, load=0.5, decode_kv_tokens=500_000, decode_method="cache_aware", decode_cache=True,
        trip=trip, decode_prefills=trip == "at_decode", **settings,
    )  # fmt: skip
    outcome: Outcome = simulate(generate_sessions(2, seed=2), "cache_aware", config)
    for course in outcome.courses:
        assert course.arrived_s < course.first_token_s <= course.finished_s
        assert course.read_tokens + course.moved_tokens <= 2 * course.request.prompt_tokens
    found = summarise(outcome, config)
    counted = Counter(course.trip for course in outcome.courses)
    here = 0.0 if trip != "at_decode" else found.here_share * len(outcome.courses) - counted[None]
    shares = found.delta_share, found.back_share, found.whole_share
    assert [round(share * len(outcome.courses)) for share in shares] == [
        counted[each] for each in ("delta", "read_back", "whole")
    ]
    assert round(here) == counted["at_decode"]
    assert counted[trip] > len(outcome.courses) / 3
    assert (found.read_share > 0) == (trip == "read_back")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trip": "back"}, "--trip is one of at_decode, delta, read_back, whole"),
        ({"trip": "delta", "decode_cache": False}, "--trip delta needs --decode-cache"),
        ({"trip": "read_back", "decode_cache": False}, "--trip read_back needs --decode-cache"),
        ({"trip": "at_decode"}, "--trip at_decode needs --decode-prefills"),
        ({"trip": "whole", "decode_ranks": 0}, "--trip is for prefill ranks and decode ranks"),
        ({"trip": "read_back", "decode_method": "total_requests"}, "knows caches, not total_requests"),
    ],
)
def test_a_trip_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        turns(replace(ONE, **settings), FIRST, LATER)


def test_a_trip_is_for_virtual_time_and_reading_back_for_methods_with_records() -> None:
    with pytest.raises(ConfigError, match="--trip is for virtual time"):
        run_live(generate_sessions(2), "cache_aware", LabConfig(trip="whole"), LiveEngine(), print)
    with pytest.raises(ConfigError, match="--trip read_back is for methods that a controller can run"):
        simulate(generate_sessions(2), "oracle", by_trip("read_back"))


def test_the_example_reads_back_where_the_link_is_quicker_than_prefill() -> None:
    example = f"{Path(__file__).parents[2] / 'examples' / 'where_to_prefill.py'}:ReadBack"
    trace = generate_sessions(2, seed=2)
    config = LabConfig(ranks=2, decode_ranks=2, load=0.3, decode_cache=True, decode_method=example)
    shares = [
        summarise(simulate(trace, "cache_aware", each), each).back_share
        for each in (config, replace(config, link_s_per_token=1.0, hop_s=0.0))
    ]
    assert shares[0] > 0.8
    assert shares[1] == 0.0


def test_a_decode_ranks_policy_sees_the_newest_loads_of_prefill_ranks(mine: Any) -> None:
    """Else what a prefill rank did last would count as queued there until the next pair goes to it."""
    name = mine('def prefill_here(self, rank, request): return self.costs.queued_by("prefill") > 0')
    config = replace(ONE, decode_prefills=True, decode_method=name)
    last = replace(LATER, prompt_tokens=120, after=(1,))
    assert [course.prefill_rank for course in turns(config, FIRST, LATER, last)] == [0, 0, 0]
