"""What a client asks a controller: whose answer counts, and when it is too late."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from bus.errors import PeerLost, RemoteProtocolError, RequestFailed
from bus.wire.messages import (
    DrainRank,
    RankState,
    RankStatus,
    RecordReply,
    Refused,
    Status,
    StatusQuery,
    TraceQuery,
    TraceReply,
)
from pdbus.client.options import any_rank, block_tokens_for, leg_for
from pdbus.client.questions import ANSWERS, LOOK_AGAIN_S, REPEAT_S, Questions

C = "ipc:///c.clients"


def status(number: int, *roles: Any, state: RankState = "ready") -> Status:
    ranks = [
        RankStatus("i", n, role, "m", state, 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0)
        for n, role in enumerate(roles)
    ]
    return Status(number, "c", 1, 0.0, {}, {}, tuple(ranks))


def asked(make: Any = StatusQuery, enough: Any = None) -> tuple[Questions, Future[Status]]:
    """A question of ten seconds, said once."""
    questions, answer = Questions(), Future[Status]()
    questions.ask(C, make, Status, answer, 0.0, 10.0, enough=enough)
    assert [(send.peer, send.message) for send in questions.tick(0.0)] == [(C, make(1))]
    return questions, answer


def drain(number: int) -> DrainRank:
    return DrainRank(number, "decode-0", 4)


def test_a_question_is_repeated_until_it_is_too_late() -> None:
    questions, answer = asked()
    assert questions.tick(REPEAT_S / 2) == []
    assert [send.message for send in questions.tick(REPEAT_S)] == [StatusQuery(1)]
    assert questions.tick(10.0) == []
    with pytest.raises(PeerLost, match="no controller answers at ipc:///c"):
        answer.result(0)
    questions.answered(C, status(1), 10.1)  # too late


@pytest.mark.parametrize("outcome", [PeerLost("it is over"), None])
def test_all_end_with_whoever_asked_them(outcome: Exception | None) -> None:
    questions, first = asked()
    second = Future[Status]()
    questions.ask(C, StatusQuery, Status, second, 0.0, 10.0)
    questions.drop(outcome)
    for answer in (first, second):
        assert answer.cancelled() if outcome is None else answer.exception(0) is outcome
    assert questions.tick(REPEAT_S) == []


@pytest.mark.parametrize("make", [StatusQuery, drain])
def test_the_answer_is_a_status(make: Any) -> None:
    questions, answer = asked(make)
    questions.answered(C, status(2), 0.1)  # to another question
    assert not answer.done()
    questions.answered(C, status(1, "decode"), 0.2)
    assert answer.result(0) == status(1, "decode")


def test_only_who_was_asked_answers() -> None:
    """A rank may say `refused` too, with any number."""
    questions, answer = asked(drain)
    for message in (status(1), Refused("bad_rank", "", 1)):
        questions.answered("ipc:///node", message, 0.1)
    assert not answer.done()
    questions.answered(C, Refused("bad_rank", "no such rank", 1), 0.2)
    with pytest.raises(RequestFailed, match="no such rank"):
        answer.result(0)


def trace_asked() -> tuple[Questions, Future[TraceReply]]:
    questions, answer = Questions(), Future[TraceReply]()
    questions.ask(C, partial(TraceQuery, rid="r"), TraceReply, answer, 0.0, 10.0, repeat_s=3.0)
    assert [send.message for send in questions.tick(0.0)] == [TraceQuery(1, "r")]
    return questions, answer


def test_each_question_has_a_kind_of_answer_and_a_pace_of_its_own() -> None:
    questions, answer = trace_asked()
    questions.answered(C, status(1), 0.1)  # of another kind
    assert not answer.done()
    assert questions.tick(2.9) == []
    assert [send.message for send in questions.tick(3.0)] == [TraceQuery(1, "r")]
    trace = TraceReply(1, "c", ())
    questions.answered(C, trace, 3.1)
    assert answer.result(0) is trace


def test_an_older_part_does_not_know_the_question_and_says_so_without_its_number() -> None:
    questions, answer = trace_asked()
    other = Future[Status]()
    questions.ask(C, StatusQuery, Status, other, 0.0, 10.0)
    unread = Refused("bad_message", str(RemoteProtocolError("tag", "trace")))
    questions.answered("ipc:///node", unread, 0.1)
    questions.answered(C, Refused("bad_message", "schema: of something else"), 0.2)
    assert not answer.done()
    questions.answered(C, unread, 0.3)
    with pytest.raises(RequestFailed, match="is older than this one"):
        answer.result(0)
    assert not other.done(), "it knows that one"


def test_whatever_answers_by_number_reaches_who_asked() -> None:
    assert set(ANSWERS) == {Status, TraceReply, RecordReply, Refused}


def test_a_status_that_is_not_enough_is_asked_for_again_soon() -> None:
    questions, answer = asked(enough=any_rank)
    questions.answered(C, status(1), 1.0)
    assert questions.tick(1.0 + LOOK_AGAIN_S / 2) == []
    assert [send.message for send in questions.tick(1.0 + LOOK_AGAIN_S)] == [StatusQuery(2)]
    questions.answered(C, status(1, "decode"), 1.2)  # the answer to the first, come twice
    assert not answer.done()
    questions.answered(C, status(2, "decode"), 1.3)
    assert answer.result(0) == status(2, "decode")


def test_when_time_is_up_the_last_status_will_do() -> None:
    questions, answer = asked(enough=any_rank)
    questions.answered(C, status(1, "decode", state="gone"), 1.0)
    questions.tick(10.0)
    assert answer.result(0) == status(1, "decode", state="gone")


def test_who_gave_up_is_not_answered() -> None:
    questions, answer = asked()
    answer.cancel()
    questions.answered(C, status(1), 0.1)
    assert answer.cancelled()
    assert questions.tick(5.0) == []


def test_what_is_told_of_a_cluster_that_still_gathers_is_not_kept() -> None:
    """So a client that asked too early splits its pairs and sends its hashes from the time that all roles are there."""
    assert [leg_for(status(1, *roles)) for roles in ((), ("decode",), ("prefill",))] == [None] * 3
    assert leg_for(status(1, "unified")) == "unified"
    assert leg_for(status(1, "unified", "decode", "prefill")) == "pair"
    assert block_tokens_for(status(1, "prefill", "decode")) == 0
