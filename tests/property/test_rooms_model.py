"""Rooms and watches against a plain model, under any interleaving of claims, drops, restarts, queries and time.

The model keeps every claim with the time it was made and knows nothing of sweeps, shards or slots. What must hold:
a room is found for exactly its TTL; no watch is lost, answered twice, answered early or late.
"""

from __future__ import annotations

from dataclasses import dataclass

import laws
from broker_world import Rank
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bus.actions import Send
from bus.broker.core import BrokerCore, BrokerLimits
from bus.broker.events import Asked, Event, Tick, Unreachable
from bus.broker.watches import GRAIN_S
from bus.wire.messages import Answer, Drop, Query, Unwatch

TTL_S = 2.0
ROOMS = st.integers(0, 5)
ATTEMPTS = st.integers(1, 3)
RANKS = st.integers(0, 1)
PEERS = st.sampled_from([b"a", b"b"])
STEPS_S = st.sampled_from([0.0, 0.5, 1.0, 1.999, TTL_S])


@dataclass
class Made:
    """A claim in the model."""

    rank: int
    epoch: int
    attempt: int
    code: str
    at: float


class RoomsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = laws.watched(BrokerCore(BrokerLimits(room_ttl_s=TTL_S, beacon_s=1e9), 99, 0.0))
        self.ranks = [Rank(0, 1), Rank(1, 2)]
        self.claims: dict[int, Made] = {}
        self.watching: dict[tuple[bytes, int, int], float] = {}  # (peer, id, room) -> deadline
        self.next_epoch = 10

    # --- the model --------------------------------------------------------------------------------------------------

    def model_find(self, room: int) -> Made | None:
        made = self.claims.get(room)
        if made is None or made.at + TTL_S <= self.now or self.ranks[made.rank].epoch != made.epoch:
            return None
        return made

    def model_claim(self, rank: int, room: int, attempt: int, code: str) -> bool:
        old = self.model_find(room)
        mine = old is not None and old.rank == rank
        if old is not None:
            if attempt < old.attempt:
                return False
            if attempt == old.attempt and not mine and old.code == "ok":
                return False
        self.claims[room] = Made(rank, self.ranks[rank].epoch, attempt, code, self.now)
        return True

    # --- what every answer must satisfy -----------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Send]:
        return [each for each in self.core.handle(event, self.now) if isinstance(each, Send)]

    def settle(self, sends: list[Send], expected: dict[tuple[bytes, int, int], str]) -> None:
        """The pushes are these and no others, each to a watch that was open."""
        got: dict[tuple[bytes, int, int], str] = {}
        for send in sends:
            assert isinstance(send.message, Answer)
            assert not send.message.pending
            for room, code in [(room, "ok") for each in send.message.found for room in each.rooms] + [
                (each.room, each.code) for each in send.message.lost
            ]:
                key = (send.peer, send.message.id, room)
                assert key not in got, "answered twice"
                got[key] = code
        assert got == expected
        for key in got:
            del self.watching[key]

    def watchers(self, room: int, code: str) -> dict[tuple[bytes, int, int], str]:
        return {key: code for key in self.watching if key[2] == room}

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(step_s=STEPS_S)
    def broker_is_busy(self, step_s: float) -> None:
        """Time passes before the next tick: what has ended must not show even so."""
        self.now += step_s

    @rule(step_s=STEPS_S)
    def time_passes(self, step_s: float) -> None:
        self.now += step_s
        sends = self.handle(Tick())
        overdue = {key for key, deadline in self.watching.items() if deadline <= self.now}
        certain = {key for key, deadline in self.watching.items() if deadline + GRAIN_S <= self.now}
        got = {(s.peer, s.message.id, lost.room) for s in sends for lost in s.message.lost}  # type: ignore[attr-defined]
        assert certain <= got <= overdue
        self.settle(sends, dict.fromkeys(got, "unknown_room"))

    @rule(rank=RANKS, rooms=st.lists(ROOMS, min_size=1, max_size=4, unique=True), attempt=ATTEMPTS)
    def register(self, rank: int, rooms: list[int], attempt: int) -> None:
        expected: dict[tuple[bytes, int, int], str] = {}
        for room in rooms:
            if self.model_claim(rank, room, attempt, "ok"):
                expected |= self.watchers(room, "ok")
        self.settle(self.handle(self.ranks[rank].rooms(*rooms, attempt=attempt)), expected)

    @rule(rank=RANKS, room=ROOMS, attempt=ATTEMPTS, code=st.sampled_from(["ok", "prefill_failed"]))
    def drop(self, rank: int, room: int, attempt: int, code: str) -> None:
        expected: dict[tuple[bytes, int, int], str] = {}
        if code == "ok":
            made = self.model_find(room)
            if made is not None and made.rank == rank and made.attempt <= attempt:
                del self.claims[room]
        elif self.model_claim(rank, room, attempt, code):
            expected = self.watchers(room, code)
        self.settle(self.handle(self.ranks[rank].rooms(drop=(Drop(room, attempt, code),))), expected)  # type: ignore[arg-type]

    @rule(rank=RANKS)
    def restart(self, rank: int) -> None:
        self.next_epoch += 1
        self.ranks[rank] = Rank(rank, self.next_epoch)
        self.settle(self.handle(self.ranks[rank].member(interval_s=60.0)), {})

    @rule(peer=PEERS, id=st.integers(1, 2), rooms=st.lists(ROOMS, min_size=1, max_size=4), watch_s=STEPS_S)
    def query(self, peer: bytes, id: int, rooms: list[int], watch_s: float) -> None:
        (send,) = self.handle(Asked(peer, Query(id, tuple(rooms), watch_s)))
        answer = send.message
        assert isinstance(answer, Answer)
        assert (send.peer, answer.id) == (peer, id)
        made = {room: self.model_find(room) for room in rooms}
        assert {
            room: (each.at.dp_rank, each.at.epoch, each.attempt) for each in answer.found for room in each.rooms
        } == {
            room: (claim.rank, claim.epoch, claim.attempt)
            for room, claim in made.items()
            if claim and claim.code == "ok"
        }
        assert {each.room: (each.code, each.attempt) for each in answer.lost} == {
            room: (claim.code, claim.attempt) for room, claim in made.items() if claim and claim.code != "ok"
        }
        missing = {room for room, claim in made.items() if claim is None}
        assert set(answer.pending) == (missing if watch_s else set())
        for room in answer.pending:
            self.watching[peer, id, room] = self.now + watch_s

    @rule(peer=PEERS, rooms=st.lists(ROOMS, min_size=1, max_size=3))
    def unwatch(self, peer: bytes, rooms: list[int]) -> None:
        assert self.handle(Asked(peer, Unwatch(tuple(rooms)))) == []
        self.watching = {key: at for key, at in self.watching.items() if key[0] != peer or key[2] not in rooms}

    @rule(peer=PEERS)
    def peer_vanishes(self, peer: bytes) -> None:
        assert self.handle(Unreachable(peer)) == []
        self.watching = {key: at for key, at in self.watching.items() if key[0] != peer}

    # --- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_kept_twice_or_forgotten(self) -> None:
        assert self.core.watches.size == len(self.watching)
        found = [room for room in range(6) if self.core.rooms.find(room, self.now)]
        assert found == [room for room in range(6) if self.model_find(room)]
        assert len(found) <= self.core.rooms.alive <= self.core.rooms.size <= 6

    def teardown(self) -> None:
        """In the end every watch is answered and all memory comes back."""
        for _ in range(20):
            self.time_passes(0.25)
        assert not self.watching
        assert self.core.rooms.size == self.core.rooms.alive == 0


RoomsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRooms = RoomsMachine.TestCase
