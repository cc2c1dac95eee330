"""`pdbus top` and `status`: rates, quantiles, news and what is wrong, from one status after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from status_world import latencies, rank, sample

from bus.wire.messages import ControllerEvent
from pdbus.fleet.figures import RankFigures, trouble_of
from pdbus.fleet.formatting import age, number, quantile_of, seconds
from pdbus.fleet.history import WINDOW_S, History


def history(*samples: object) -> History:
    made = History()
    for each in samples:
        made.add(each)  # type: ignore[arg-type]
    return made


def of(made: History, instance: str) -> RankFigures:
    figures = made.figures()
    assert figures is not None
    return next(each for each in figures.ranks if each.rank.instance == instance)


def test_rates_are_of_the_window() -> None:
    def at(when: float, ended: int, tokens: int, **counts: int) -> object:
        loads = {
            "prompt_tokens_total": 10 * tokens,
            "cached_tokens_total": 4 * tokens,
            "busy_us_total": 500_000 * int(when),
        }
        return sample(
            when,
            rank("prefill-0", ended_total=ended, load=loads),
            rank("decode-0", ended_total=ended, load=loads | {"output_tokens_total": tokens},
                 ttft_counts=latencies(*[0.25] * ended), tpot_counts=latencies(*[0.012] * ended)),
            **counts,
        )  # fmt: skip

    made = history(at(0.0, 0, 0, done=0), at(10.0, 50, 100, done=50, failed_deadline=2))
    figures = made.figures()
    assert figures is not None
    assert figures.done_s == 5.0
    assert (figures.prompt_s, figures.output_s, figures.hits) == (100.0, 10.0, 0.4), "fetched prompts are none"
    prefill, decode = of(made, "prefill-0"), of(made, "decode-0")
    assert (prefill.tokens_s, prefill.hits, prefill.busy) == (60.0, 0.4, 0.5), "what it computed"
    assert (decode.tokens_s, decode.hits, decode.requests_s) == (10.0, None, 5.0)
    assert quantile_of(figures.ttft, 0.99) in ("299ms", "300ms")
    assert figures.failed == {"deadline": (2, 2)}
    made.add(at(10.0 + WINDOW_S, 50, 100, done=50, failed_deadline=2))  # type: ignore[arg-type]
    figures = made.figures()
    assert figures is not None
    assert (figures.done_s, figures.output_s, figures.ttft) == (0.0, 0.0, (0,) * len(figures.ttft))
    assert figures.failed == {"deadline": (2, 0)}


def test_a_new_start_counts_for_itself_and_its_latencies_go_on() -> None:
    before = rank(epoch=1, load={"output_tokens_total": 9000}, ttft_counts=latencies(0.1), ended_total=40)
    first = rank(epoch=2, load={"output_tokens_total": 10}, ttft_counts=latencies(0.1), ended_total=43, restarts=1)
    later = rank(epoch=2, load={"output_tokens_total": 60}, ttft_counts=latencies(0.1, 5.0), ended_total=50, restarts=1)
    made = history(sample(0.0, before), sample(5.0, first), sample(10.0, later))
    figures = of(made, "decode-0")
    assert (figures.output_s, figures.requests_s) == (10.0, 1.0)
    assert sum(figures.ttft) == 1


def test_a_controller_that_counts_anew_makes_no_negative_rates() -> None:
    made = history(sample(0.0, rank(ended_total=90), done=100, failed_deadline=9), sample(5.0, rank(), epoch=8, done=1))
    figures = made.figures()
    assert figures is not None
    assert (figures.done_s, figures.ranks[0].requests_s) == (None, None)
    assert [news.text for news in made.news] == ["controller-0 was started again"]


def test_news_are_the_controllers_events_and_what_a_watcher_sees_itself() -> None:
    def event(number: int, what: str, instance: str = "", **more: Any) -> ControllerEvent:
        return ControllerEvent(number, (10**9 + number) * 10**6, what, instance, **more)

    lost = event(3, "lost", "decode-0", phrase="its connection is gone", bad=True)
    first = (event(1, "started", phrase="c, epoch 7"), event(2, "joined", "decode-0", phrase="decode of m"))
    made = History()
    for at, events, broker in (
        (0.0, first, {}),
        (1.0, (lost,), None),
        (2.0, (lost, event(4, "failed", code="peer_lost", phrase="3 requests", bad=True)), {}),
    ):
        seen = sample(at, rank(), broker=broker)
        made.add(replace(seen, status=structs.replace(seen.status, events=events)))
    assert made.next_event == 5
    assert [(news.text, news.bad) for news in made.news] == [
        ("started: c, epoch 7", False),
        ("decode-0/0 joined: decode of m", False),
        ("decode-0/0 is lost: its connection is gone", True),
        ("no broker answers", True),
        ("failed peer_lost: 3 requests", True),
        ("a broker answers again", False),
    ]
    assert [news.event.number for news in made.news if news.event is not None] == [1, 2, 3, 4]
    assert made.news[2].wall == 10**9 + 3
    again = sample(3.0, rank(), epoch=8)  # another start, asked from 5 on as it was: its own numbers are asked for anew
    made.add(replace(again, status=structs.replace(again.status, events=(event(5, "joined", "u"),))))
    assert (made.next_event, made.news[-1].text) == (0, "controller-0 was started again")


def test_what_the_broker_refuses_is_told_beside_what_the_controller_does() -> None:
    made = history(
        sample(0.0, rank(), broker={"peers_refused": 2, "rooms_alive": 5}, peers_refused=1),
        sample(1.0, rank(), broker={"peers_refused": 5, "rejected_not_yours": 1}, peers_refused=1),
        sample(2.0, rank(), peers_refused=1),
        sample(3.0, rank(), broker={"peers_refused": 6}, peers_refused=1),  # while it said nothing: nobody knows when
    )
    figures = made.figures()
    assert figures is not None
    assert figures.refused == {"peers_refused": (1, 0), "broker peers_refused": (6, 4)}
    assert [news.text for news in made.news] == [
        "refused: broker peers_refused 3, broker not_yours 1", "no broker answers", "a broker answers again",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([rank(), rank("prefill-0")], []),
        ([rank(), rank("decode-0", 1, state="lost"), rank("prefill-0")], ["decode-0/1 has been lost for 5.0s"]),
        ([rank(state="hung", state_age_s=-1.0)], ["decode-0/0 is hung", "no decode rank is ready"]),
        ([rank(), rank("decode-0", 1, state="starting")], []),
        (
            [rank(), rank("decode-0", 1, state="gone"), rank("prefill-0", state="draining")],
            ["no prefill rank is ready"],
        ),
        ([rank(), rank("prefill-0", state="gone")], []),
        ([], ["no rank has joined this controller"]),
    ],
)
def test_what_is_wrong(ranks: list[object], told: list[str]) -> None:
    assert trouble_of(sample(0.0, *ranks).status) == told  # type: ignore[arg-type]


def test_words_are_short() -> None:
    for value in (0.0, 1e-5, 0.00999, 0.0123, 0.9996, 1.0, 9.94, 9.96, 99.4, 99.6, 5999.0, 6001.0, 4e5, 1e9 / 1e3):
        assert len(seconds(value)) <= 5, seconds(value)
        assert len(number(value)) <= 5, number(value)
    for count in (0, 7, 999, 1000, 99_940, 99_960, 999_400, 999_600, 10**9, 5 * 10**11):
        assert len(number(count)) <= 5, number(count)
    assert (number(12_345), number(2.5), number(3.0), seconds(0.0213), age(0.04)) == (
        "12.3k",
        "2.5",
        "3",
        "21ms",
        "0.0s",
    )


def test_a_rank_that_was_forgotten_meanwhile_counts_anew() -> None:
    made = history(sample(0.0, rank(ended_total=5000)), sample(10.0, rank(ended_total=20)))
    assert of(made, "decode-0").requests_s == 2.0


def loads(*each: dict[str, int]) -> RankFigures:
    """A prefill rank's figures over such loads, ten seconds apart."""
    made = history(*(sample(10.0 * at, rank("prefill-0", load=load)) for at, load in enumerate(each)))
    return of(made, "prefill-0")


def test_what_waits_is_neither_computed_nor_a_miss() -> None:
    """A burst of 8,000 tokens came, of which 3,000 have begun, 2,000 of those cached; then nothing more comes."""
    before = {"prompt_tokens_total": 1000, "admitted_tokens_total": 1000, "computed_tokens_total": 1000}
    burst = {"prompt_tokens_total": 9000, "admitted_tokens_total": 4000, "cached_tokens_total": 2000,
             "computed_tokens_total": 1500}  # fmt: skip
    later = burst | {"admitted_tokens_total": 9000, "cached_tokens_total": 6000, "computed_tokens_total": 3000}
    first, second = loads(before, burst), loads(burst, later)
    assert (first.tokens_s, first.hits) == (50.0, 2000 / 3000)
    assert (second.tokens_s, second.hits) == (150.0, 4000 / 5000)


def test_hits_are_unknown_where_no_rank_tells_of_them() -> None:
    """As of an engine that counts what it computes alone; and a release that counts prompts as they come."""
    computed = loads({"prompt_tokens_total": 0}, {"prompt_tokens_total": 500})
    assert (computed.tokens_s, computed.hits) == (50.0, None)
    former = loads({"prompt_tokens_total": 0}, {"prompt_tokens_total": 500, "cached_tokens_total": 100})
    assert (former.tokens_s, former.hits) == (40.0, 0.2)
    drained = loads({"prompt_tokens_total": 500}, {"prompt_tokens_total": 500, "cached_tokens_total": 400})
    assert drained.tokens_s == 0.0, "never less than nothing"
