"""The questions of viewers for the steps and work of a rank (`pdbus record`): each is passed on to its rank, and the
rank's answer to the viewer. This module owns the open questions; it keeps nothing of the answers. Pure.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.rights import may_see_all
from bus.wire.messages import MemberKey, RecordQuery, RecordReply, Refused
from controller.events import Action, ToClient, ToNode
from controller.members import Members
from controller.rank import Rank

WAIT_S = 1.0  # for a rank to answer
MAX_OPEN = 4096  # of all viewers


class _Open(Struct, frozen=True, gc=False):
    """A question that its rank has not answered."""

    peer: Any
    id: int
    key: MemberKey
    due: float


class Recordings:
    """The open questions, at most MAX_OPEN. `wall_s` added to the core's clock gives seconds since 1970. Methods append
    actions to `out`."""

    def __init__(self, members: Members, wall_s: float) -> None:
        self._members = members
        self._wall_s = wall_s
        self._open: dict[int, _Open] = {}  # in the order of their times
        self._number = 0

    def asked(self, peer: Any, query: RecordQuery, now: float, out: list[Action]) -> None:
        """Pass a question on. A rank that does not record is not asked. A client without a viewer's or an admin's key,
        an unknown rank, and one question too many get Refused."""
        key = query.instance, query.dp_rank
        rank = self._members.known(key)
        if not may_see_all(peer):
            out.append(
                ToClient(peer, Refused("bad_identity", "to record takes a viewer's or an admin's key", query.id))
            )
        elif rank is None:
            out.append(ToClient(peer, Refused("bad_rank", f"no rank {key[0]}/{key[1]} is known here", query.id)))
        elif not rank.load.info.records:
            out.append(ToClient(peer, RecordReply(query.id, records=False, at_us=self._us(now))))
        elif len(self._open) >= MAX_OPEN:
            out.append(ToClient(peer, Refused("too_many", f"{MAX_OPEN} such questions are open", query.id)))
        else:
            self._number += 1
            self._open[self._number] = _Open(peer, query.id, key, now + WAIT_S)
            out.append(ToNode(rank.peer, replace(query, id=self._number)))

    def answered(self, rank: Rank, reply: RecordReply, now: float, out: list[Action]) -> None:
        """Pass a rank's answer on, with what is known of its clock. An answer to no open question is ignored."""
        question = self._open.get(reply.id)
        if question is None or question.key != rank.key:
            return
        del self._open[reply.id]
        rtt_us, offset_us = -1, 0
        if (best := rank.clock.best) is not None:
            rtt_us, offset_us = round(best[0] * 1e6), round((best[1] - self._wall_s) * 1e6)
        answer = replace(reply, id=question.id, records=True, silent=False, at_us=self._us(now), offset_us=offset_us,
                         rtt_us=rtt_us, epoch=rank.epoch)  # fmt: skip
        out.append(ToClient(question.peer, answer))

    def tick(self, now: float, out: list[Action]) -> None:
        """Answer for the ranks that have not answered for WAIT_S seconds."""
        while self._open:
            number, question = next(iter(self._open.items()))
            if now < question.due:
                return
            del self._open[number]
            out.append(ToClient(question.peer, RecordReply(question.id, silent=True, at_us=self._us(now))))

    def _us(self, now: float) -> int:
        return max(0, round((self._wall_s + now) * 1e6))
