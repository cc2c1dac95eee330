"""Timelines: recorded facts as trace events, their file, and the recording of a virtual run."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from timelines import check_slices_and_arrows

from bus.errors import ConfigError
from bus.wire.messages import ControllerEvent, RankStep, RankWork
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.outcome import Outcome
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.tape import Tape
from pdbus.lab.traces import Trace, TraceRequest
from pdbus.timeline.facts import LoadSample, RankTrack, Timeline
from pdbus.timeline.output import TimelineFile
from pdbus.timeline.trace_events import TraceEvents


def events_of(timeline: Timeline) -> tuple[list[dict[str, Any]], TraceEvents]:
    events = TraceEvents(timeline)
    return list(events), events


def counters_of(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    found = [(each, *each["args"].items()) for each in events if each["ph"] == "C"]
    return [(f"{each['name']} {unit}", each["ts"], value) for each, (unit, value) in found]


def pair(offset_us: int = 0, rtt_us: int = 0, **fetch: Any) -> Timeline:
    """A request whose prompt takes two chunks at prefill-0/0, until 30 ms, and is fetched by decode-0/1 from 31 ms on,
    whose clock is ahead by `offset_us`."""
    prefill = RankTrack("prefill-0", 0, "prefill", 0, rtt_us)
    prefill.steps = [RankStep(1, 10_000, 12_000, 0, 96, 0), RankStep(2, 22_000, 8_000, 0, 4, 96)]
    prefill.work = [
        RankWork("chunk", "r", 1, 10_000, 12_000, 96, 0, 100),
        RankWork("chunk", "r", 1, 22_000, 8_000, 4, 96, 100),
    ]
    decode = RankTrack("decode-0", 1, "decode", offset_us, rtt_us)
    decode.steps = [
        RankStep(7, 40_000 + offset_us, 10_000, 1, 0, 100),
        RankStep(8, 50_000 + offset_us, 10_000, 1, 0, 101),
    ]
    about = {"began_us": 31_000 + offset_us, "duration_us": 2_000} | fetch
    decode.work = [RankWork("fetch", "r", 1, tokens=100, instance="prefill-0", dp_rank=0, **about)]
    return Timeline("a pair", [decode, prefill], {"c": [(5_000, 1), (6_000, 1), (7_000, 0)]})


def test_a_pair_as_trace_events() -> None:
    events, made = events_of(pair(offset_us=5_000_000))
    names = {(each["name"], each["pid"]): each["args"]["name"] for each in events if each["ph"] == "M"}
    assert {name for (kind, _), name in names.items() if kind == "process_name"} == {
        "about this recording", "c", "prefill-0/0", "decode-0/1",
    }  # fmt: skip
    slices = [(each["name"], each["ts"], each["dur"], each["args"]) for each in events if each["ph"] == "X"]
    assert slices == [  # from the first event on, which is the queue's, by the timeline's clock
        ("prefill", 5_000, 12_000, {"number": 1, "prompt tokens": 96}),
        ("prefill", 17_000, 8_000, {"number": 2, "prompt tokens": 4}),
        ("r", 5_000, 12_000, {"tokens": 96, "prompt": 100}),
        ("r", 17_000, 8_000, {"tokens": 4, "before": 96, "prompt": 100}),
        ("decode", 35_000, 10_000, {"number": 7, "decode rows": 1}),
        ("decode", 45_000, 10_000, {"number": 8, "decode rows": 1}),
        ("KV r", 26_000, 2_000, {"tokens": 100, "from": "prefill-0/0"}),
    ]
    start, end = (next(each for each in events if each["ph"] == ph) for ph in "sf")
    chunk, fetch = (next(e for e in events if e["ph"] == "X" and e["ts"] == ts and e["cat"] != "step")
                    for ts in (17_000, 26_000))  # fmt: skip
    assert [start[key] for key in ("pid", "tid", "ts")] == [chunk[key] for key in ("pid", "tid", "ts")]
    assert [end[key] for key in ("pid", "tid", "ts")] == [fetch[key] for key in ("pid", "tid", "ts")]
    assert (start["id"], end["bp"]) == (end["id"], "e")
    counters = counters_of(events)
    assert counters == [
        ("waiting requests", 0, 1), ("waiting requests", 2_000, 0),
        ("decode batch", 5_000, 0), ("KV tokens", 5_000, 0), ("KV tokens", 17_000, 96),
        ("decode batch", 35_000, 1), ("decode batch", 55_000, 0),
        ("KV tokens", 35_000, 100), ("KV tokens", 45_000, 101),
    ]  # fmt: skip
    assert [each["name"] for each in events if each["ph"] == "i"] == ["a pair"]
    assert (made.counts.slices, made.counts.counters, made.counts.flows) == (8, 9, 1)


@pytest.mark.parametrize(("began_us", "rtt_us", "beyond"), [(29_800, 400, 0), (29_400, 400, 1), (29_400, 600, 0)])
def test_an_arrow_that_would_go_backwards_is_cut_and_says_by_how_much(began_us: int, rtt_us: int, beyond: int) -> None:
    events, made = events_of(pair(rtt_us=rtt_us, began_us=began_us))
    fetch = next(each for each in events if each.get("cat") == "fetch")
    chunk_end = made.zero_us + fetch["ts"]
    assert chunk_end == 30_000
    assert fetch["dur"] == began_us + 2_000 - 30_000
    assert fetch["args"]["cut by µs"] == made.counts.worst_us == 30_000 - began_us
    assert (made.counts.clamped, made.counts.beyond) == (1, beyond)
    assert f"cut by {30_000 - began_us} µs at most; {beyond} of them" in events[-1]["name"]


def test_a_transfer_that_was_over_before_its_source_was_ready_still_follows_it() -> None:
    events, _ = events_of(pair(began_us=1_000, duration_us=500))
    fetch = next(each for each in events if each.get("cat") == "fetch")
    assert fetch["ts"] == 30_000 - 1_000
    assert fetch["dur"] == 1


def test_where_chunks_are_not_said_an_arrow_starts_at_the_prompt() -> None:
    timeline = pair()
    timeline.ranks[1].steps.clear()
    timeline.ranks[1].work[:] = [RankWork("prompt", "r", 1, 6_000, 24_000, 100), RankWork("new word", "r", 1, 1, 2, 3)]
    events, made = events_of(timeline)
    (prompt,) = (each for each in events if each.get("cat") == "prompt")
    start = next(each for each in events if each["ph"] == "s")
    assert [start[key] for key in ("pid", "tid", "ts")] == [prompt[key] for key in ("pid", "tid", "ts")]
    assert made.counts.flows == 1
    assert "new word" not in {each.get("cat") for each in events}, "a word of a later version"
    check_slices_and_arrows(events)


def test_a_source_that_was_not_recorded_gives_no_arrow_and_clocks_not_known_are_named() -> None:
    timeline = pair(rtt_us=-1)
    timeline.ranks[1].work.clear()
    timeline.ranks[1].note = "it says no steps"
    events, made = events_of(timeline)
    assert made.counts.flows == 0
    assert not [each for each in events if each["ph"] in "sf"]
    assert made.notes()[1:] == [
        "prefill-0/0: it says no steps",
        "clock not known, taken as it is: prefill-0/0, decode-0/1",
    ]


def test_events_of_the_controller_and_loads_of_a_rank_without_steps() -> None:
    rank = RankTrack("vllm", 0, "unified", samples=[LoadSample(4, 1, 2, 30), LoadSample(9, 1, 3, 40)])
    lost = ControllerEvent(3, 6, "rank_lost", "vllm", 0, "silent", "for 5 s", True)
    events, _ = events_of(Timeline("t", [rank], events={"c": [lost]}))
    (shown,) = (each for each in events if each.get("cat") == "event")
    assert (shown["name"], shown["ts"]) == ("rank_lost vllm/0", 2)
    assert shown["args"] == {"rank": "vllm/0", "code": "silent", "phrase": "for 5 s", "trouble": True}
    counters = counters_of(events)
    assert counters == [("running requests", 0, 1), ("waiting requests", 0, 2), ("waiting requests", 5, 3),
                        ("KV tokens", 0, 30), ("KV tokens", 5, 40)]  # fmt: skip
    assert "vllm/0 (unified)" in [each["args"]["name"] for each in events if each["ph"] == "M"]


def test_no_slice_overlaps_and_no_arrow_goes_backwards_whatever_the_clocks_say() -> None:
    rng = random.Random(5)
    for _ in range(50):
        ranks = [RankTrack("p", n, "prefill", rng.randrange(-900, 900), rng.randrange(-1, 50)) for n in range(3)]
        ranks += [RankTrack("d", n, "decode", rng.randrange(-900, 900), rng.randrange(-1, 50)) for n in range(3)]
        for number in range(60):
            source, target = rng.choice(ranks[:3]), rng.choice(ranks[3:])
            at, late = rng.randrange(2_000), rng.randrange(-300, 600)
            what = rng.choice(["chunk", "lend"])
            source.work.append(RankWork(what, str(number % 40), 1, at, rng.randrange(200), 9, rng.choice([0, 1]), 10))
            target.work.append(RankWork("fetch", str(number % 40), 1, at + late, rng.randrange(300), 9,
                                    instance="p", dp_rank=source.dp_rank))  # fmt: skip
            source.steps.append(RankStep(number, at, rng.randrange(200), 1, 1, 1))
        events, made = events_of(Timeline("t", ranks))
        check_slices_and_arrows(events)
        assert made.counts.flows == sum(each["ph"] == "s" for each in events)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_the_file_is_json_and_compressed_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    timeline = pair()
    timeline.ranks[1].work.append(RankWork("chunk", '</script>"\\\n\x00\u2028', 1, 1, 1, 1))
    with TimelineFile(path) as file:
        counts = file.write(timeline)
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert found["traceEvents"] == events_of(timeline)[0]
    assert {key: found["otherData"][key] for key in ("slices", "counters", "flows")} == {
        "slices": counts.slices, "counters": counts.counters, "flows": counts.flows,
    }  # fmt: skip
    assert found["otherData"]["notes"] == ["a pair"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_one_line_before_anything_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "out.json", "No such file or directory"),
        (tmp_path / "file" / "out.json", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'cannot write {path}: {why}')}$"):
            TimelineFile(path)


def test_a_recording_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), TimelineFile(path):
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with (
        TimelineFile(Path("/dev/full")) as file,
        pytest.raises(ConfigError, match=r"^cannot write /dev/full: No space"),
    ):
        file.write(pair())


# --- virtual runs -----------------------------------------------------------------------------------------------------

RUNS = {
    "pairs": LabConfig(ranks=2, decode_ranks=2),
    "links, caches, by layer": LabConfig(
        ranks=2, decode_ranks=2, link_s_per_token=1e-5, decode_cache=True, fetch_by_layer=True,
        decode_method="cache_aware", queue_order="slo", controllers=2,
    ),
    "read back": LabConfig(
        ranks=2, decode_ranks=2, link_s_per_token=1e-5, decode_cache=True, decode_method="cache_aware", trip="read_back"
    ),
    "unified": LabConfig(ranks=0, decode_ranks=0, unified_ranks=2),
    "a mixture": LabConfig(ranks=2, decode_ranks=1, unified_ranks=2, decode_cache=True),
    "prefill alone": LabConfig(ranks=3, decode_ranks=0),
}  # fmt: skip


def run(name: str, tape: Tape | None) -> Outcome:
    trace = generate_sessions(12, seed=3) if name == "read back" else generate(40.0, seed=3)
    return simulate(trace, "cache_aware", RUNS[name], tape=tape)


@pytest.mark.parametrize("name", RUNS)
def test_a_virtual_run_is_recorded_whole_and_is_the_same_as_without(name: str) -> None:
    tape = Tape(0.0, 1e9)
    outcome, without = run(name, tape), run(name, None)
    assert repr(outcome) == repr(without)  # NaN is no number
    timeline = tape.done()
    assert not tape.left_out
    events, made = events_of(timeline)
    check_slices_and_arrows(events)
    assert not made.counts.clamped
    timing = RUNS[name].timing
    chunks: dict[int, int] = defaultdict(int)
    for rank in timeline.ranks:
        assert [step.number for step in rank.steps] == [*range(1, len(rank.steps) + 1)]
        for step in rank.steps:
            assert step.decode_rows + step.prompt_tokens > 0
            least_s = timing.step_s(step.prompt_tokens, step.decode_rows, 0)
            assert least_s * 1e6 - 2 <= step.duration_us
        by_step: dict[int, int] = defaultdict(int)
        for work in rank.work:
            if work.what == "chunk":
                chunks[int(work.rid)] += work.tokens
                by_step[work.began_us] += work.tokens
        assert by_step == {step.began_us: step.prompt_tokens for step in rank.steps if step.prompt_tokens}
    for number, course in enumerate(outcome.courses):
        assert chunks[number] == course.request.prompt_tokens - course.cached_tokens, number
    transfers = [work for rank in timeline.ranks for work in rank.work if work.what in ("fetch", "read")]
    assert made.counts.flows == len(transfers)
    moved = sum(course.moved_tokens for course in outcome.courses)
    assert moved == sum(work.tokens for work in transfers if work.what == "fetch")
    assert sum(each.read_tokens for each in outcome.courses) == sum(w.tokens for w in transfers if w.what == "read")
    if name == "read back":
        assert any(work.what == "read" and work.tokens for work in transfers)


def test_a_part_of_a_virtual_run_is_the_same_part_of_the_whole() -> None:
    whole, part = Tape(0.0, 1e9), Tape(10.0, 5.0)
    run("pairs", whole)
    run("pairs", part)
    for all_of_it, some in zip(whole.timeline.ranks, part.timeline.ranks, strict=True):
        assert some.steps == [step for step in all_of_it.steps if 10e6 <= step.began_us < 15e6]
        assert some.work == [work for work in all_of_it.work if 10e6 <= work.began_us < 15e6]
        assert some.steps


def test_a_long_recording_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.lab.tape.MAX_FACTS", 100)
    tape = Tape(0.0, 1e9)
    run("pairs", tape)
    assert tape.left_out > 100
    assert f"{tape.left_out} facts beyond the first 100 are left out" in tape.done().notes


@pytest.mark.parametrize(("rate", "prompt", "output", "most_mb"), [(100, 600, 200, 3), (1_600, 40, 30, 12)])
def test_ten_seconds_of_sixteen_ranks_are_a_small_file(
    tmp_path: Path, rate: int, prompt: int, output: int, most_mb: int
) -> None:
    requests = [
        TraceRequest(number / rate, prompt // 2 + number * 37 % prompt, output // 2 + number * 11 % output)
        for number in range(12 * rate)
    ]
    tape = Tape(2.0, 10.0)
    simulate(Trace("t", tuple(requests), 16), "cache_aware", LabConfig(load=0.0), tape=tape)
    with TimelineFile(tmp_path / "out.json.gz") as file:
        counts = file.write(tape.done())
    assert counts.flows > 9 * rate, "it has all requests of ten seconds"
    assert (tmp_path / "out.json.gz").stat().st_size < most_mb * 1e6
