"""What a client asks a controller besides requests (its status, the drain of a rank), until answered or too late. The
answer to either is a status.

Owns the questions and the futures of those who asked; opens no socket and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from bus.actions import Send
from bus.errors import PeerLost, RequestFailed
from bus.wire.messages import Message, Refused, Status
from bus.wire.status import join

REPEAT_S = 1.0  # a question without an answer
LOOK_AGAIN_S = 0.1  # one whose answer does not say yet what is waited for


@dataclass(slots=True, eq=False)
class _Question:
    peer: str
    make: Callable[[int], Message]
    enough: Callable[[Status], bool] | None
    answer: Future[Status]
    next_at: float
    end_at: float
    part: Status | None = None  # the answer as far as it has come
    seen: Status | None = None  # the last whole one, which was not enough


class Questions:
    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}  # by number; one that is asked again for more gets a new number
        self._number = 0

    def ask(
        self,
        peer: str,
        make: Callable[[int], Message],
        enough: Callable[[Status], bool] | None,
        answer: Future[Status],
        now: float,
        wait_s: float,
    ) -> None:
        """Let `tick` say `make(number)` to `peer`, until `answer` has its result or `wait_s` have passed. A status that
        is not `enough` is asked for again, and the last one is the answer when time is up."""
        self._put(_Question(peer, make, enough, answer, now, now + wait_s))

    def answered(self, peer: str, message: Status | Refused, now: float) -> None:
        """An answer came from `peer`; one that fits no open question of it means nothing."""
        question = self._open.get(message.id)
        if question is None or question.peer != peer:
            return
        if isinstance(message, Refused):
            del self._open[message.id]
            settle(question.answer, RequestFailed(message.code, message.message))
            return
        question.part = status = join(question.part, message)
        if status.remaining:
            return
        del self._open[message.id]
        if question.enough is None or question.enough(status):
            settle(question.answer, status)
        else:
            question.part, question.seen, question.next_at = None, status, now + LOOK_AGAIN_S
            self._put(question)

    def tick(self, now: float) -> list[Send]:
        """What is to be said now, for the first time or again."""
        sends: list[Send] = []
        for number, question in list(self._open.items()):
            if question.answer.done():
                del self._open[number]
            elif now >= question.end_at:
                del self._open[number]
                settle(question.answer, question.seen or PeerLost(f"no controller answers at {question.peer}"))
            elif now >= question.next_at:
                question.next_at = now + REPEAT_S
                sends.append(Send(question.peer, question.make(number)))
        return sends

    def drop(self, outcome: Exception | None = None) -> None:
        """All of them end: with `outcome`, or cancelled."""
        while self._open:
            answer = self._open.popitem()[1].answer
            if outcome is None:
                answer.cancel()
            else:
                settle(answer, outcome)

    def _put(self, question: _Question) -> None:
        self._number += 1
        self._open[self._number] = question


def settle(answer: Future[Status], outcome: Status | Exception) -> None:
    """Unless whoever asked gave up, which another thread may do at this very moment: set_result alone would raise."""
    if answer.done() or not answer.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
