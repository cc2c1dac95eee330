"""A fleet over a quarter of an hour: its rows, what they take, and which ranks are slow or full."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from status_world import latencies, rank, sample

from bus.wire.messages import RankStatus
from pdbus.fleet.conditions import FULL, HOLDS_S
from pdbus.fleet.history import RANK_ROW_S, SPAN_S, WINDOW_S, History

ROOT = Path(__file__).parents[2]
HELD = "of its KV memory is in use"


@pytest.mark.timeout(600)
def test_fifteen_minutes_of_1024_ranks_take_less_than_30_mb() -> None:
    """18 MB, and 9.5 for each 1,024 ranks: those of 4,096 take 56 MB."""
    script = ROOT / "tests" / "support" / "fleet_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), "1024"], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{script.parent}"},
    )  # fmt: skip
    megabytes, _, rows = map(float, done.stdout.split())
    assert 20 < megabytes < 30
    assert rows > 100


def run(seconds: int, *, of: Any, step_s: float = 1.0, start: float = 0.0) -> History:
    made = History()
    for turn in range(round(seconds / step_s) + 1):
        at = start + turn * step_s
        made.add(sample(at, *of(turn * step_s)))
    return made


def test_rows_of_the_fleet_are_a_second_apart_and_of_a_rank_ten_and_both_end() -> None:
    def at(now: float) -> list[RankStatus]:
        load = {"output_tokens_total": int(100 * now), "step": int(10 * now), "busy_us_total": int(500_000 * now),
                "kv_sent_bytes_total": int(4000 * now), "kv_cached": 7}  # fmt: skip
        return [rank(load=load, ended_total=int(now), ttft_counts=latencies(*[0.25] * int(now)))]

    made = run(1000, of=at, step_s=0.5)
    assert len(made.rows) == SPAN_S
    assert {round(b.at - a.at, 3) for a, b in zip(made.rows, list(made.rows)[1:], strict=False)} == {1.0}
    last = made.rows[-1]
    assert (last.output_s, last.kv_sent_bytes_s, last.ranks, last.ready) == (100.0, 4000.0, 1, 1)
    assert 0.2 < last.ttft_p50_s <= 0.3
    assert math.isnan(last.tpot_p50_s)
    series = made.series(("decode-0", 0))
    assert len(series) == SPAN_S / RANK_ROW_S
    assert [row.at for row in series[-2:]] == [990.0, 1000.0]
    assert (series[-1].output_s, series[-1].busy, series[-1].requests_s) == (100.0, 0.5, 1.0)
    assert series[-1].step_s == pytest.approx(0.05)
    assert series[-1].kv_cached == 7
    assert math.isnan(series[-1].kv_pinned), "not said"
    assert made.series(("nobody", 0)) == []


def test_a_rank_that_is_gone_takes_its_rows_along_and_a_controller_that_counts_anew_makes_no_rate() -> None:
    made = run(30, of=lambda now: [rank(ended_total=int(now)), rank("prefill-0")])
    made.add(sample(31.0, rank(), epoch=8, done=1))
    assert made.series(("prefill-0", 0)) == []
    assert math.isnan(made.rows[-1].done_s)
    assert made.rows[-1].output_s == 0.0


def test_many_ranks_have_fewer_marks_and_the_same_rates() -> None:
    def at(now: float) -> list[RankStatus]:
        return [rank(f"decode-{n}", load={"output_tokens_total": int(50 * now)}) for n in range(1100)]

    made = run(30, of=at)
    figures = made.figures()
    assert figures is not None
    assert 0.7 * WINDOW_S <= figures.window_s <= WINDOW_S
    assert {each.output_s for each in figures.ranks} == {50.0}
    assert len(made._marks) <= 6


def stepping(number: int, step_ms: float, now: float, **load: int) -> RankStatus:
    """A rank that is busy all the time."""
    steps = int(1000 * now / step_ms)
    return rank("decode-0", number, load={"step": steps, "busy_us_total": int(1000 * step_ms * steps)} | load)


def said(made: History) -> dict[int, list[str]]:
    return {key[1]: [what for what, _ in each] for key, each in made.conditions().items()}


@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_rank_is_slow_when_its_steps_took_more_than_twice_the_median_for_ten_seconds(others: int) -> None:
    def at(now: float) -> list[RankStatus]:
        return [stepping(0, 25.0, now), *(stepping(n + 1, 10.0, now) for n in range(others))]

    assert said(run(9, of=at)) == {}
    made = run(12, of=at)
    assert said(made) == {0: ["slow"]}
    ((condition,),) = made.conditions().values()
    assert condition.why == "25ms a step, and 10ms is the median of decode ranks of m"
    made.add(sample(13.0, *(stepping(n, 10.0, 13.0) for n in range(others + 1))))
    assert said(made) == {}, "at once"


def test_no_rank_is_slow_beside_none_beside_another_kind_or_for_one_long_step() -> None:
    assert said(run(30, of=lambda now: [stepping(0, 25.0, now)])) == {}
    assert said(run(30, of=lambda now: [stepping(0, 25.0, now), rank("prefill-0", load={"step": 1})])) == {}

    def hiccup(now: float) -> list[RankStatus]:
        busy_us = int(1e6 * now) + (3_000_000 if now > 5 else 0)
        slow = rank("decode-0", 0, load={"step": int(100 * now), "busy_us_total": busy_us})
        return [slow, stepping(1, 10.0, now), stepping(2, 10.0, now)]

    assert said(run(30, of=hiccup)) == {}


def test_a_rank_that_steps_no_more_is_no_longer_slow() -> None:
    def at(now: float) -> list[RankStatus]:
        return [stepping(0, 50.0, min(now, 15.0)), stepping(1, 10.0, now), stepping(2, 10.0, now)]

    assert said(run(15, of=at)) == {0: ["slow"]}
    assert said(run(15 + round(HOLDS_S) + 2, of=at)) == {}


@pytest.mark.parametrize(
    ("load", "role", "why"),
    [
        ({"kv_tokens": 951}, "decode", f"95% {HELD}"),
        ({"kv_tokens": 970, "kv_pinned": 600}, "prefill", f"97% {HELD}, 60% is kept for other ranks"),
        ({"kv_tokens": 500, "kv_pinned": 480}, "decode", f"98% {HELD}, 48% is kept for other ranks"),
        ({"kv_tokens": 500, "kv_cached": 500}, "decode", ""),
        ({"kv_tokens": 500, "kv_pinned": 480}, "prefill", ""),
        ({"running": 8, "waiting": 3}, "decode", "8 of 8 run slots are in use, and 3 requests wait"),
        ({"kv_tokens": 940, "running": 7}, "decode", ""),
        ({"kv_tokens": 9, "kv_capacity": 0, "max_running": 0}, "decode", ""),
    ],
)  # fmt: skip
def test_a_rank_is_full_by_memory_or_slots_at_once(load: dict[str, int], role: str, why: str) -> None:
    made = History()
    made.add(sample(0.0, rank(f"{role}-0", load=load)))
    assert [each.why for found in made.conditions().values() for each in found] == ([why] if why else [])
    assert FULL == 0.95
    gone = History()
    gone.add(sample(0.0, rank(f"{role}-0", state="lost", load=load)))
    assert gone.conditions() == {}, "it does not serve anyway"


def waiting(now: float, role: str = "prefill", running: int = 1, **load: int) -> list[RankStatus]:
    return [rank(f"{role}-0", load={"waiting": 2, "running": running, "admitted_tokens_total": 900} | load)]


def test_a_rank_is_full_when_requests_wait_and_none_is_taken_for_ten_seconds() -> None:
    assert said(run(9, of=waiting)) == {}
    made = run(15, of=waiting)
    assert said(made) == {0: ["full"]}
    ((condition,),) = made.conditions().values()
    assert condition.why == "2 requests wait, and none was taken for 14s"
    assert said(run(15, of=lambda now: waiting(now, admitted_tokens_total=900 + int(now) // 5))) == {}, "one was taken"
    assert said(run(15, of=lambda now: waiting(now, waiting=0))) == {}
    assert said(run(15, of=lambda now: waiting(now, admitted_tokens_total=0))) == {}, "it does not say"
    assert said(run(15, of=lambda now: waiting(now, role="decode"))) == {0: ["full"]}
    assert said(run(15, of=lambda now: waiting(now, role="decode", running=0))) == {}, "they wait for their prompts"
