"""Questions of a client to another part (status, drain, trace), each until it is answered or its time is up.

Owns the questions and the futures of their answers; opens no socket and reads no clock. A question is any message with
an `id`, and its answer is any message with the same `id`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bus.actions import Send
from bus.errors import PeerLost, RequestFailed
from bus.wire.messages import CONTROLLER_TO_CLIENT, Message, Refused, Status
from bus.wire.status import join

REPEAT_S = 1.0  # a question without an answer is sent again after this time
LOOK_AGAIN_S = 0.1  # a question whose answer was not enough is sent again after this time
ANSWERS = tuple(kind for kind in CONTROLLER_TO_CLIENT.values() if "id" in kind.__struct_fields__)

A = TypeVar("A", bound=Message)


@dataclass(slots=True, eq=False)
class _Question(Generic[A]):
    peer: str
    make: Callable[[int], Message]
    kind: type[A]
    answer: Future[A]
    enough: Callable[[A], bool] | None
    repeat_s: float
    next_at: float
    end_at: float
    part: Status | None = None  # the parts received so far of an answer in several messages
    seen: A | None = None  # the last complete answer, which was not enough


class Questions:
    """The open questions of one client. For one thread; futures may be cancelled by any. `now` is in seconds."""

    def __init__(self) -> None:
        self._open: dict[int, _Question[Any]] = {}  # by number; a question that is asked again gets a new one
        self._number = 0

    def ask(
        self,
        peer: str,
        make: Callable[[int], Message],
        kind: type[A],
        answer: Future[A],
        now: float,
        wait_s: float,
        *,
        enough: Callable[[A], bool] | None = None,
        repeat_s: float = REPEAT_S,
    ) -> None:
        """Open a question: `tick` sends `make(number)` to `peer` every `repeat_s` seconds, until a message of `kind`
        becomes the result of `answer` or `wait_s` seconds have passed. With `enough`, an answer for which it returns
        false is asked for again; when time is up, the last one counts, and PeerLost if there is none."""
        self._put(_Question(peer, make, kind, answer, enough, repeat_s, now, now + wait_s))

    def answered(self, peer: str, message: Message, now: float) -> None:
        """Handle an answer of `peer`: set its question's future, to RequestFailed for a refusal. One that belongs to no
        open question is ignored."""
        number: int = getattr(message, "id", 0)
        question = self._open.get(number)
        if question is None or question.peer != peer:
            if isinstance(message, Refused) and not number:
                self._unknown(peer, message)
        elif isinstance(message, Refused):
            self._end(number, RequestFailed(message.code, message.message))
        elif isinstance(message, question.kind):
            if isinstance(message, Status):
                question.part = message = join(question.part, message)
                if message.remaining:
                    return
            if question.enough is None or question.enough(message):
                self._end(number, message)
            else:
                del self._open[number]
                question.part, question.seen, question.next_at = None, message, now + LOOK_AGAIN_S
                self._put(question)

    def tick(self, now: float) -> list[Send]:
        """Return the questions to send now, for the first time or again, and end those whose time is up. Call it after
        `ask` and regularly."""
        sends: list[Send] = []
        for number, question in list(self._open.items()):
            if question.answer.done():
                del self._open[number]
            elif now >= question.end_at:
                self._end(number, question.seen or PeerLost(f"no controller answers at {question.peer}"))
            elif now >= question.next_at:
                question.next_at = now + question.repeat_s
                sends.append(Send(question.peer, question.make(number)))
        return sends

    def drop(self, outcome: Exception | None = None) -> None:
        """End all questions: with `outcome`, or cancelled if it is None."""
        while self._open:
            answer = self._open.popitem()[1].answer
            if outcome is None:
                answer.cancel()
            else:
                settle(answer, outcome)

    def _put(self, question: _Question[Any]) -> None:
        self._number += 1
        self._open[self._number] = question

    def _end(self, number: int, outcome: Message | Exception) -> None:
        settle(self._open.pop(number).answer, outcome)

    def _unknown(self, peer: str, refused: Refused) -> None:
        """Handle a refusal without a number: an older part cannot read an unknown question, and its message names the
        tag alone."""
        for number, question in list(self._open.items()):
            tag = question.make(number).__struct_config__.tag
            if question.peer == peer and refused.code == "bad_message" and refused.message == f"tag: {tag}":
                why = f"the part at {peer} is older than this one and does not know this question"
                self._end(number, RequestFailed(refused.code, why))


def settle(answer: Future[A], outcome: A | Exception) -> None:
    """Set the result or exception of `answer`, unless it is done or cancelled. Safe while other threads cancel it."""
    if answer.done() or not answer.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
