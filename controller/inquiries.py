"""An operator's questions for the history of a request: this controller's record and its ranks' records together.

This module owns the open questions. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bus.rights import may_see_all
from bus.wire.messages import (
    MAX_TRACE_EVENTS,
    MAX_TRACE_PARTS,
    HistoryQuery,
    HistoryReply,
    PartTrace,
    Refused,
    Rid,
    TraceEvent,
    TraceQuery,
    TraceReply,
)
from controller.events import Action, ToClient, ToNode
from controller.members import Members
from controller.rank import Rank
from controller.requests.record import RequestRecord, ranks_of, trace_events_of
from controller.requests.table import RequestTable

WAIT_S = 1.0  # for ranks to answer
MAX_OPEN = 64
MAX_SILENT = 256  # that are named
LEAST = 4  # characters of a beginning that is no edge's name for a request
MAX_NAMED = 64  # requests that are found by the beginning of their names


@dataclass(slots=True)
class _Inquiry:
    peer: Any
    id: int
    rid: Rid
    others: tuple[Rid, ...]  # that begin as what was asked for
    parts: list[PartTrace]
    waits_for: set[str]  # ranks
    gone: set[str]  # ranks that cannot be asked any more
    due: float


class Inquiries:
    """The open questions about the requests in `table`, at most MAX_OPEN. `wall_s` added to the core's clock gives
    seconds since 1970. Methods append actions to `out`."""

    def __init__(self, name: str, members: Members, table: RequestTable, wall_s: float) -> None:
        self._name = name
        self._members = members
        self._table = table
        self._wall_s = wall_s
        self._open: dict[int, _Inquiry] = {}
        self._number = 0

    def asked(self, peer: Any, query: TraceQuery, now: float, out: list[Action]) -> None:
        """Take a client's question: ask the ranks that ran the request (all ranks, if this controller does not know the
        request). The client gets its answer once all of them have answered, or after WAIT_S seconds. A client without
        a viewer's or an admin's key, and one question too many, get Refused."""
        if not may_see_all(peer):
            why = "to trace a request takes a viewer's or an admin's key"
            out.append(ToClient(peer, Refused("bad_identity", why, query.id)))
            return
        if len(self._open) >= MAX_OPEN:
            out.append(ToClient(peer, Refused("too_many", f"{MAX_OPEN} such questions are open", query.id)))
            return
        rid, others = query.rid, []
        records = self._table.records(rid)
        # an edge's rid is its client's name for the request, and a number that the edge drew
        for beginning in (f"{rid}-", *([rid] if len(rid) >= LEAST else [])):
            if not records and (named := self._table.named(beginning, MAX_NAMED)):
                rid, *others = named
                records = self._table.records(rid)
        ranks = {f"{rank.key[0]}/{rank.key[1]}": rank for rank in self._members.peers.values()}
        gone: set[str] = set()
        if records:  # else all ranks: one may have run it for another controller, or a former start of this one
            known = set().union(*map(ranks_of, records))
            gone = known - ranks.keys()
            ranks = {name: ranks[name] for name in known - gone}
        self._number += 1
        self._open[self._number] = _Inquiry(
            peer, query.id, rid, tuple(others), self._own_parts(records), set(ranks), gone, now + WAIT_S
        )
        out.extend(ToNode(rank.peer, HistoryQuery(self._number, rid)) for rank in ranks.values())
        self._answer_if_complete(self._number, now, out)

    def recalled(self, rank: Rank, answer: HistoryReply, now: float, out: list[Action]) -> None:
        """Add one rank's record to its question, and answer it if that was the last. An answer to no open question is
        ignored."""
        name = f"{rank.key[0]}/{rank.key[1]}"
        inquiry = self._open.get(answer.id)
        if inquiry is None or name not in inquiry.waits_for:
            return
        inquiry.waits_for.remove(name)
        if answer.events and len(inquiry.parts) < MAX_TRACE_PARTS:
            rtt_us, offset_us = -1, 0
            if (best := rank.clock.best) is not None:
                rtt_us, offset_us = round(best[0] * 1e6), round((best[1] - self._wall_s) * 1e6)
            inquiry.parts.append(PartTrace(name, answer.events, offset_us, rtt_us))
        self._answer_if_complete(answer.id, now, out)

    def tick(self, now: float, out: list[Action]) -> None:
        """Answer the questions that have waited for WAIT_S seconds, with what the ranks have answered so far."""
        for number, inquiry in list(self._open.items()):
            if now >= inquiry.due:
                self._answer(number, now, out)

    def _own_parts(self, records: list[RequestRecord]) -> list[PartTrace]:
        """Return the parts of the client (from its submit) and of this controller."""
        if not records:
            return []
        events = tuple(event for record in records for event in trace_events_of(record, self._wall_s))
        asked_us = records[0].asked_us
        client = [PartTrace("client", (TraceEvent(asked_us, "asked"),), 0, -1)] if asked_us else []
        return [*client, PartTrace(self._name, events[-MAX_TRACE_EVENTS:])]

    def _answer_if_complete(self, number: int, now: float, out: list[Action]) -> None:
        if not self._open[number].waits_for:
            self._answer(number, now, out)

    def _answer(self, number: int, now: float, out: list[Action]) -> None:
        inquiry = self._open.pop(number)
        kept, kept_s = self._table.kept(now)
        silent = tuple(sorted(inquiry.waits_for | inquiry.gone)[:MAX_SILENT])
        parts = tuple(inquiry.parts)
        answer = TraceReply(inquiry.id, self._name, parts, silent, kept, kept_s, inquiry.rid, inquiry.others)
        out.append(ToClient(inquiry.peer, answer))
