"""Sessions in the lab: what their files say, when their turns come, how many are under way, and what counts."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest

from bus.errors import ConfigError
from nodes.own.engines.timing import SimTiming
from pdbus.lab.config import LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.metrics import summarise
from pdbus.lab.outcome import RequestOutcome
from pdbus.lab.sessions import Draw, SessionShape, generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest, checked

ONE_RANK = LabConfig(
    ranks=1, decode_ranks=0, load=0.0, hop_s=0.0, timing=SimTiming(1.0, 0.0, 0.0, 0.0), decode_kv_tokens=1_000_000
)


def turns(session: int, *thinks_s: float, arrival_s: float = 0.0, at: int = 0) -> list[TraceRequest]:
    """A session's turns, each after the one before; it stands at place `at` of a trace."""
    return [
        TraceRequest(arrival_s, 16, 1, (), session, (at + number - 1,) if number else (), think_s)
        for number, think_s in enumerate(thinks_s)
    ]


def arrivals(courses: list[RequestOutcome]) -> list[float]:
    return [course.arrived_s for course in courses]


# --- when turns come ------------------------------------------------------------------------------------------------


def test_a_turn_comes_its_think_time_after_the_end_of_the_one_before() -> None:
    """Each prompt takes a step of one second: a busy rank delays what follows, as no arrival time could."""
    trace = Trace("t", (*turns(0, 0.0, 5.0, 2.0), TraceRequest(6.0, 16, 1)), 16)
    courses = simulate(trace, "round_robin", ONE_RANK).courses
    assert arrivals(courses) == pytest.approx([0.0, 6.0, 10.0, 6.0])  # the second waits for the lone one, or it for it
    assert [course.finished_s for course in courses] == pytest.approx([1.0, 8.0, 11.0, 7.0])


def test_sessions_fork_and_join() -> None:
    """Two sub-agents run side by side; what follows them waits for the later one."""
    main, first, second = turns(0, 0.0)[0], turns(0, 1.0)[0], turns(0, 3.0)[0]
    trace = Trace(
        "t",
        (
            main,
            replace(first, after=(0,), think_s=1.0),
            replace(second, after=(0,), think_s=3.0),
            replace(main, after=(0, 1, 2), think_s=0.5),
        ),
        16,
    )
    wide = replace(ONE_RANK, ranks=4)
    assert arrivals(simulate(trace, "round_robin", wide).courses) == pytest.approx([0.0, 2.0, 4.0, 5.5])


def test_so_many_sessions_are_under_way_and_the_next_begins_when_one_has_ended() -> None:
    requests = [request for session in range(9) for request in turns(session, 0.0, 4.0, 1.0, at=3 * session)]
    courses = simulate(
        Trace("t", tuple(requests), 16, timed=False), "round_robin", replace(ONE_RANK, concurrency=3)
    ).courses
    spans: dict[int, list[float]] = defaultdict(list)
    for course in courses:
        spans[course.request.session] += [course.arrived_s, course.finished_s]
    edges = sorted([(min(each), 1) for each in spans.values()] + [(max(each), -1) for each in spans.values()])
    under_way = most = 0
    for _, by in edges:
        under_way += by
        most = max(most, under_way)
    assert most == 3
    begun = sorted(min(each) for each in spans.values())
    ended = sorted(max(each) for each in spans.values())
    assert begun[3:] == pytest.approx(ended[: len(begun) - 3]), "each of the others begins with the end of one"


def test_what_comes_after_sessions_became_fewer_is_in_no_figure() -> None:
    """Four sessions of two turns, two under way. From second 16 on one is alone, and its last turn does not count."""
    requests = [
        request
        for number in range(4)
        for request in turns(number, 0.0, 3.0 * (number + 1), arrival_s=float(number), at=2 * number)
    ]
    outcome = simulate(Trace("t", tuple(requests), 16), "round_robin", replace(ONE_RANK, ranks=4, concurrency=2))
    assert (len(outcome.courses), outcome.until_s) == (7, 16.0)


def test_the_window_of_the_figures() -> None:
    trace = Trace("t", tuple(TraceRequest(float(n), 16, 1) for n in range(20)), 16)
    config = replace(ONE_RANK, warm_up_s=5.0, end_s=15.0)
    outcome = simulate(trace, "round_robin", config)
    assert arrivals(outcome.courses) == [float(n) for n in range(5, 15)]
    assert (outcome.began_s, outcome.until_s, outcome.ended_s, len(outcome.load)) == (5.0, 15.0, 15.0, 11)
    assert outcome.prefill_busy == 1.0
    found = summarise(outcome, config)
    assert (found.requests, found.requests_per_s, found.goodput_per_s, found.output_tokens_per_s) == (10, 1.0, 1.0, 1.0)
    half = summarise(simulate(trace, "round_robin", replace(config, ranks=2)), replace(config, ranks=2))
    assert half.prefill_busy == pytest.approx(0.5, abs=0.06), "what was computed before the window is no part of it"
    slow = replace(config, timing=SimTiming(3.0, 0.0, 0.0, 0.0))
    outcome = simulate(trace, "round_robin", slow)
    assert outcome.until_s == 15.0 < outcome.ended_s, "the end of the window, not of the run that it waits for"
    few = replace(config, end_s=0.0, end_requests=4)
    assert arrivals(simulate(trace, "round_robin", few).courses) == [5.0, 6.0, 7.0, 8.0]
    with pytest.raises(ConfigError, match=r"no request came after the warm-up \(50 s\)"):
        simulate(trace, "round_robin", replace(config, warm_up_s=50.0, end_s=60.0))


def test_sessions_are_drawn_in_another_order_for_each_seed() -> None:
    trace = generate_sessions(12, seed=1)
    first, second = (trace.started(seed).requests for seed in (1, 2))
    assert [each.session for each in first if not each.after] != [each.session for each in second if not each.after]


def test_load_and_rate_stretch_the_starts_of_sessions_alone() -> None:
    trace = generate_sessions(40, seed=3)
    with pytest.raises(ConfigError, match="does not say when its sessions began: give --load, --rate or --concurrency"):
        simulate(trace, "round_robin", LabConfig(load=0.0))
    config = LabConfig(ranks=4, decode_ranks=0, rate=0.5)
    courses = simulate(trace, "total_tokens", config).courses
    starts = sorted(course.arrived_s for course in courses if not course.request.after)
    assert 39 / (starts[-1] - starts[0]) == pytest.approx(0.5)
    places = {course.request: course for course in courses}
    for course in courses:
        for former in course.request.after:
            ended_s = places[courses[former].request].finished_s
            assert course.arrived_s == pytest.approx(ended_s + course.request.think_s)


def test_the_same_call_gives_the_same_outcome() -> None:
    trace, config = generate_sessions(12, seed=1), LabConfig(ranks=2, decode_ranks=2, concurrency=4)
    assert simulate(trace, "cache_aware", config) == simulate(trace, "cache_aware", config)
    assert simulate(trace, "cache_aware", config) != simulate(trace, "cache_aware", replace(config, seed=2))


# --- the generator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own", "turn", "output", "tool", "human"])
def test_medians_and_means_are_those_of_the_shape(name: str) -> None:
    """Before the cuts: the median within 5 %, the mean within three standard errors."""
    draw: Draw = replace(getattr(SessionShape(), name), most=math.inf)
    rng = random.Random(1)
    values = [draw.draw(rng) for _ in range(20_000)]
    assert median(values) == pytest.approx(draw.median, rel=0.05)
    assert abs(mean(values) - draw.mean) < 3 * stdev(values) / math.sqrt(len(values))


def test_the_shape_of_generated_sessions() -> None:
    shape, trace = SessionShape(), generate_sessions(600, seed=2)
    by_session: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        by_session[request.session].append(request)
    assert len(by_session) == 600
    assert not trace.timed
    groups: set[tuple[int, ...]] = set()
    thinks: list[float] = []
    for requests in by_session.values():
        for before, after in pairwise(requests):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.hashes[: len(before.hashes)] == before.hashes, "a turn's prompt begins with the one before"
            thinks.append(after.think_s)
        assert max(request.prompt_tokens for request in requests) < shape.limit_tokens
        groups.add(requests[0].hashes[62:82])
        assert requests[0].hashes[:62] == trace.requests[0].hashes[:62], "31,744 tokens are shared by all"
    assert 60 < len(groups) <= shape.groups
    first = Counter(requests[0].hashes[62:82] for requests in by_session.values()).most_common()
    assert first[0][1] > 2 * first[len(first) // 2][1], "few groups have many sessions"
    assert len(generate_sessions(600, seed=2, shape=replace(shape, end_rise=4.0))) < 0.9 * len(trace)
    assert 8 < len(trace) / 600 < 16  # AIPerf's published trace has 11.6 turns a session
    expected = shape.tool_share * shape.tool.mean + (1 - shape.tool_share) * shape.human.mean
    assert mean(thinks) == pytest.approx(expected, abs=3 * stdev(thinks) / math.sqrt(len(thinks)))


# --- files ----------------------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def weka(**changes: Any) -> dict[str, Any]:
    """A session of three turns, with a sub-agent of two between the first and the second."""
    agent = {
        "t": 30.0, "type": "subagent", "duration_ms": 19_000,
        "requests": [
            {"t": 0.0, "in": 64, "out": 5, "hash_ids": [7], "api_time": 2.0, "think_time": 0.0},
            {"t": 6.0, "in": 130, "out": 5, "hash_ids": [7, 8], "api_time": 2.0, "think_time": 4.0},
        ],
    }  # fmt: skip
    return {
        "id": "a", "block_size": 64, "hash_id_scope": "local",
        "requests": [
            {"t": 0.0, "in": 200, "out": 9, "hash_ids": [1, 2, 3], "api_time": 10.0, "think_time": 0.0},
            agent,
            {"t": 32.5, "in": 300, "out": 9, "hash_ids": [1, 2, 3, 4], "api_time": 1.0, "think_time": 22.5},
            {"t": 40.0, "in": 64, "out": 1, "hash_ids": [9], "think_time": 6.5},
        ],
    } | changes  # fmt: skip


def test_weka_sessions_with_a_sub_agent(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "w.jsonl", weka(), weka(id="b")))
    assert (len(trace), trace.block_tokens, trace.timed) == (10, 64, False)
    mine = [place for place, request in enumerate(trace.requests) if request.session == 0]
    first, agent, further, second, third = (trace.requests[place] for place in mine)
    assert (first.after, agent.after, further.after) == ((), (mine[0],), (mine[1],))
    assert (agent.think_s, further.think_s) == (1.0, 4.0)  # it began at 11 s, a second after the answer
    assert set(second.after) == {mine[0], mine[2]}
    assert second.think_s == 2.5  # after the sub-agent's end at 30 s
    assert third.think_s == 6.5
    assert [len(each.hashes) for each in (first, agent, further, second, third)] == [3, 1, 2, 4, 1]
    assert second.hashes[:3] == first.hashes
    assert all(before < place for place, request in enumerate(trace.requests) for before in request.after)
    ids = [{h for r in trace.requests if r.session == number for h in r.hashes} for number in (0, 1)]
    assert not ids[0] & ids[1], "ids are a session's own"
    shared = read_trace(write(tmp_path / "g.jsonl", weka(hash_id_scope="global"), weka(hash_id_scope="global")))
    assert {h for r in shared.requests if r.session == 0 for h in r.hashes} == {
        h for r in shared.requests if r.session == 1 for h in r.hashes
    }


def test_a_folder_and_a_compressed_file_say_the_same(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path / "w.jsonl", weka(), weka(id="b")))
    with gzip.open(tmp_path / "w.jsonl.gz", "wt") as file:
        file.write((tmp_path / "w.jsonl").read_text())
    folder = tmp_path / "w"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(weka(id=name), indent=2))
    assert read_trace(tmp_path / "w.jsonl.gz") == read_trace(folder) == plain
    assert len(read_trace(folder / "a.json")) == 5, "one session over many lines"
    (tmp_path / "damaged.gz").write_bytes(gzip.compress(b"{" * 999)[:12] + b"x" * 99)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "damaged.gz")
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has no \.json file"):
        read_trace(empty)


def test_turns_of_aiperf_add_to_the_prompt_before(tmp_path: Path) -> None:
    trace = read_trace(
        write(
            tmp_path / "s.jsonl",
            {"session_id": "x", "input_length": 1536, "output_length": 320, "hash_ids": [0, 1, 2], "timestamp": 0.0},
            {"session_id": "y", "input_length": 600, "output_length": 1, "hash_ids": [0, 9], "timestamp": 500.0},
            {"session_id": "x", "input_length": 768, "output_length": 180, "hash_ids": [5, 6], "delay": 2450.0},
        )
    )
    first, other, second = trace.requests
    assert (second.prompt_tokens, second.output_tokens) == (1536 + 320 + 768, 180)
    assert second.hashes == (*first.hashes, 6, 7)
    assert (second.after, second.think_s, second.session) == ((0,), 2.45, first.session)
    assert (other.arrival_s, other.hashes, trace.timed) == (0.5, (1,), True)
    row = {"input_length": 600, "output_length": 1, "timestamp": 0.0}
    assert not read_trace(write(tmp_path / "0.jsonl", *({"session_id": n} | row for n in range(3)))).timed, "no starts"


def test_bailian_chats_follow_their_parents(tmp_path: Path) -> None:
    rows = [
        (159, -1, 61.0, 40, [4, 5, 6]),
        (160, 159, 62.5, 50, [4, 5, 7, 8]),
        (161, 7, 63.0, 20, []),
    ]
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids")
    given = [dict(zip(names, row, strict=True)) | {"output_length": 3} for row in rows]
    trace = read_trace(write(tmp_path / "b.jsonl", *given))
    first, second, cut = trace.requests
    assert (trace.block_tokens, first.hashes, second.hashes) == (16, (5, 6), (5, 6, 8))
    assert (second.after, second.think_s, second.session) == ((0,), 1.5, first.session)
    assert (cut.after, cut.session == first.session) == ((), False)  # its parent was before the file


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (weka(block_size=0), "w:2: block_size is 0"),
        (weka(block_size=32), "w:2: block_size is 32, and 64 in the sessions before"),
        (weka(requests=[{"t": 0}]), "w:2: in is missing"),
        (weka(requests=[{"t": 0, "in": 99, "out": 1, "hash_ids": ["x"]}]), "w:2: hash_ids is 'x'"),
        (weka(requests=[{"t": 0, "in": 99, "out": 1, "hash_ids": [-1]}]), "w:2: hash_ids is -1"),
        (weka(requests=[{"t": 0, "requests": []}]), "w:2: duration_ms is missing"),
        ([], "w:2: "),
    ],
)
def test_what_is_wrong_with_a_session_is_one_line(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(write(tmp_path / "w", weka(), row))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_places_follow_the_order_of_arrival() -> None:
    """`after` names places, so it moves with them."""
    late = [replace(turns(0, 0.0)[0], arrival_s=9.0), replace(turns(0, 1.0)[0], arrival_s=12.0, after=(0,))]
    soon = [replace(turns(1, 0.0)[0], arrival_s=1.0), replace(turns(1, 1.0)[0], arrival_s=10.0, after=(2,))]
    trace = checked("t", [*late, *soon], 16)
    assert [(request.session, request.after) for request in trace.requests] == [(1, ()), (0, ()), (1, (0,)), (0, (1,))]
    assert [(r.session, r.after) for r in trace.scaled(0.0).requests] == [(1, ()), (0, ()), (0, (1,)), (1, (0,))]
    assert len(trace.first(9.0)) == 3
