"""What became of a request, asked by an operator: what the controller remembers of it, and what its ranks do.

Owns the questions that are under way. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bus.rights import may
from bus.wire.messages import MAX_MARKS, MAX_TOLD, Mark, Recall, Recalled, Refused, Rid, Told, TraceIs, TraceQuery
from controller.events import Action, ToClient, ToNode
from controller.load.rank import RankLoad
from controller.members import Members
from controller.requests.life import Life
from controller.requests.story import Story, marks_of, ranks_of, story_of

WAIT_S = 1.0  # for ranks to answer
MAX_OPEN = 64
MAX_SILENT = 256  # that are named
MAX_NAMED = 64  # requests that are found by the beginning of their names


@dataclass(slots=True)
class _Inquiry:
    peer: Any
    id: int
    rid: Rid
    others: tuple[Rid, ...]  # that begin as what was asked for
    told: list[Told]
    waits_for: set[str]  # ranks
    gone: set[str]  # ranks that nobody can ask any more
    due: float


class Inquiries:
    """`wall_s` makes seconds since 1970 of the core's."""

    def __init__(self, name: str, members: Members, life: Life, wall_s: float) -> None:
        self._name = name
        self._members = members
        self._life = life
        self._wall_s = wall_s
        self._open: dict[int, _Inquiry] = {}
        self._number = 0

    def asked(self, peer: Any, query: TraceQuery, now: float, out: list[Action]) -> None:
        if not may(peer, "admins"):
            out.append(ToClient(peer, Refused("bad_identity", "to trace a request takes an admin's key", query.id)))
            return
        if len(self._open) >= MAX_OPEN:
            out.append(ToClient(peer, Refused("too_many", f"{MAX_OPEN} such questions are open", query.id)))
            return
        rid, others = query.rid, []
        stories = self._stories(rid)
        if not stories and (named := self._named(f"{rid}-")):  # what an edge's client said, before what it drew
            rid, *others = named
            stories = self._stories(rid)
        ranks = {f"{rank.key[0]}/{rank.key[1]}": rank for rank in self._members.peers.values()}
        gone: set[str] = set()
        if stories:  # else whoever may have run it for another controller, or a former start of this one
            known = set().union(*map(ranks_of, stories))
            gone = known - ranks.keys()
            ranks = {name: ranks[name] for name in known - gone}
        self._number += 1
        self._open[self._number] = _Inquiry(
            peer, query.id, rid, tuple(others), self._told(stories), set(ranks), gone, now + WAIT_S
        )
        out.extend(ToNode(rank.peer, Recall(self._number, rid)) for rank in ranks.values())
        self._answer_if_complete(self._number, now, out)

    def recalled(self, rank: RankLoad, answer: Recalled, now: float, out: list[Action]) -> None:
        """What one rank remembers; an answer that nobody waits for means nothing."""
        name = f"{rank.key[0]}/{rank.key[1]}"
        inquiry = self._open.get(answer.id)
        if inquiry is None or name not in inquiry.waits_for:
            return
        inquiry.waits_for.remove(name)
        if answer.marks and len(inquiry.told) < MAX_TOLD:
            rtt_us, offset_us = -1, 0
            if (best := rank.clock.best) is not None:
                rtt_us, offset_us = round(best[0] * 1e6), round((best[1] - self._wall_s) * 1e6)
            inquiry.told.append(Told(name, answer.marks, offset_us, rtt_us))
        self._answer_if_complete(answer.id, now, out)

    def tick(self, now: float, out: list[Action]) -> None:
        for number, inquiry in list(self._open.items()):
            if now >= inquiry.due:
                self._answer(number, now, out)

    def _stories(self, rid: Rid) -> list[Story]:
        live = self._life.requests.get(rid)
        over = self._life.table.history.of(rid)
        return over + ([story_of(live)] if live is not None else [])

    def _named(self, beginning: str) -> list[Rid]:
        """Requests that begin so, those that live and the newest first."""
        live = [rid for rid in reversed(self._life.requests) if rid.startswith(beginning)]
        return list(dict.fromkeys(live + self._life.table.history.named(beginning, MAX_NAMED)))[:MAX_NAMED]

    def _told(self, stories: list[Story]) -> list[Told]:
        """By the client, as its submit said, and by this controller."""
        if not stories:
            return []
        marks = tuple(mark for story in stories for mark in marks_of(story, self._wall_s))
        asked_us = stories[0].asked_us
        client = [Told("client", (Mark(asked_us, "asked"),), 0, -1)] if asked_us else []
        return [*client, Told(self._name, marks[-MAX_MARKS:])]

    def _answer_if_complete(self, number: int, now: float, out: list[Action]) -> None:
        if not self._open[number].waits_for:
            self._answer(number, now, out)

    def _answer(self, number: int, now: float, out: list[Action]) -> None:
        inquiry = self._open.pop(number)
        history = self._life.table.history
        oldest = history.oldest
        kept_s = max(0.0, now - oldest.ended_at) if oldest is not None else 0.0
        silent = tuple(sorted(inquiry.waits_for | inquiry.gone)[:MAX_SILENT])
        told = tuple(inquiry.told)
        answer = TraceIs(inquiry.id, self._name, told, silent, len(history), kept_s, inquiry.rid, inquiry.others)
        out.append(ToClient(inquiry.peer, answer))
