"""The answers to questions for a controller's status. One of thousands of ranks is made and sent in parts, a part in
each turn of the loop, so that requests need not wait for it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bus.rights import key_of, may_see_all
from bus.wire.messages import Refused, Status, StatusQuery
from bus.wire.status import RANKS_PER_MESSAGE, without_loads
from controller.event_log import EventLog
from controller.events import Action, ToClient
from controller.health import Liveness
from controller.observe import rank_status
from controller.rank import Rank
from controller.requests.life import RequestLifecycle

MAX_OPEN = 64
MAX_OF_ONE = 8  # of one key, over all its connections; of one connection without keys


@dataclass(slots=True, eq=False)
class _Answer:
    peer: Any
    status: Status  # without ranks
    ranks: list[tuple[Rank, Liveness]]  # as they were known when it was asked: one may be forgotten meanwhile
    query: StatusQuery
    sent: int = 0


class StatusAnswers:
    """The answers under way, at most MAX_OPEN, and MAX_OF_ONE of one asker. `begin` returns a status without ranks for
    the id of a question, and `ranks` what is known of each rank, in order. Methods append actions to `out`."""

    def __init__(
        self, begin: Callable[[int, float], Status], ranks: Callable[[], list[tuple[Rank, Liveness]]], events: EventLog,
        life: RequestLifecycle,
    ) -> None:  # fmt: skip
        self._begin = begin
        self._ranks = ranks
        self._events = events
        self._life = life
        self._open: deque[_Answer] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def asked(self, peer: Any, id: int, now: float, out: list[Action], query: StatusQuery | None = None) -> None:
        """Answer the question `id` of `peer`, with what else `query` wants: at once, or if there are many ranks with
        the calls of `advance` that follow. One question too many gets Refused."""
        for open_one in [each for each in self._open if (each.peer, each.status.id) == (peer, id)]:
            self._open.remove(open_one)  # it asks again, so a part was lost; those of two answers would be mixed up
        mine = sum((key_of(each.peer) or each.peer) == (key_of(peer) or peer) for each in self._open)
        if mine >= MAX_OF_ONE or len(self._open) >= MAX_OPEN:
            what = f"{mine} of your questions for a status are being answered, {len(self._open)} of all: ask later"
            out.append(ToClient(peer, Refused("too_many", what, id)))
            return
        ranks = self._ranks()
        answer = _Answer(peer, replace(self._begin(id, now), total=len(ranks)), ranks, query or StatusQuery(id))
        if len(answer.ranks) > RANKS_PER_MESSAGE:
            self._open.append(answer)
        else:
            self._send_part(answer, now, out)

    def advance(self, now: float, out: list[Action]) -> None:
        """Send the next part of one of the answers under way; they take turns."""
        if self._open:
            answer = self._open.popleft()
            self._send_part(answer, now, out)
            if answer.sent < len(answer.ranks):
                self._open.append(answer)

    def _send_part(self, answer: _Answer, now: float, out: list[Action]) -> None:
        some = answer.ranks[answer.sent : answer.sent + RANKS_PER_MESSAGE]
        answer.sent += len(some)
        left = len(answer.ranks) - answer.sent
        part = replace(answer.status, ranks=tuple([rank_status(*known, now) for known in some]), remaining=left)
        if not may_see_all(answer.peer):
            part = without_loads(part)
        elif not left:
            query, life = answer.query, self._life
            events = None if query.events_from is None else self._events.since(query.events_from)
            lists = life.listed.lists(now) if query.requests else None
            part = replace(part, events=events, queue=life.queue.status(now), requests=lists)
        out.append(ToClient(answer.peer, part))
