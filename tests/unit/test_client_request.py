"""One request at the client, event by event."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bus.actions import Send
from bus.wire.codes import Code
from bus.wire.hashing import tokens_of
from bus.wire.messages import (
    Accepted,
    Attach,
    Cancel,
    Detach,
    Done,
    Failed,
    Location,
    Message,
    MoreTokens,
    Submit,
    TokenLogprobs,
    Tokens,
)
from pdbus.client.core import AVOID_S, SILENCE_S, UNTAKEN_S, USED_S, VERDICT_S, ClientCore, Patience
from pdbus.client.options import Controllers, Options, make_request
from pdbus.client.output import Deliver, Ended, Result
from pdbus.client.request import NEXT, SUBMIT_NEXT, Event, State

C = "ipc:///c.clients"
P = "ipc:///p.clients"
RANK_0 = Location("decode-0", 0, 1, "ipc:///d0")
RANK_1 = Location("decode-0", 1, 1, "ipc:///d1")
PREFILL = Location("prefill-0", 3, 1, "ipc:///p3")
ONE = Controllers(C, None)


class Driver:
    """Feeds a core and keeps what it did."""

    def __init__(
        self, patience: Patience | None = None, *, at: Controllers = ONE, retries: int = 3,
        eos_ids: tuple[int, ...] = (), **options: Any,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.core = ClientCore(patience or Patience(retries, 10.0), random.Random(1))
        self.sent: list[Send] = []
        self.ids: list[int] = []
        self.result: Result | None = None
        chosen = Options(rid="r", max_tokens=4, bootstrap_room=9) | Options(**options)  # type: ignore[typeddict-item]
        self.request = make_request([5, 6], chosen, at, random.Random(2), eos_ids=eos_ids)
        self.take(self.core.begin(self.request, self.now))

    def take(self, actions: Sequence[object]) -> list[Message]:
        sends = [action for action in actions if isinstance(action, Send)]
        self.sent += sends
        for action in actions:
            if isinstance(action, Deliver):
                self.ids += action.ids
            elif isinstance(action, Ended):
                assert self.result is None, "ended twice"
                self.result = action.result
        return [send.message for send in sends]

    def receive(self, message: Message, peer: str = C) -> list[Message]:
        return self.take(self.core.received(peer, message, self.now))

    def wait(self, seconds: float) -> list[Message]:
        out: list[Message] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            out += self.take(self.core.tick(self.now))
        return out

    def untaken(self, sends: Sequence[Send]) -> None:
        """Say that the queues did not take these."""
        for send in sends:
            self.core.untaken(send, self.now)

    def accept(self, attempt: int = 1, rank: Location = RANK_0) -> list[Message]:
        return self.receive(Accepted("r", attempt, 9, PREFILL, rank))

    def tokens(self, start: int, *ids: int, finish: str = "", attempt: int = 1, peer: str = RANK_0.endpoint,
               code: Code = "ok") -> list[Message]:  # fmt: skip
        return self.receive(Tokens("r", attempt, start, ids, finish, code), peer)  # type: ignore[arg-type]


def submit_in(messages: list[Message]) -> Submit:
    (submit,) = [message for message in messages if isinstance(message, Submit)]
    return submit


def test_an_undisturbed_request() -> None:
    d = Driver()
    assert submit_in([send.message for send in d.sent]).bootstrap_room == 9
    assert d.accept() == [Attach("r", 1, 0, True, 9)]
    d.tokens(0, 10, 11)
    d.now += 1.0
    assert d.tokens(2, 12, 13, finish="length") == [Detach("r", 1)]
    assert d.result is not None
    assert d.result.ids == (10, 11, 12, 13) == tuple(d.ids)
    assert (d.result.prefill, d.result.decode, d.result.finish, d.result.attempts) == (PREFILL, RANK_0, "length", 1)
    assert d.result.tpot_s == pytest.approx(1.0 / 3)
    assert len(d.core) == 0


def test_a_pair_that_is_begun_again_on_a_unified_rank_has_no_prefill_rank() -> None:
    d = Driver()
    d.accept()
    d.receive(Accepted("r", 2, 9, None, RANK_1))
    d.tokens(0, 10, 11, finish="length", attempt=2, peer=RANK_1.endpoint)
    assert d.result is not None
    assert (d.result.prefill, d.result.decode) == (None, RANK_1)


def test_the_answer_to_our_own_cancel_is_none_to_the_next_attempt() -> None:
    """Its controller had tried again by itself, and so had given its attempt the number that ours has next."""
    d = Driver()
    d.accept()
    said = d.wait(7.0)  # the stream is silent
    assert Cancel("r", 9) in said
    assert submit_in(said).attempt == 2
    assert not d.receive(Failed("r", 2, "cancelled", "cancelled by the client", False))
    assert d.result is None
    d.accept(2, RANK_1)
    d.tokens(0, 10, 11, 12, 13, finish="length", attempt=2, peer=RANK_1.endpoint)
    assert d.result is not None
    assert (d.result.code, d.result.attempts) == ("ok", 2)


def test_nor_is_the_end_of_the_stream_that_it_cancelled() -> None:
    d = Driver()
    d.accept()
    assert submit_in(d.wait(7.0)).attempt == 2
    d.accept(2, RANK_1)  # said before our cancel came
    d.tokens(0, 10, finish="cancelled", code="cancelled", attempt=2, peer=RANK_1.endpoint)
    assert d.receive(Failed("r", 2, "cancelled", "cancelled by the client", False)) == []
    assert submit_in(d.wait(3.0)).attempt == 3
    assert d.result is None


def test_a_cancel_by_another_ends_an_attempt_that_followed_ours_long_ago() -> None:
    d = Driver()
    d.accept()
    d.wait(7.0)
    d.accept(2, RANK_1)
    for _ in range(12):
        d.wait(1.0)
        d.tokens(0, attempt=2, peer=RANK_1.endpoint)  # a sign of life
    d.receive(Failed("r", 2, "cancelled", "cancelled over another connection", False))
    assert d.result is not None
    assert d.result.code == "cancelled"


def test_goodbyes_that_no_queue_takes_are_sent_again_for_a_while() -> None:
    d = Driver()
    d.accept()
    goodbyes = d.take(d.core.cancel("r", d.now))
    assert goodbyes == [Detach("r", 1), Cancel("r", 9)]
    began = d.now
    d.untaken(d.sent[-2:])
    while again := d.wait(0.05):
        assert again == goodbyes
        d.untaken(d.sent[-2:])
    assert UNTAKEN_S < d.now - began < UNTAKEN_S + 0.2


def test_an_attach_that_no_queue_takes_is_sent_again_at_once() -> None:
    """A rank ends a leg that has no reader after one second, where other legs wait for its place."""
    d = Driver()
    (attach,) = d.accept()
    for _ in range(3):
        d.untaken(d.sent[-1:])
        assert d.wait(0.05) == [attach]
    assert d.wait(0.5) == []


def test_a_submit_that_no_queue_takes_is_sent_again_at_once_until_it_is_answered() -> None:
    d = Driver()
    (first,) = d.sent
    for _ in range(3):
        d.untaken([first])
        assert d.wait(0.05) == [first.message]
    assert d.wait(0.05) == [], "the queue took it"
    d.untaken([first])
    d.accept()
    assert d.wait(0.05) == []


def test_no_attach_is_sent_again_where_the_request_is_read_no_more() -> None:
    d = Driver()
    d.accept()
    d.untaken(d.sent[-1:])
    d.accept(2, RANK_1)
    assert d.wait(0.5) == []
    d.untaken(d.sent[-1:])
    d.take(d.core.cancel("r", d.now))
    assert d.wait(0.5) == []


def test_no_goodbye_is_sent_to_where_the_request_is_again() -> None:
    d = Driver()
    d.accept()
    d.tokens(0, finish="failed", code="prefill_failed")
    assert d.wait(VERDICT_S - 0.1) == []
    while not (goodbyes := d.wait(0.05)):
        pass
    assert goodbyes == [Detach("r", 1), Cancel("r", 9)]
    d.untaken(d.sent[-2:])
    assert d.wait(0.05) == goodbyes, "it waits to be submitted again"
    d.untaken(d.sent[-2:])
    submit = submit_in(d.take(d.core.tick(d.now + 0.2)))
    d.untaken(d.sent[-3:])
    assert submit.attempt == 2
    assert d.wait(0.05) == [Detach("r", 1), submit], "a later attempt takes the place of one that was not cancelled"
    d.untaken(d.sent[-1:])
    assert d.accept(2, RANK_0) == [Attach("r", 2, 0, True, 9)]
    assert d.wait(1.0) == []


def test_tokens_of_others_are_dropped() -> None:
    """M62, and no rank but the one attached to is believed."""
    d = Driver()
    d.accept()
    d.tokens(0, 99, attempt=2)
    d.tokens(0, 99, peer=RANK_1.endpoint)
    assert d.ids == []
    d.tokens(0, 10)
    d.tokens(0, 10, 11)
    d.tokens(1, 11)
    assert d.ids == [10, 11]


def test_tokens_that_come_with_those_of_another_request_count_as_if_they_came_alone() -> None:
    """M83: and each is judged by itself."""
    d, other = Driver(), make_request([7], Options(rid="s", max_tokens=2, bootstrap_room=8), ONE, random.Random(3))
    d.core.begin(other, d.now)
    d.accept()
    d.core.received(C, Accepted("s", 1, 8, PREFILL, RANK_0), d.now)
    both = Tokens("s", 1, 0, (20,), others=(MoreTokens("r", 1, 0, (10, 11)), MoreTokens("gone", 1, 0, (9,))))
    told = d.core.received(RANK_0.endpoint, both, d.now)
    assert told == [Deliver("s", (20,)), Deliver("r", (10, 11))]
    late = Tokens("gone", 1, 0, (9,), others=(MoreTokens("r", 2, 2, (99,)), MoreTokens("r", 1, 3, (13,))))
    assert d.receive(late, RANK_0.endpoint) == [Attach("r", 1, 2, True, 9)], "another attempt's is dropped, a gap seen"
    told = d.core.received(RANK_0.endpoint, Tokens("s", 1, 1, (21,), others=(MoreTokens("r", 1, 2, (12, 13)),)), d.now)
    ended = {action.rid: action.result.ids for action in told if isinstance(action, Ended)}
    assert ended == {"s": (20, 21), "r": (10, 11, 12, 13)}


def test_a_gap_is_asked_for_once_and_filled() -> None:
    """M57, M61: what is missing is asked for by `attach` from there."""
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    assert d.tokens(2, 12) == [Attach("r", 1, 1, True, 9)]
    assert d.tokens(3, 13, finish="length") == []
    d.now += 0.3
    assert d.tokens(2, 12) == [Attach("r", 1, 1, True, 9)]
    d.tokens(1, 11, 12, 13, finish="length")
    assert d.ids == [10, 11, 12, 13]


def test_no_more_than_was_asked_for() -> None:
    d = Driver()
    d.accept()
    d.tokens(0, 10, 11, 12, 13, 14, 15)
    assert d.result is not None
    assert (d.ids, d.result.finish) == ([10, 11, 12, 13], "length")


def test_times_count_from_the_submit() -> None:
    d = Driver()
    d.now += 0.5
    d.accept()
    d.now += 1.0
    d.tokens(0, 10)
    d.now += 2.0
    d.tokens(1, 11, 12, 13, finish="length")
    assert d.result is not None
    assert (d.result.ttft_s, d.result.total_s) == (1.5, 3.5)


def test_silence_is_asked_about_once_then_resumed_elsewhere() -> None:
    """M73: the same rid and room, the next attempt, prompt and output so far."""
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    assert d.wait(SILENCE_S + 0.1) == [Attach("r", 1, 1, True, 9)]
    out = d.wait(SILENCE_S + 0.5)
    submit = submit_in(out)
    assert (submit.rid, submit.attempt, submit.offset, submit.max_tokens, submit.prompt_tokens) == ("r", 2, 1, 3, 3)
    assert submit.bootstrap_room == 9
    assert list(tokens_of(d.sent[-1].frames[0])) == [5, 6, 10]
    assert d.accept(2, RANK_1) == [Attach("r", 2, 1, True, 9)]
    d.tokens(1, 99, finish="stop")  # the old rank wakes up
    assert d.result is None
    d.tokens(1, 11, finish="stop", attempt=2, peer=RANK_1.endpoint)
    assert d.result is not None
    assert (d.result.ids, d.result.attempts, d.result.decode) == ((10, 11), 2, RANK_1)


def test_who_got_no_stream_from_a_rank_asks_for_others_for_a_while() -> None:
    d = Driver(retries=9)
    d.accept()
    submit = submit_in(d.wait(2 * SILENCE_S + 0.5))
    assert submit.avoid == (("decode-0", 0),)
    d.accept(2, RANK_1)
    assert submit_in(d.wait(2 * SILENCE_S + 0.5)).avoid == (("decode-0", 0), ("decode-0", 1))
    other = make_request([5], Options(rid="other"), ONE, random.Random(3))
    assert submit_in(d.take(d.core.begin(other, d.now))).avoid == (("decode-0", 0), ("decode-0", 1)), "learnt"
    d.accept(3, RANK_0)
    d.tokens(0, 10, attempt=3)
    last = make_request([5], Options(rid="last"), ONE, random.Random(4))
    assert submit_in(d.take(d.core.begin(last, d.now))).avoid == (("decode-0", 1),), "there it gets one again"
    d.now += AVOID_S
    late = make_request([5], Options(rid="late"), ONE, random.Random(5))
    assert submit_in(d.take(d.core.begin(late, d.now))).avoid == ()


def test_signs_of_life_are_enough() -> None:
    d = Driver()
    d.accept()
    for _ in range(20):
        d.wait(1.0)
        assert d.tokens(0) == []
    assert d.result is None


def test_a_failed_stream_leaves_the_controller_the_first_word() -> None:
    """M74 M73"""
    d = Driver()
    d.accept()
    assert d.tokens(0, finish="failed", code="prefill_failed") == []
    assert d.wait(VERDICT_S / 2) == []
    assert d.accept(2, RANK_1) == [Detach("r", 1), Attach("r", 2, 0, True, 9)]
    # and if the controller says nothing, the client acts
    d.tokens(0, finish="failed", code="fenced", attempt=2, peer=RANK_1.endpoint)
    assert submit_in(d.wait(VERDICT_S + 0.5)).attempt == 3


def test_a_run_that_does_not_continue_the_output_is_not_read() -> None:
    """M86: its controller did not hear of the first tokens and has begun anew, and two runs may differ."""
    d = Driver()
    d.accept()
    d.tokens(0, 10, 11)
    assert d.accept(2, RANK_1) == [Detach("r", 1), Cancel("r", 9)]
    d.tokens(2, 99, attempt=2, peer=RANK_1.endpoint)
    submit = submit_in(d.wait(0.5))
    assert (submit.attempt, submit.offset, submit.max_tokens) == (3, 2, 2)
    assert d.accept(3, RANK_1) == [Attach("r", 3, 2, True, 9)]
    d.tokens(2, 12, 13, finish="length", attempt=3, peer=RANK_1.endpoint)
    assert d.result is not None
    assert (d.result.ids, d.result.finish, d.result.attempts) == ((10, 11, 12, 13), "length", 3)


def test_one_that_waits_first_is_not_read_either() -> None:
    """M86"""
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    d.receive(Accepted("r", 2, 9, None, None))
    d.tokens(1, 11)  # the first still streams
    assert d.accept(2, RANK_1) == [Detach("r", 1), Cancel("r", 9)]
    assert d.ids == [10, 11]


def test_a_run_that_is_told_of_again_is_read_on() -> None:
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    d.receive(Accepted("r", 1, 9, None, None))
    assert d.accept() == [Attach("r", 1, 1, True, 9)]
    d.tokens(1, 11, 12, 13, finish="length")
    assert d.ids == [10, 11, 12, 13]


def test_an_output_that_is_whole_needs_no_other_run() -> None:
    d = Driver(stop_token_ids=[11])
    d.accept()
    d.tokens(0, 10, 11)
    d.accept(2, RANK_1)
    assert d.result is not None
    assert (d.result.ids, d.result.finish) == ((10, 11), "stop")


def test_a_rid_used_again_begins_with_another_attempt_so_that_nothing_of_the_first_is_taken_for_its_own() -> None:
    d = Driver()
    d.accept()
    d.take(d.core.cancel("r", d.now))
    again = make_request([7], Options(rid="r", max_tokens=4, bootstrap_room=8), ONE, random.Random(3))
    d.result = None
    first = submit_in(d.take(d.core.begin(again, d.now))).attempt
    for attempt in range(1, 4):  # as far as its controller has tried
        d.receive(Failed("r", attempt, "cancelled", "", False))
        d.receive(Done("r", attempt, ()))
        assert d.receive(Accepted("r", attempt, 9, PREFILL, RANK_0)) == []
    assert d.result is None
    assert d.receive(Accepted("r", first, 8, PREFILL, RANK_0))[-1] == Attach("r", first, 0, True, 8)
    d.tokens(0, 99)
    d.tokens(0, 10, finish="stop", attempt=first)
    assert d.result is not None
    assert (d.result.ids, d.result.attempts) == ((10,), 1)
    d.now += USED_S
    late = make_request([7], Options(rid="r", bootstrap_room=8), ONE, random.Random(3))
    assert submit_in(d.take(d.core.begin(late, d.now))).attempt == 1


def test_what_a_controller_did_with_former_requests_of_the_rid_is_nothing_of_the_new_one() -> None:
    """It hears three of them, and two cancels, at once, and numbers them itself."""
    d = Driver()
    for attempt, room in ((40, 7), (41, 8)):
        assert d.receive(Accepted("r", attempt, room, PREFILL, RANK_1)) == []
        assert d.receive(Failed("r", attempt, "cancelled", "cancelled by the client", False)) == []
    assert d.result is None
    assert d.accept(42) == [Attach("r", 42, 0, True, 9)]


def test_what_a_controller_begins_again_after_the_end_is_cancelled() -> None:
    """A repeated submit may come there after the failure was sent."""
    d = Driver()
    d.wait(1.1)
    d.receive(Failed("r", 1, "engine_failed", "it broke", False))
    assert d.result is not None
    assert d.accept() == [Cancel("r", 9)]
    assert d.receive(Failed("r", 1, "cancelled", "cancelled by the client", False)) == []


def test_done_is_not_the_end_of_the_output() -> None:
    """M74: the last tokens are on their way from the rank; if they got lost, they are asked for."""
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    d.receive(Done("r", 1, ()))
    assert d.result is None
    assert d.wait(SILENCE_S + 0.1) == [Attach("r", 1, 1, True, 9)]
    d.tokens(1, 11, finish="stop")
    assert d.result is not None
    assert (d.result.ids, d.result.finish) == ((10, 11), "stop")


def test_finish_without_done_is_the_end() -> None:
    d = Driver()
    d.accept()
    assert d.tokens(0, 10, finish="stop") == [Detach("r", 1)]
    assert d.result is not None
    assert d.result.finish == "stop"


def test_a_waiting_request_is_not_mistaken_for_a_dead_controller() -> None:
    d = Driver()
    for _ in range(30):
        repeats = d.wait(1.0)
        assert all(isinstance(message, Submit) and message.attempt == 1 for message in repeats)
        if repeats:
            d.receive(Accepted("r", 1, 9, None, None))
    assert d.result is None
    assert d.accept() == [Attach("r", 1, 0, True, 9)]


def test_a_controller_that_never_answers() -> None:
    d = Driver()
    repeats = [message for message in d.wait(11.0) if isinstance(message, Submit)]
    assert 2 <= len(repeats) <= 5
    assert {message.attempt for message in repeats} == {1}
    assert d.result is not None
    assert (d.result.code, d.result.finish) == ("peer_lost", "failed")
    assert "ipc:///c.clients" in d.result.message
    assert "10 s" in d.result.message


def test_overload_waits_as_long_as_told_and_ends_some_time() -> None:
    d = Driver(retries=2)
    d.receive(Failed("r", 0, "overloaded", "busy", True, 1.0))
    assert d.wait(0.9) == []
    assert submit_in(d.wait(0.3)).attempt == 2
    d.receive(Failed("r", 0, "overloaded", "busy", True, 0.0))
    d.wait(1.0)
    d.receive(Failed("r", 0, "overloaded", "busy", True, 7.0))
    assert d.result is not None
    assert (d.result.code, d.result.retryable, d.result.retry_after_s) == ("overloaded", True, 7.0)


@pytest.mark.parametrize(("code", "tries"), [("overloaded", 2), ("no_rank", 3)])
def test_what_is_overloaded_is_tried_again_no_longer_than_is_said(code: Code, tries: int) -> None:
    """`no_rank_s` counts from when there was none first, here after half a second, `overloaded_s` from the submit."""
    d = Driver(Patience(12, 10.0, overloaded_s=1.0, no_rank_s=1.0))
    d.receive(Accepted("r", 1, 9, None, None))
    d.now += 0.5
    for attempt in range(1, tries + 1):
        assert d.result is None
        d.receive(Failed("r", attempt, code, "busy", True, 0.4))
        d.wait(0.45)
    assert d.result is not None
    assert (d.result.code, d.result.attempts, d.result.retryable, d.result.ran) == (code, tries, True, False)


def test_a_request_that_was_shed_late_is_not_tried_again() -> None:
    d = Driver(Patience(12, 10.0, overloaded_s=1.0))
    d.receive(Accepted("r", 1, 9, None, None))
    d.now += 3.0
    d.receive(Failed("r", 1, "overloaded", "waited too long", True, 0.1))
    assert d.result is not None
    assert (d.result.code, d.result.retry_after_s, d.result.ran) == ("overloaded", 0.1, False)


def test_what_has_run_is_tried_again_however_late() -> None:
    """With output so far, or where there was a rank again in between."""
    d = Driver(Patience(3, 10.0, overloaded_s=1.0, no_rank_s=1.0), max_tokens=2)
    d.receive(Failed("r", 1, "no_rank", "none", True))
    d.wait(0.9)
    d.accept(2)
    d.now += 2.0
    d.receive(Failed("r", 2, "no_rank", "none", True))
    d.wait(0.9)
    d.accept(3)
    d.tokens(0, 10, attempt=3)
    for attempt in (3, 4):
        d.now += 2.0
        d.receive(Failed("r", attempt, "overloaded", "busy", True, 2.0))
        assert submit_in(d.wait(2.1)).attempt == attempt + 1
    assert d.result is None


RAN: list[tuple[Callable[[Driver], object], bool]] = [
    (lambda d: d.receive(Failed("r", 1, "too_long", "", False)), False),
    (lambda d: d.receive(Failed("r", 0, "too_many", "", False)), False),
    (lambda d: (d.receive(Accepted("r", 1, 9, None, None)), d.take(d.core.cancel("r", d.now))), False),
    (lambda d: d.take(d.core.cancel("r", d.now)), True),  # nobody knows yet
    (lambda d: d.wait(11.0), True),
    (lambda d: (d.accept(), d.take(d.core.cancel("r", d.now))), True),
    (lambda d: (d.accept(), d.receive(Failed("r", 1, "bad_room", "", False))), True),
    (lambda d: (d.receive(Failed("r", 1, "overloaded", "", True)), d.take(d.core.cancel("r", d.now))), False),
    (
        lambda d: (
            d.receive(Failed("r", 1, "overloaded", "", True)), d.wait(0.5), d.take(d.core.cancel("r", d.now)),
        ),
        True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("story", "ran"), RAN)
def test_a_result_says_whether_a_rank_may_have_worked_on_it(story: Callable[[Driver], object], ran: bool) -> None:
    d = Driver()
    story(d)
    assert d.result is not None
    assert d.result.ran is ran


def test_a_new_token_gives_all_retries_back() -> None:
    d = Driver(retries=2)
    d.accept()
    d.tokens(0, 10)
    for attempt in (1, 2, 3):
        assert d.result is None
        d.receive(Failed("r", attempt, "peer_lost", "gone", True))
        d.wait(3.0)
        d.accept(attempt + 1)
    assert d.result is not None
    assert (d.result.code, d.result.attempts) == ("peer_lost", 3)


def test_an_old_failure_does_not_touch_a_new_attempt() -> None:
    d = Driver()
    d.accept(2, RANK_1)
    d.receive(Failed("r", 1, "peer_lost", "old", True))
    assert d.tokens(0, 10, attempt=2, peer=RANK_1.endpoint) == []
    assert d.ids == [10]


@pytest.mark.parametrize("code", ["bad_rank", "too_long", "engine_failed", "duplicate_room", "deadline", "poison"])
def test_final_codes_are_final(code: Code) -> None:
    d = Driver()
    d.receive(Failed("r", 0, code, "no", False))
    assert d.result is not None
    assert d.result.code == code


def test_a_rank_the_caller_chose_is_not_replaced() -> None:
    d = Driver(routed_dp_rank=1)
    d.receive(Failed("r", 0, "rank_unavailable", "dead", True, 0.5))
    assert d.result is not None
    assert d.result.code == "rank_unavailable"


def test_cancel_tells_controller_and_rank() -> None:
    d = Driver()
    d.accept()
    d.tokens(0, 10)
    assert d.take(d.core.cancel("r", d.now)) == [Detach("r", 1), Cancel("r", 9)]
    assert d.result is not None
    assert (d.result.finish, d.result.ids) == ("cancelled", (10,))
    assert d.tokens(1, 11) == []  # too late


def test_the_deadline_is_kept_here_too() -> None:
    d = Driver(deadline_s=2.0)
    assert submit_in([send.message for send in d.sent]).deadline_s == pytest.approx(2.0)
    d.accept()
    assert Cancel("r", 9) not in d.wait(2.1), "its controller says so, and counts it as what it is"
    assert Cancel("r", 9) in d.wait(0.2)
    assert d.result is not None
    assert d.result.code == "deadline"


def test_output_that_is_whole_needs_no_other_attempt() -> None:
    d = Driver(eos_ids=(2,))
    d.accept()
    d.tokens(0, 10, 2)
    d.receive(Failed("r", 1, "peer_lost", "gone", True))
    assert d.result is not None
    assert (d.result.finish, d.result.ids) == ("stop", (10, 2))


def two_controllers() -> Driver:
    return Driver(at=Controllers(C, P), prefill_instance="prefill-0", routed_dp_rank=1, disagg_prefill_dp_rank=3)


def test_two_controllers_get_one_room_and_their_own_ranks() -> None:
    d = two_controllers()
    by_peer = {send.peer: send.message for send in d.sent}
    decode, prefill = by_peer[C], by_peer[P]
    assert isinstance(decode, Submit)
    assert isinstance(prefill, Submit)
    assert decode.bootstrap_room == prefill.bootstrap_room == 9
    assert (decode.leg, decode.routed_dp_rank, decode.disagg_prefill_dp_rank) == ("decode", 1, 3)
    assert (prefill.leg, prefill.routed_dp_rank, prefill.disagg_prefill_dp_rank) == ("prefill", 3, None)
    assert (decode.prefill_instance, prefill.instance) == ("prefill-0", "prefill-0")
    assert decode.rid != prefill.rid  # one controller may serve both


def test_legs_share_their_fate() -> None:
    d = two_controllers()
    d.accept()
    d.receive(Failed("r.prefill", 1, "engine_failed", "broken", False), P)
    assert [send.message for send in d.sent if isinstance(send.message, Cancel)] == [Cancel("r", 9)]
    assert d.result is not None
    assert d.result.code == "engine_failed"


def test_legs_are_tried_again_together() -> None:
    d = two_controllers()
    d.accept()
    assert d.receive(Failed("r", 1, "peer_lost", "gone", True)) == [Detach("r", 1), Cancel("r.prefill", 9)]
    again = [message for message in d.wait(0.5) if isinstance(message, Submit)]
    assert {(message.leg, message.attempt) for message in again} == {("decode", 2), ("prefill", 2)}


def test_one_controller_that_answers_does_not_hide_another_that_is_dead() -> None:
    d = two_controllers()
    for _ in range(11):
        repeats = d.wait(1.0)
        if any(isinstance(message, Submit) and message.rid == "r" for message in repeats):
            d.receive(Accepted("r", 1, 9, None, None))
    assert d.result is not None
    assert (d.result.code, P in d.result.message, d.result.total_s) == ("peer_lost", True, pytest.approx(10.0, abs=0.1))


def test_only_who_gave_no_answer_is_asked_again() -> None:
    d = two_controllers()
    d.accept()
    (again,) = [message for message in d.wait(1.1) if isinstance(message, Submit)]
    assert (again.rid, d.sent[-1].peer) == ("r.prefill", P)


def test_the_graver_reason_wins() -> None:
    d = two_controllers()
    d.accept()
    d.receive(Failed("r", 1, "prefill_failed", "the prefill leg ended", True))
    d.receive(Failed("r.prefill", 1, "engine_failed", "broken", False), P)
    assert d.result is not None
    assert d.result.code == "engine_failed"


def test_a_lone_prefill_leg_is_over_with_done() -> None:
    d = Driver(leg="prefill")
    d.receive(Accepted("r", 1, 9, PREFILL, None))
    again = d.wait(SILENCE_S + 0.1)  # a controller that restarted would know nothing of it
    assert submit_in(again).attempt == 1
    d.receive(Accepted("r", 1, 9, PREFILL, None))
    d.receive(Done("r", 1, ()))
    assert d.result is not None
    assert (d.result.finish, d.result.prefill, d.result.ids) == ("stop", PREFILL, ())


def test_what_a_controller_says_between_two_attempts_is_not_taken_up() -> None:
    """M73: the attempt was cancelled, whatever its controller did meanwhile; the next one is above what was told."""
    d = Driver()
    d.accept()
    assert Cancel("r", 9) in d.wait(2 * SILENCE_S + 0.1)
    assert d.request.state is State.BACKOFF
    assert d.accept(2, RANK_1) == []
    assert d.receive(Failed("r", 2, "cancelled", "as asked", False)) == []
    assert submit_in(d.wait(0.5)).attempt == 3
    assert d.accept(3, RANK_1) == [Attach("r", 3, 0, True, 9)]


def test_a_cancel_between_two_attempts_bothers_nobody_who_is_done() -> None:
    d = two_controllers()
    d.accept()
    d.receive(Failed("r", 1, "peer_lost", "gone", True))
    assert d.take(d.core.cancel("r", d.now)) == [Cancel("r.prefill", 9)]
    assert d.result is not None
    assert (d.result.finish, d.result.attempts) == ("cancelled", 1)


def test_a_rid_is_taken_as_long_as_any_submit_of_its_request_lives() -> None:
    """One controller may serve both legs, where the second has the rid of the first with `.prefill`."""
    d = Driver(at=Controllers(C, C))
    rng = random.Random(3)
    other = make_request([5], {"rid": "r.prefill"}, Controllers(C, C), rng)
    assert d.core.is_taken(other)
    d.take(d.core.cancel("r", d.now))
    assert not d.core.is_taken(other)


@pytest.mark.parametrize("table", [NEXT, SUBMIT_NEXT], ids=["request", "submit"])
def test_the_tables_are_whole(table: dict[Any, dict[Event, Any]]) -> None:
    """Each state has its row, can be reached, and can be left unless it is the last one."""
    kinds = type(next(iter(table)))
    assert set(table) == set(kinds)
    reached = {next(iter(table))}.union(*(row.values() for row in table.values()))
    assert reached == set(kinds)
    assert {state for state, row in table.items() if not row} <= {State.ENDED}


def test_what_the_table_does_not_know_is_our_bug_and_tells_the_story() -> None:
    d = Driver()
    with pytest.raises(AssertionError, match=r"rid='r'.*SUBMITTED.* cannot take Event.SUBMIT"):
        d.request.move(Event.SUBMIT)
    with pytest.raises(AssertionError, match=r"rid='r'.*ASKED.* cannot take Event.RETRY"):
        d.request.move_at((C, "r"), Event.RETRY)


def likely(*ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(token), ((token, -float(token)),)) for token in ids)


def test_log_probabilities_come_with_their_tokens_over_attempts_and_gaps() -> None:
    """M82: each once, whatever is sent again or lost."""
    driver = Driver(logprobs=1)
    assert submit_in([send.message for send in driver.sent]).needs == ("logprobs",)
    driver.accept()

    def tokens(start: int, *ids: int, attempt: int = 1, given: tuple[TokenLogprobs, ...] | None = None) -> None:
        said = likely(*ids) if given is None else given
        driver.receive(Tokens("r", attempt, start, ids, logprobs=said), RANK_0.endpoint)

    tokens(0, 11, 12)
    tokens(1, 12, 13)
    assert driver.ids == [11, 12, 13]
    tokens(3, 14, given=())
    tokens(3, 14, given=likely(14, 15))
    assert driver.ids == [11, 12, 13], "a rank that tells too few or too many is as good as silent"
    driver.receive(Failed("r", 1, "peer_lost", "gone", True))
    driver.wait(0.3)
    driver.accept(2)
    tokens(3, 14, attempt=2)
    assert driver.result is not None
    assert driver.result.ids == (11, 12, 13, 14)
    assert driver.result.logprobs == likely(*driver.result.ids)


def test_log_probabilities_of_the_prompt_come_before_its_first_token() -> None:
    driver = Driver(leg="unified", prompt_logprobs=1)
    of_prompt = likely(*range(len(driver.request.prompt) // 4 - 1))
    driver.accept()
    for said in ((), of_prompt * 2):
        driver.receive(Tokens("r", 1, 0, (11,), prompt_logprobs=said), RANK_0.endpoint)
        assert driver.ids == [], "as good as silent"
    driver.receive(Tokens("r", 1, 0, (11,), prompt_logprobs=of_prompt), RANK_0.endpoint)
    driver.receive(Tokens("r", 1, 1, (12, 13, 14), "length"), RANK_0.endpoint)
    assert driver.result is not None
    assert (driver.result.ids, driver.result.prompt_logprobs) == ((11, 12, 13, 14), of_prompt)


def test_where_the_first_message_with_them_is_lost_it_is_asked_for_at_once() -> None:
    driver = Driver(leg="unified", prompt_logprobs=1)
    driver.accept()
    (asked,) = driver.receive(Tokens("r", 1, 1, (12,)), RANK_0.endpoint)
    assert asked == Attach("r", 1, 0, True, 9)


def test_log_probabilities_that_nobody_asked_for_are_not_kept() -> None:
    driver = Driver()
    driver.accept()
    driver.receive(Tokens("r", 1, 0, (1, 2, 3, 4), "length", logprobs=likely(1, 2, 3, 4)), RANK_0.endpoint)
    assert driver.result is not None
    assert (driver.result.ids, driver.result.logprobs) == ((1, 2, 3, 4), ())
