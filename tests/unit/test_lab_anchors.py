"""`pdbus anchors`: each figure is the ratio of the right two runs, its band follows from the published one alone, and a
fixed seed gives the same table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bus.errors import ConfigError
from pdbus.commands import anchors as page
from pdbus.lab import anchors as lab
from pdbus.lab.anchors import Anchor, Row, Side, Traces, anchors, conversations, measure, prompts, turns, verdict
from pdbus.lab.compare import Result, Run, compare
from pdbus.lab.config import LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.metrics import Estimate, Summary
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace, TraceRequest, checked

SMALL = LabConfig(ranks=2, decode_ranks=2, concurrency=4)


class Made:
    """Runs that are made up: the mean TTFT is the method's own, times the seed; other figures are 1."""

    def __init__(self) -> None:
        self.ttfts = {"round_robin": 6.0, "cache_aware": 2.0}
        self.runs: list[Run] = []

    def run(self, runs: Sequence[Run]) -> list[Result]:
        self.runs += runs
        return [self.result(each) for each in runs]

    def result(self, run: Run) -> Result:
        figures = dict.fromkeys((field.name for field in fields(Summary)), 1.0)
        figures["ttft_mean_s"] = self.ttfts.get(run.method, 1.0) * run.config.seed
        return Result(run.method, run.config.seed, Summary(**figures), [], 1.0, [])  # type: ignore[arg-type]


def named(name: str) -> list[Anchor]:
    return [each for each in anchors() if each.name == name]


def no_clock(side: Side, trace: Trace) -> float:
    raise AssertionError


def figure(theirs: tuple[float, ...]) -> Anchor:
    over, under = (Side("prompts", method, SMALL) for method in ("round_robin", "cache_aware"))
    return Anchor("a", "case", theirs, "source", "ttft_mean_s", over, under, "the reason")


# --- figures ------------------------------------------------------------------------------------------------------


def test_the_published_ratios_are_those_of_the_published_figures() -> None:
    found = {each.case: each.theirs for each in anchors()}
    ttfts = [theirs for case, theirs in found.items() if "generated sessions" in case]
    assert [round(ratio, 1) for (ratio,) in ttfts] == [2.1, 2.7, 3.7, 3.6]
    (more,), (sooner,), (slower,) = (each.theirs for each in named("sglang"))
    assert (round(more, 3), round(sooner, 1), round(slower, 2)) == (1.294, 10.3, 2.08)
    assert [len(each.theirs) for each in named("dynamo")] == [0, 0]
    assert [round(ratio, 2) for each in named("vllm") for ratio in each.theirs] == [2.0, 1.22, 1.69, 1.69]


def test_ours_is_the_ratio_of_two_runs_with_the_same_requests() -> None:
    made = Made()
    (row,) = measure([figure((4.0,))], Traces({}), range(1, 4), made.run, no_clock)
    assert row.ours is not None
    assert (row.ours.mean, row.ours.half_width) == (3.0, 0.0)
    assert (row.agrees, row.note) == ("yes", "")
    assert [(run.method, run.config.seed) for run in made.runs] == [
        (method, seed) for seed in (1, 2, 3) for method in ("round_robin", "cache_aware")
    ]
    assert made.runs[0].trace is made.runs[1].trace
    assert made.runs[0].trace != made.runs[2].trace


def test_a_run_behind_several_figures_is_made_once() -> None:
    made = Made()
    rows = measure(named("sglang"), Traces({}), [1], made.run, no_clock)
    assert [run.config.decode_cache for run in made.runs] == [False, True]
    assert [row.ours.mean for row in rows if row.ours is not None] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("theirs", "mean", "half", "agrees"),
    [
        ((4.0,), 2.0, math.nan, "yes"),
        ((4.0,), 8.0, math.nan, "yes"),
        ((4.0,), 8.1, math.nan, "no"),
        ((4.0,), 1.9, math.nan, "no"),
        ((4.0,), 2.5, 0.6, "open"),
        ((4.0,), 2.5, 0.4, "yes"),
        ((4.0,), 1.0, 0.9, "no"),
        ((4.0, 9.0), 27.0, math.nan, "yes"),
        ((), 1.0, 0.1, "first"),
    ],
)
def test_ours_agrees_from_half_to_one_and_a_half_times_as_strong(
    theirs: tuple[float, ...], mean: float, half: float, agrees: str
) -> None:
    assert verdict(Estimate(mean, half), figure(theirs).band) == agrees


def test_a_figure_outside_its_band_says_why() -> None:
    (row,) = measure([figure((50.0,))], Traces({}), [1], Made().run, no_clock)
    assert (row.agrees, row.note) == ("no", "the reason")


def test_what_is_not_there_says_so() -> None:
    made = Made()
    rows = measure([*named("vllm")[2:], *named("dynamo")], Traces({}), [1], made.run, no_clock)
    assert [row.agrees for row in rows] == ["not yet"] + ["no file"] * 2
    assert [row.note for row in rows[1:]] == ["give --conversation FILE"] * 2
    assert all(row.note and row.ours is None for row in rows)
    assert not made.runs


def test_seconds_are_measured_once_over_theirs() -> None:
    asked = []

    def clock(side: Side, trace: Trace) -> float:
        asked.append(len(trace))
        return 4.82

    (row,) = measure(named("speed"), Traces({}), [1, 2, 3], Made().run, clock)
    assert asked == [23_608]
    assert row.ours is not None
    assert row.ours.mean == pytest.approx(2.0)
    assert (row.anchor.band, row.agrees) == ((0.0, 5.0), "yes")


def test_the_shared_prompts_are_those_of_the_source() -> None:
    trace = prompts(1, requests=20)
    assert {request.prompt_tokens for request in trace.requests} == {54_500}
    first, second = trace.requests[0].hashes, trace.requests[1].hashes
    assert len(first) == 54_500 // 512
    assert sum(one == other for one, other in zip(first, second, strict=True)) == 50_000 // 512
    outputs = [request.output_tokens for request in prompts(1).requests]
    assert 295 <= min(outputs) < max(outputs) <= 415
    assert sum(outputs) / len(outputs) == pytest.approx(355, rel=0.02)


def test_the_conversations_are_those_of_the_source() -> None:
    trace = conversations(1)
    first = [request for request in trace.requests if len(request.after) < 2 and not set(request.after) - {0}]
    assert 24 * 6 <= len(trace) <= 24 * 9
    outputs, sessions = [request.output_tokens for request in trace.requests], {r.session for r in trace.requests}
    assert 800 <= min(outputs) < max(outputs) <= 1_200
    assert (sessions, len({request.hashes[:31] for request in trace.requests})) == ({0, 1}, 1)
    kept = trace.kept_hashes()
    turns = [request for request in trace.requests if len(request.after) == 2]
    for request in turns:
        before = trace.requests[min(request.after)]
        assert 120 <= request.prompt_tokens - before.prompt_tokens - before.output_tokens <= 160
        assert request.hashes[: len(kept[min(request.after)])] == kept[min(request.after)]
    assert len(turns) >= len(trace) - 24 - 8, "the last conversation of a client goes on with itself"
    assert first


def test_turns_go_on_where_the_last_one_ended() -> None:
    trace = turns(1, 5_000, 50, 4, 10)
    assert len(trace) == 40
    assert len({request.hashes[: 5_000 // 16] for request in trace.requests}) == 1
    for number, request in enumerate(trace.requests):
        if request.after:
            before = trace.requests[number - 1]
            assert request.after == (number - 1,)
            assert 37 <= request.prompt_tokens - before.prompt_tokens - before.output_tokens <= 62
            assert request.hashes[: len(before.hashes)] == before.hashes


def test_every_side_can_be_run() -> None:
    """Each setting, with few requests."""
    short = {name: generate_sessions(8, seed=1) for name in ("generated", "weka", "conversation")}
    short["prompts"] = prompts(1, requests=6)
    short["conversations"] = conversations(1, each=2)
    short["chat"] = short["code"] = turns(1, 200, 50, 3, 8)
    for each in anchors():
        for side in (each.over, each.under):
            if side is not None and not each.times:
                under_way = min(4, side.config.concurrency or 4)
                config = replace(side.config, concurrency=under_way, warm_up_s=0.0, end_requests=20)
                trace = short[side.trace]
                assert simulate(trace, side.method, config).courses, side


def test_a_fixed_seed_gives_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests, four of them under way."""
    monkeypatch.setitem(lab._MAKERS, "prompts", lambda seed: prompts(seed, requests=12))
    monkeypatch.setattr(lab, "SGLANG", replace(lab.SGLANG, concurrency=4))

    def table() -> str:
        return page.markdown_of(measure(named("sglang"), Traces({}), [1, 2], compare, no_clock))

    assert table() == table()


# --- LMetric ------------------------------------------------------------------------------------------------------


def test_lmetric_multiplies_what_is_to_be_computed_with_the_requests() -> None:
    """Two ranks, a request each. The next one's prefix is at the second, whose own prompt is longer: 1 block x 2 there,
    4 x 2 at the first."""
    requests = [
        TraceRequest(0.0, 16, 40, (1,)),
        TraceRequest(0.1, 64, 40, (2, 3, 4)),
        TraceRequest(5.0, 64, 2, (2, 3, 4)),
    ]
    config = LabConfig(ranks=0, decode_ranks=0, unified_ranks=2, load=0.0)
    courses = simulate(checked("t", requests, 16), lab.LMETRIC, config).courses
    first, second, third = (course.unified_rank for course in courses)
    assert {first, second} == {0, 1}
    assert third == second


# --- the command --------------------------------------------------------------------------------------------------


def test_json_has_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "run_virtual", lambda runs, jobs, console: Made().run(runs))
    done = CliRunner().invoke(page.command, ["--only", "sglang", "--only", "vllm", "--json", "--seeds", "2"])
    found = json.loads(done.stdout)
    assert found["seeds"] == [1, 2]
    assert [row["agrees"] for row in found["anchors"]] == ["no", "no", "no", "no", "no", "not yet"]
    first, last = found["anchors"][0], found["anchors"][-1]
    assert (first["name"], first["ours"], first["half_width_95"]) == ("sglang", 1.0, 0.0)
    assert first["band"] == [round((1.608 / 1.243) ** 0.5, 6), round((1.608 / 1.243) ** 1.5, 6)]
    assert (last["theirs"], last["ours"]) == ([round(778 / 460, 6)], None) or last["theirs"] == [778 / 460]
    assert last["note"] == "it is not published what a turn adds"


def test_the_table_and_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "run_virtual", lambda runs, jobs, console: Made().run(runs))
    monkeypatch.setattr(page, "cpu_s", lambda side, trace: 1.0)
    done = CliRunner().invoke(page.command, ["--seeds", "1", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "no file" in done.stdout
    assert "not yet" in done.stdout
    assert "3.00" in done.stdout
    assert (tmp_path / "out" / "anchors.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "out" / "anchors.json").read_text())["anchors"]) == len(anchors())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weka", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl: No such file or directory"),
        (["--only", "sglang", "--weka", "x.jsonl"], "--weka is for dynosim, which --only leaves out"),
        (["--only", "sglang", "--conversation", "x.jsonl"], "--conversation is for dynamo, which --only leaves out"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(page.command, arguments)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == words


def test_a_file_with_too_few_sessions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    turn = {"in": 100, "out": 5, "t": 0.0, "hash_ids": [1], "think_time": 0.0}
    path.write_text("\n".join(json.dumps({"block_size": 64, "requests": [turn]}) for _ in range(3)) + "\n")
    assert len(read_trace(path)) == 3
    with pytest.raises(ConfigError, match="has 3 sessions: more than 32 are needed"):
        Traces({"weka": path})


def test_rows_without_ours_have_no_numbers() -> None:
    row = Row(named("blis")[0], None, "not yet", "later")
    assert row.figures["ours"] is None
    assert row.figures["half_width_95"] is None
