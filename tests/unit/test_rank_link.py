"""What an engine's scheduler says through the rank link, and what it is told: books, overflow, nonsense; no socket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from link_world import SETTINGS, Engine

from bus.errors import ConfigError
from bus.wire.codec import decode, encode
from bus.wire.messages import PUBLICATIONS, LoadReport, Params, TokenLogprobs
from nodes.link import Cancel, RankFacts, RankLink, Release

# --- load ---------------------------------------------------------------------------------------------------------


def test_what_the_link_knows_of_a_load_it_sets_itself() -> None:
    """A runner returns the wire's load; its number, acknowledgements and what the facts say are not the runner's."""
    engine = Engine()
    engine.rank.core.facts = replace(engine.rank.core.facts, kv_capacity=640, max_running=7)
    engine.dispatch()
    own, first, second = engine.runner.load(), engine.rank.core.load(), engine.rank.core.load()
    assert (own.seq, own.acks, own.kv_capacity, own.max_running) == (0, (), 0, 0)
    assert (first.kv_capacity, first.max_running, len(first.acks)) == (640, 7, 1)
    assert (second.seq, second.waiting) == (first.seq + 1, own.waiting)


def test_without_a_report_the_legs_are_counted() -> None:
    engine = Engine()
    engine.dispatch()
    engine.dispatch()
    assert engine.load() == (0, 2, 22)
    one, two = engine.legs()
    engine.link.output(one, [5])
    engine.take()
    assert engine.load() == (1, 1, 11)
    assert engine.rank.core.load().kv_tokens == 11
    assert engine.rank.core.load().output_tokens_total == 1
    engine.link.finish(one)
    engine.link.finish(two)
    engine.take()
    assert engine.load() == (0, 0, 0)


def test_a_report_speaks_of_what_was_handed_over_and_the_rest_is_added() -> None:
    engine = Engine()
    engine.dispatch()
    (one,) = engine.legs()
    engine.link.report(running=1, waiting=0, waiting_tokens=3, kv_tokens=8)  # chunks of its prompt are still to come
    engine.dispatch()  # before the report was taken, and not handed over
    engine.take()
    assert engine.load() == (1, 1, 14)
    engine.dispatch()
    assert engine.load() == (1, 2, 25)
    engine.legs()
    engine.link.output(one, [5])
    engine.link.report(running=3, waiting=0, waiting_tokens=0)
    engine.take()
    assert engine.load() == (3, 0, 0)


def test_a_leg_that_begins_again_was_taken_in_once() -> None:
    """An engine that preempts may say so each time, with more of the prompt in its cache."""
    engine = Engine()
    engine.dispatch()
    (one,) = engine.legs()
    for cached_tokens in (4, 8, 8):
        engine.link.began(one, cached_tokens)
    engine.take()
    load = engine.rank.core.load()
    assert (load.prompt_tokens_total, load.admitted_tokens_total, load.cached_tokens_total) == (11, 11, 4)


def test_a_leg_that_is_over_after_the_last_report_counts_no_more() -> None:
    """An engine that then waits for orders reports nothing."""
    engine = Engine()
    rid = engine.dispatch()
    engine.dispatch()
    _, two = engine.legs()
    engine.link.report(running=0, waiting=2, waiting_tokens=22)
    engine.take()
    engine.cancel(rid)
    assert engine.load() == (0, 1, 11)
    engine.link.output(two, [5])
    engine.link.finish(two)
    engine.take()
    assert engine.load() == (0, 0, 0)
    assert [type(order) for order in engine.link.poll()] == [Cancel]
    engine.dispatch()
    assert engine.load() == (0, 1, 11)


def test_whatever_the_scheduler_counted_is_forgotten_with_its_last_leg() -> None:
    engine = Engine()
    engine.dispatch()
    (leg,) = engine.legs()
    engine.link.output(leg, [5])
    engine.link.report(running=0, waiting=1, waiting_tokens=50, step=9, busy=True)  # preempted
    engine.take()
    assert engine.load() == (0, 1, 50)
    assert engine.runner.busy
    engine.link.finish(leg)
    engine.take()
    assert engine.load() == (0, 0, 0)
    assert engine.runner.load().step == 9
    assert not engine.runner.busy


# --- orders -------------------------------------------------------------------------------------------------------


def test_a_leg_that_is_cancelled_before_it_is_handed_over_never_is() -> None:
    engine = Engine()
    for _ in range(50):  # a scheduler that hangs, clients that give up
        engine.cancel(engine.dispatch())
    assert engine.link.poll() == []
    assert engine.load() == (0, 0, 0)


def test_cancel_and_finish_may_cross() -> None:
    engine = Engine()
    rid = engine.dispatch()
    (leg,) = engine.legs()
    engine.link.output(leg, [5, 6])
    engine.link.finish(leg, "stop")
    engine.cancel(rid)  # before what was said is taken
    engine.take()
    assert engine.code(rid) == "cancelled"
    assert engine.rank.tokens[rid] == []
    assert engine.link.poll() == [Cancel(leg)]
    assert engine.load() == (0, 0, 0)

    rid = engine.dispatch()
    (leg,) = engine.legs()
    engine.link.finish(leg)
    engine.take()
    engine.cancel(rid)
    assert engine.code(rid) == "ok"
    assert engine.link.poll() == []


def test_a_held_cache_is_released_once() -> None:
    engine = Engine("prefill", transfer="files")
    rid = engine.dispatch()
    (leg,) = engine.legs()
    engine.link.held(leg, 5, b"handle", 30.0)
    engine.take()
    assert engine.load() == (1, 0, 0)
    engine.cancel(rid)
    assert engine.link.poll() == [Release(leg)]
    assert engine.load() == (0, 0, 0)


# --- what can't be taken -------------------------------------------------------------------------------------------


def test_a_leg_whose_tokens_found_no_room_fails_and_no_other() -> None:
    engine = Engine(queue_max=4)
    lost, kept = engine.dispatch(), engine.dispatch()
    one, two = engine.legs()
    for token in range(3):
        engine.link.output(two, [token])
    for token in range(3):
        engine.link.output(one, [token])
    engine.link.finish(one, "stop")
    engine.take()
    assert engine.link.overflows == 3
    assert engine.code(lost) == "engine_failed"
    assert "fell behind" in engine.rank.ended[lost, 1][0].message
    assert engine.rank.tokens[lost] in ([], [0]), "what was lost leaves no gap"
    assert engine.link.poll() == [Cancel(one)]
    engine.link.output(one, [9])  # the scheduler had not heard
    engine.link.finish(two)
    engine.take()
    assert engine.code(kept) == "ok"
    assert engine.rank.tokens[kept] == [0, 1, 2]
    assert engine.load() == (0, 0, 0)


def test_that_the_engine_died_arrives_however_full_the_hand_over_is() -> None:
    engine = Engine(queue_max=1)
    rid = engine.dispatch()
    engine.legs()
    engine.link.report(running=1, waiting=0, waiting_tokens=0)
    engine.link.die("CUDA error")
    engine.take()
    assert engine.code(rid) == "peer_lost"
    assert engine.rank.left == ["CUDA error"]


class Number:
    """As numpy's and torch's are: not an int, good for an index."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_numbers_of_other_libraries_are_numbers() -> None:
    engine = Engine()
    rid = engine.dispatch()
    (leg,) = engine.legs()
    numbers: Any = [Number(5), Number(6)]
    engine.link.output(leg, numbers)
    engine.link.report(running=Number(1), waiting=Number(0), waiting_tokens=Number(0))  # type: ignore[arg-type]
    engine.take()
    assert engine.rank.tokens[rid] == [5, 6]
    assert type(engine.rank.core.load().running) is int


NONSENSE: dict[str, Any] = {
    "a token too large": lambda link, leg: link.output(leg, [512]),
    "a negative token": lambda link, leg: link.output(leg, [-1]),
    "no tokens": lambda link, leg: link.output(leg, None),
    "text": lambda link, leg: link.output(leg, "ab"),
    "a reason": lambda link, leg: link.finish(leg, "done"),
    "a code": lambda link, leg: link.fail(leg, "oops"),
    "ok is no failure": lambda link, leg: link.fail(leg, "ok"),
    "cached": lambda link, leg: link.began(leg, -1),
    "more cached than it has": lambda link, leg: link.began(leg, 10**30),
    "more written than it has": lambda link, leg: link.began(leg, 0, 10**30),
    "more than was asked for": lambda link, leg: link.output(leg, [5] * (leg.max_tokens + 1)),
    "log probabilities that nobody asked for": lambda link, leg: link.output(leg, [5], [(-0.5, [])]),
    "held by a unified rank": lambda link, leg: link.held(leg, 5, b"handle"),
    "fetched by a unified rank": lambda link, leg: link.fetched(leg),
}


@pytest.mark.parametrize("say", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_fails_its_leg_and_the_link_lives(say: Any) -> None:
    engine = Engine()
    bad, good = engine.dispatch(), engine.dispatch()
    one, two = engine.legs()
    say(engine.link, one)
    engine.link.finish(two)
    engine.take()
    assert engine.code(bad) == "engine_failed"
    assert "invalid event" in engine.rank.ended[bad, 1][0].message
    assert engine.link.invalid == 1
    assert engine.code(good) == "ok"
    assert engine.link.poll() == [Cancel(one)]


@pytest.mark.parametrize(
    "say",
    [
        lambda link, leg: link.held(leg, 5, b"x", float("nan")),
        lambda link, leg: link.held(leg, 600, b"x"),
        lambda link, leg: link.held(leg, 5, b""),
        lambda link, leg: link.held(leg, 5, bytes(2 << 20)),
        lambda link, leg: (link.held(leg, 5, b"x"), link.held(leg, 5, b"x")),
        lambda link, leg: link.finish(leg),
        lambda link, leg: link.output(leg, [5]),
    ],
)
def test_a_prefill_legs_nonsense(say: Any) -> None:
    engine = Engine("prefill", transfer="files")
    rid = engine.dispatch()
    (leg,) = engine.legs()
    say(engine.link, leg)
    engine.take()
    assert engine.code(rid) == "engine_failed"
    assert engine.load() == (0, 0, 0)


def test_a_report_that_makes_no_sense_changes_nothing() -> None:
    engine = Engine()
    engine.dispatch()
    none: Any = None
    engine.link.report(running=none, waiting=0, waiting_tokens=0)
    engine.link.report(7, running=1, waiting=0, waiting_tokens=0)
    engine.take()
    assert engine.link.invalid == 2
    assert engine.load() == (0, 1, 11)
    engine.link.report(running=-5, waiting=-5, waiting_tokens=-5)
    engine.take()
    assert engine.load() == (0, 0, 6), "never below nothing"


def test_a_step_that_no_message_can_say_is_the_largest_that_one_can() -> None:
    engine = Engine()
    engine.dispatch()
    engine.link.report(running=1, waiting=0, waiting_tokens=0, step=10**30)
    engine.take()
    assert decode(encode(LoadReport("e", 0, 1, 1, engine.rank.core.load())), PUBLICATIONS)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"instance": ""}, "^instance '': use 1 to 64 of letters"), ({"instance": "a b"}, "^instance 'a b': use"),
        ({"controllers": []}, "^controller: name at least one$"), ({"controllers": ["udp://x"]}, "udp"),
        ({"controllers": ["ipc:///c", "ipc:///c"]}, "^controller: the same address twice$"),
        ({"bus": "http://x"}, "^'http://x': an address starts with"),
        ({"dp_ranks": (2,), "dp_size": 2}, r"^dp_rank 2: must lie in 0\.\.1 \(dp_size 2\)$"),
        ({"dp_ranks": (-1,)}, r"^dp_rank -1: must lie in 0\.\.0"), ({"dp_size": 0}, "^dp_size 0: choose from 1"),
        ({"dp_ranks": ()}, "^dp_rank: name each rank"), ({"dp_ranks": (0, 0)}, "^dp_rank: name each rank"),
        ({"data": "tcp://0.0.0.0"}, "^data 'tcp://0.0.0.0': name an address that the other machines can reach$"),
        ({"data": "tcp://h:0"}, "^data 'tcp://h:0': '0' is no port$"), ({"data": "udp://h"}, "^data 'udp://h': use"),
        ({"data": "ipc://d"}, "^data 'ipc://d': name a directory by an absolute path"),
        ({"data": "ipc:///tmp/a b"}, "^data 'ipc:///tmp/a b': name a directory by .* without spaces"),
        ({"data": "ipc:///tmp/ü"}, "^data 'ipc:///tmp/ü': name a directory by .* letters beyond ASCII"),
        ({"data": f"ipc:///{'d' * 80}"}, "of at most 80 bytes"), ({"data": "tcp://hü:1"}, "no letters beyond ASCII"),
        ({"report_interval_s": 0.0}, "^report_interval_s must lie between 0.01 s and a day, not 0.0$"),
        ({"room_ttl_s": float("nan")}, "^room_ttl_s must lie .* not nan$"),
        ({"queue_max": 0}, "^queue_max must be at least 1, not 0$"),
        ({"role": "prefill"}, "kv_transfer"), ({"role": "worker"}, "^unknown role 'worker'; choose"),
        ({"facts": RankFacts(model="m", max_context=-1)}, "rank link of 'u'"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_said_at_once(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        RankLink(**({"bus": "ipc:///b", "role": "unified"} | SETTINGS | changes))
    assert "\n" not in str(caught.value)


def test_before_the_start_nothing_has_happened() -> None:
    link = RankLink("ipc:///b", role="unified", **SETTINGS)
    assert link.left is None
    assert not link.drained
    assert link.poll() == []


def test_log_probabilities_go_with_the_tokens_bounded() -> None:
    engine = Engine(params=("logprobs",))
    rid, *bad = (engine.dispatch(params=Params(logprobs=2)) for _ in range(5))
    leg, *others = engine.legs()
    engine.link.output(leg, [5, 6], [(-0.5, [(7, -0.25)]), (float("-inf"), [(7, 1e-9), (8, float("nan"))])])
    for other, nonsense in zip(others, ([], [(-0.5, [(7, -1)] * 3)], [(-0.5, [(512, -1)])], [5]), strict=True):
        engine.link.output(other, [5], nonsense)  # type: ignore[arg-type]
    engine.take()
    assert engine.rank.tokens[rid] == [5, 6]
    assert leg.logprobs == [
        TokenLogprobs(-0.5, ((7, -0.25),)), TokenLogprobs(-9999.0, ((7, 0.0), (8, -9999.0)))
    ]  # fmt: skip
    assert {engine.code(each) for each in bad} == {"engine_failed"}, "it said that it knows them"
