"""A fleet over a quarter of an hour: its rows, what they take, and which ranks are slow or full."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from status_world import latencies, rank, sample

from bus.wire.messages import QueuedKind, QueueStatus, RankStatus
from pdbus.fleet.conditions import FULL, HOLDS_S
from pdbus.fleet.figures import Sample
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
    return {key[1]: [found.what for found in each] for key, each in made.conditions().items()}


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
        ({"running": 8, "waiting": 0}, "decode", ""),  # all at work, and more are not wanted
        ({"running": 62, "waiting": 3, "max_running": 64}, "decode", ""),  # two can be taken at once
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


@pytest.mark.parametrize(
    ("kinds", "waits_s", "full"),
    [
        ((QueuedKind("m", ("prefill", "decode"), 9),), 3.0, {1}),
        ((QueuedKind("", ("decode",), 9),), 3.0, {1}),
        ((QueuedKind("m", ("decode",), 9),), 1.9, set()),  # it may go in a moment
        ((QueuedKind("m", ("prefill",), 9), QueuedKind("other", ("decode",), 9)), 3.0, set()),
        ((QueuedKind("m", ("decode",), 9, pinned=True),), 3.0, set()),  # for a rank that their caller chose
        ((), 3.0, set()),
    ],
)
def test_run_slots_that_are_all_in_use_are_full_while_the_queue_wants_them(
    kinds: tuple[QueuedKind, ...], waits_s: float, full: set[int]
) -> None:
    made, one = History(), sample(0.0, *(rank("decode-0", n, load={"running": 7 + n, "waiting": 0}) for n in (0, 1)))
    made.add(Sample(0.0, 0.0, replace(one.status, queue=QueueStatus(9, waits_s, kinds))))
    assert set(said(made)) == full
    why = "8 of 8 run slots are in use, and requests wait at the controller for such a rank"
    assert made.sentences() == [f"decode-0/1 is full: {why}"] * len(full)


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


def fetching(number: int, a_second: float, tokens: int, took_s: float, now: float, **more: Any) -> RankStatus:
    """A rank that fetches so many KV caches a second, each of so many tokens."""
    fetches = int(a_second * now)
    load = {"fetches_total": fetches, "fetched_tokens_total": fetches * tokens}
    return rank("decode-0", number, load=load | {"fetch_us_total": int(1e6 * took_s * fetches)}, **more)


def test_a_link_is_slow_where_a_fetch_and_a_token_take_more_than_three_times_the_median() -> None:
    def at(
        now: float, tokens: int = 2000, took_s: float = 1.2, a_second: float = 2.0, others: int = 3
    ) -> list[RankStatus]:
        usual = [fetching(n + 1, 2.0, 2000, 0.2 + 0.1 * n, now) for n in range(others)]
        return [fetching(0, a_second, tokens, took_s, now), *usual]

    assert said(run(14, of=at)) == {}
    made = run(20, of=at)
    assert said(made) == {0: ["link"]}
    assert made.sentences() == [
        "decode-0/0 has had a slow link for 4.0s: 1.2s to fetch a KV cache, and 300ms is the median of decode ranks "
        "of m"
    ]
    well = {
        "as quick as others": {"took_s": 0.85}, "of long prompts": {"tokens": 20_000, "took_s": 3.0},
        "of short prompts": {"tokens": 100, "took_s": 0.1}, "too few to say": {"a_second": 0.1},
        "two ranks": {"others": 1},
    }  # fmt: skip
    for why, how in well.items():
        assert said(run(40, of=lambda now, how=how: at(now, **how))) == {}, why  # type: ignore[misc]


def test_a_link_is_slow_no_longer_once_its_fetches_are_quick_again_or_it_is_another_start() -> None:
    def at(now: float, epoch: int = 1) -> list[RankStatus]:
        mine = fetching(0, 2.0, 2000, 2.0, min(now, 20.0), epoch=epoch)
        return [mine, *(fetching(n, 2.0, 2000, 0.1, now) for n in (1, 2, 3))]

    made = run(20, of=at)
    assert said(made) == {0: ["link"]}
    made.add(sample(21.0, *at(21.0, epoch=2)))
    assert said(made) == {}
    assert said(run(60, of=at)) == {}, "it fetches no more"


def prompting(number: int, hits: float, now: float, role: str = "prefill", age_s: float = 40.0) -> RankStatus:
    prompt = int(5000 * now)
    load = {"admitted_tokens_total": prompt, "cached_tokens_total": int(hits * prompt)}
    return rank(f"{role}-0", number, load=load, epoch_age_s=age_s)


def test_a_cache_is_cold_where_a_rank_began_lately_and_finds_little_beside_its_kind() -> None:
    def at(now: float, hits: float = 0.1, others: float = 0.5, age_s: float = 40.0) -> list[RankStatus]:
        kin = [prompting(n, others, now, age_s=9000.0) for n in (1, 2, 3)]
        return [prompting(0, hits, now, age_s=age_s), *kin]

    made = run(20, of=at)
    assert said(made) == said(run(20, of=lambda now: at(now, hits=0.0))) == {0: ["cold"]}
    assert made.sentences() == [
        "prefill-0/0 has had a cold cache for 4.0s: it began 40s ago; 10% of its prompt tokens were in its prefix "
        "cache, and 50% is the median of prefill ranks of m"
    ]
    well = {
        "it finds some": {"hits": 0.2}, "none finds much": {"hits": 0.0, "others": 0.19},
        "it has been here for long": {"age_s": 700.0}, "its start is not known": {"age_s": -1.0},
    }  # fmt: skip
    for why, how in well.items():
        assert said(run(40, of=lambda now, how=how: at(now, **how))) == {}, why  # type: ignore[misc]
