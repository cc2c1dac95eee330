"""Since when something holds, and the events that this and a controller's own events make on a page and in a
terminal."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from status_world import rank, sample

from bus.wire.messages import ControllerEvent, QueueStatus
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import History
from pdbus.fleet.spells import SETTLE_S, Spells
from pdbus.fleet.verdict import lines_of


def test_a_spell_is_announced_once_it_has_lasted_and_over_once_it_has_not_held_for_as_long() -> None:
    spells: Spells[str] = Spells()
    held = {at: ["a"] for at in (*range(3), *range(4, 20))} | {9: ["a", "b"]}  # not for a moment at 3; `b` is short
    seen = {at: spells.see(held.get(at, ()), float(at)) for at in range(30)}
    assert {at: both for at, both in seen.items() if both != ([], [])} == {5: (["a"], []), 24: ([], ["a"])}
    assert (spells.began("a"), SETTLE_S) == (None, 5.0)
    assert spells.see(["a"], 40.0) == ([], [])
    assert spells.began("a") == 40.0


def full(numbers: range, others: range = range(0)) -> list[Any]:
    return [rank("decode-0", n, load={"kv_tokens": 990}) for n in numbers] + [rank("decode-0", n) for n in others]


def news(made: History) -> list[tuple[float, str, str, bool]]:
    return [(each.wall - 1e9, each.about, each.text, each.bad) for each in made.news]


def test_ranks_that_become_full_and_are_no_longer_are_events_and_their_sentence_says_for_how_long() -> None:
    made = History()
    for at in range(40):
        made.add(sample(float(at), *(full(range(1)) if 10 <= at <= 20 else full(range(0), range(1)))))
        if at == 18:
            assert [each.for_s for (each,) in made.conditions().values()] == [8.0]
            assert made.sentences()[0].startswith("decode-0/0 has been full for 8.0s: ")
    assert news(made) == [
        (10.0, "rank", "decode-0/0 is full", False),
        (20.0, "rank", "decode-0/0 is no longer full", False),
    ]
    many = History()
    for at in range(10):
        many.add(sample(float(at), *full(range(12))))
    assert [text for _, _, text, _ in news(many)] == ["decode-0/0 and 11 more are full"]


def test_a_rank_that_is_lost_while_it_is_full_is_not_said_to_be_full_no_longer() -> None:
    made = History()
    for at in range(20):
        made.add(sample(float(at), rank(state="ready" if at < 10 else "lost", load={"kv_tokens": 990})))
    assert [text for _, _, text, _ in news(made)] == ["decode-0/0 is full"]


def test_requests_that_wait_or_are_lost_are_events_with_their_beginning_in_the_sentence() -> None:
    made = History()
    for at in range(40):
        its = sample(float(at), rank(), done=100 * at, failed_overloaded=50 * min(at, 12))
        queue = QueueStatus(9, 3.0, ()) if at < 8 else None
        made.add(Sample(its.at, its.wall, replace(its.status, queue=queue)))
        if at == 7:
            lines = {line.kind: line.text for line in lines_of(made, asks_broker=False)}
            assert lines["queue"].endswith("; the first has waited for 3.0s; this began 7.0s ago")
            assert lines["failing"].endswith("; this began 6.0s ago")
    assert news(made) == [
        (0.0, "requests", "requests wait at the controller", False),
        (1.0, "requests", "requests fail or are refused", True),
        (7.0, "requests", "requests no longer wait at the controller", False),
        (31.0, "requests", "requests no longer fail", False),
    ]


def event(number: int, at_s: float, what: str, instance: str, phrase: str = "", bad: bool = False) -> ControllerEvent:
    return ControllerEvent(number, int(1e6 * (1e9 + at_s)), what, instance, 0, phrase=phrase, bad=bad)


def test_joins_of_a_moment_are_one_event_and_a_loss_is_one_and_recoveries_are_no_trouble() -> None:
    events = [
        *(event(n, 0.01 * n, "joined", f"decode-{n}", "decode of m") for n in range(40)),
        *(event(40 + n, 0.5, "joined", f"prefill-{n}", "prefill of m") for n in range(2)),
        event(42, 9.0, "joined", "prefill-9", "prefill of m"),
        event(43, 9.1, "suspect", "prefill-9", "its connection is gone", bad=True),
        event(45, 9.3, "suspect", "prefill-8", "its connection is gone", bad=True),
        event(46, 10.2, "lost", "prefill-9", "it did not connect again", bad=True),
        event(47, 10.4, "restarted", "prefill-9", "prefill of m", bad=True),
    ]
    made = History()
    for at in (10.0, 11.0):
        its, new = sample(at, rank()), [each for each in events if at - 10 <= each.at_us / 1e6 - 1e9 < at]
        made.add(Sample(its.at, its.wall, replace(its.status, events=tuple(new))))
    assert [(text, bad) for _, _, text, bad in news(made)] == [
        ("40 decode ranks of m joined", False),
        ("prefill-0/0 joined: prefill of m", False),
        ("prefill-1/0 joined: prefill of m", False),
        ("prefill-9/0 joined: prefill of m", False),
        ("prefill-8/0 may be lost: its connection is gone", True),
        ("prefill-9/0 is lost: it did not connect again", True),
        ("prefill-9/0 was started again: prefill of m", False),
    ]
    assert made.next_event == 48
