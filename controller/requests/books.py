"""The books of live requests: who is alive, whose room and client it is, what payload is kept, when it is due.

Owns these maps and sums, the limits on them, and the central queue. Sends, places and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from bus.wire.messages import Rid, Role, Submit
from controller.config import ControllerConfig
from controller.requests.queue import CentralQueue, Deadlines
from controller.requests.request import ROLES, Refusal, Request, State


class Books:
    """`requests` by rid; `queue` holds those of them that wait; `payload_bytes` is what all of them keep."""

    def __init__(self, config: ControllerConfig, now: float) -> None:
        self._config = config
        self._rooms: dict[tuple[int, Role], Rid] = {}
        self._of_client: dict[Any, int] = {}
        self.requests: dict[Rid, Request] = {}
        self.queue = CentralQueue(max_requests=config.queue_requests, max_bytes=config.queue_bytes)
        self.deadlines = Deadlines(now)
        self.payload_bytes = 0

    def check(self, peer: Any, submit: Submit, size: int, live: Request | None) -> None:
        """Raise Refusal when `submit` with `size` bytes of payload does not fit beside what is alive; `live` is the
        request it would replace."""
        for role in rooms_of(submit):
            assert submit.bootstrap_room is not None
            holder = self._rooms.get((submit.bootstrap_room, role))
            if holder is not None and holder != submit.rid:
                raise Refusal("duplicate_room", f"bootstrap_room {submit.bootstrap_room} belongs to a live request")
        config = self._config
        kept = self.payload_bytes - (0 if live is None else live.frames_bytes)
        if kept + size > config.payload_bytes:
            raise Refusal("overloaded", "the prompts that wait here take all the memory there is for them")
        if live is None and self._of_client.get(peer, 0) >= config.client_requests:
            raise Refusal("too_many", f"this client has {config.client_requests} requests outstanding")
        if live is None and len(self.requests) >= config.max_requests:
            raise Refusal("overloaded", f"{config.max_requests} requests are alive here")

    def add(self, request: Request) -> None:
        submit = request.submit
        self.requests[submit.rid] = request
        for role in rooms_of(submit):
            assert submit.bootstrap_room is not None
            self._rooms[(submit.bootstrap_room, role)] = submit.rid
        self._enter(request.peer)
        self.payload_bytes += request.frames_bytes
        if request.deadline_at is not None:
            self.deadlines.add(submit.rid, request.deadline_at)

    def move(self, request: Request, peer: Any) -> None:
        """Its client speaks over another connection now."""
        self._leave(request.peer)
        request.peer = peer
        self._enter(peer)

    def release_payload(self, request: Request) -> None:
        """Nobody will need its payload again."""
        self.payload_bytes -= request.frames_bytes
        request.frames, request.frames_bytes = (), 0

    def remove(self, request: Request) -> None:
        """It has ended."""
        submit = request.submit
        if request.lane is not None:
            self.queue.remove(request)
        request.to(State.ENDED)
        del self.requests[submit.rid]
        for role in rooms_of(submit):
            assert submit.bootstrap_room is not None
            del self._rooms[(submit.bootstrap_room, role)]
        self._leave(request.peer)
        self.payload_bytes -= request.frames_bytes
        if request.deadline_at is not None:
            self.deadlines.remove(submit.rid, request.deadline_at)

    def validate(self) -> None:
        """Every sum and map is what its definition says (tests call this after each event)."""
        self.queue.validate()
        live = self.requests.values()
        assert {request.rid for request in self.queue} == {r.rid for r in live if r.state is State.QUEUED}
        assert self.payload_bytes == sum(request.frames_bytes for request in live)
        assert self._of_client == Counter(request.peer for request in live)
        assert len(self.deadlines) == sum(request.deadline_at is not None for request in live)
        assert self._rooms == {(r.submit.bootstrap_room, role): r.rid for r in live for role in rooms_of(r.submit)}

    def _enter(self, peer: Any) -> None:
        self._of_client[peer] = self._of_client.get(peer, 0) + 1

    def _leave(self, peer: Any) -> None:
        left = self._of_client[peer] - 1
        if left:
            self._of_client[peer] = left
        else:
            del self._of_client[peer]


def rooms_of(submit: Submit) -> tuple[Role, ...]:
    """For which roles `submit` claims its room: a prefill and a decode leg of one room are one pair."""
    return () if submit.bootstrap_room is None or submit.leg == "unified" else ROLES[submit.leg]
