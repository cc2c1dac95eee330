"""Who waits for which room, until when. Owns watches and their deadlines; must not know rooms' owners or sockets.

A watch is `(peer, query id, room)`; asking again moves its deadline. Deadlines are kept in slots of GRAIN_S, so
adding, taking and removing are O(1) and nothing stale is kept: a watch ends at its deadline or up to GRAIN_S later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from bus.wire.messages import Room

GRAIN_S = 0.025
Peer = bytes
Watch = tuple[Peer, int, Room]  # peer, query id, room


class Watches:
    def __init__(self, *, max_per_peer: int = 65_536, max_total: int = 262_144) -> None:
        self._max_per_peer = max_per_peer
        self._max_total = max_total
        self._by_room: dict[Room, dict[tuple[Peer, int], int]] = {}  # -> the slot of the deadline
        self._by_peer: dict[Peer, set[tuple[int, Room]]] = {}
        self._slots: dict[int, dict[Watch, None]] = {}
        self._order: list[int] = []  # heap of slot numbers
        self.size = 0

    def __contains__(self, room: Room) -> bool:
        return room in self._by_room

    def fits(self, peer: Peer, count: int) -> bool:
        """Whether `peer` may watch `count` rooms more."""
        held = len(self._by_peer.get(peer, ()))
        return held + count <= self._max_per_peer and self.size + count <= self._max_total

    def add(self, peer: Peer, query: int, room: Room, deadline: float) -> None:
        slot = math.ceil(deadline / GRAIN_S)
        watchers = self._by_room.setdefault(room, {})
        old = watchers.get((peer, query))
        if old is not None:
            del self._slots[old][peer, query, room]
        else:
            self._by_peer.setdefault(peer, set()).add((query, room))
            self.size += 1
        watchers[peer, query] = slot
        if slot not in self._slots:
            self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        self._slots[slot][peer, query, room] = None

    def take(self, room: Room) -> list[tuple[Peer, int]]:
        """End all watches of `room`: the (peer, query id) of each."""
        watchers = self._by_room.pop(room, None)
        if watchers is None:
            return []
        for (peer, query), slot in watchers.items():
            del self._slots[slot][peer, query, room]
            self._leave(peer, query, room)
        return list(watchers)

    def drop(self, peer: Peer, rooms: Iterable[Room]) -> int:
        """`peer` no longer waits for `rooms`, under whichever query."""
        dropped = 0
        for room in rooms:
            for who, query in [key for key in self._by_room.get(room, ()) if key[0] == peer]:
                self._end(who, query, room)
                dropped += 1
        return dropped

    def forget(self, peer: Peer) -> int:
        """`peer` has gone, and with it all its watches."""
        held = list(self._by_peer.get(peer, ()))
        for query, room in held:
            self._end(peer, query, room)
        return len(held)

    def due(self, now: float, budget: int = 4096) -> list[Watch]:
        """End the watches whose deadline has passed, `budget` at most."""
        ended: list[Watch] = []
        while self._order and self._order[0] * GRAIN_S <= now and len(ended) < budget:
            slot = self._slots[self._order[0]]
            for watch in list(slot)[: budget - len(ended)]:
                self._end(*watch)
                ended.append(watch)
            if not slot:
                del self._slots[heapq.heappop(self._order)]
        return ended

    def _end(self, peer: Peer, query: int, room: Room) -> None:
        watchers = self._by_room[room]
        del self._slots[watchers.pop((peer, query))][peer, query, room]
        if not watchers:
            del self._by_room[room]
        self._leave(peer, query, room)

    def _leave(self, peer: Peer, query: int, room: Room) -> None:
        held = self._by_peer[peer]
        held.discard((query, room))
        if not held:
            del self._by_peer[peer]
        self.size -= 1
