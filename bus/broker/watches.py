"""The watches: which peer (a decode rank's connection) waits for which room that is not registered yet, until when.
This module knows no rooms' owners and no sockets.

A watch is `(peer, query id, room)`; the same query again moves its deadline. Adding, taking and removing are O(1), and
no ended watch is kept: a watch ends at its deadline or up to GRAIN_S later.
"""

from __future__ import annotations

from collections.abc import Iterable

from bus.timer_slots import TimerSlots
from bus.wire.messages import Room

GRAIN_S = 0.025
Peer = bytes
Watch = tuple[Peer, int, Room]  # peer, query id, room


class Watches:
    """The open watches. The broker's core adds them for a query, and takes them when the room is registered or the
    deadline passes. `in` tells if a room is watched."""

    def __init__(self, *, max_per_peer: int = 65_536, max_total: int = 262_144) -> None:
        self._max_per_peer = max_per_peer
        self._max_total = max_total
        self._by_room: dict[Room, dict[tuple[Peer, int], float]] = {}  # -> the deadline
        self._by_peer: dict[Peer, set[tuple[int, Room]]] = {}
        self._due: TimerSlots[Watch] = TimerSlots(step_s=GRAIN_S)
        self.size = 0

    def __contains__(self, room: Room) -> bool:
        return room in self._by_room

    def fits(self, peer: Peer, count: int) -> bool:
        """Return true if `peer` may watch `count` more rooms."""
        held = len(self._by_peer.get(peer, ()))
        return held + count <= self._max_per_peer and self.size + count <= self._max_total

    def add(self, peer: Peer, query: int, room: Room, deadline: float) -> None:
        """Watch `room` until `deadline` (seconds on the clock of `due`). Limits are not checked here: ask `fits`
        before."""
        watchers = self._by_room.setdefault(room, {})
        old = watchers.get((peer, query))
        if old is not None:
            self._due.remove((peer, query, room), old)
        else:
            self._by_peer.setdefault(peer, set()).add((query, room))
            self.size += 1
        watchers[peer, query] = deadline
        self._due.add((peer, query, room), deadline)

    def take(self, room: Room) -> list[tuple[Peer, int]]:
        """End all watches of `room` and return the (peer, query id) of each."""
        watchers = self._by_room.pop(room, None)
        if watchers is None:
            return []
        for (peer, query), deadline in watchers.items():
            self._due.remove((peer, query, room), deadline)
            self._leave(peer, query, room)
        return list(watchers)

    def drop(self, peer: Peer, rooms: Iterable[Room]) -> int:
        """End the watches of `peer` for `rooms`, under all query ids. Return how many ended."""
        dropped = 0
        for room in rooms:
            for who, query in [key for key in self._by_room.get(room, ()) if key[0] == peer]:
                self._end(who, query, room)
                dropped += 1
        return dropped

    def forget(self, peer: Peer) -> int:
        """End all watches of a peer that is gone. Return how many ended."""
        held = list(self._by_peer.get(peer, ()))
        for query, room in held:
            self._end(peer, query, room)
        return len(held)

    def due(self, now: float, budget: int = 4096) -> list[Watch]:
        """End the watches whose deadline has passed, `budget` of them at most, and return them; the rest comes with the
        next call."""
        ended = self._due.take(now, budget)
        for watch in ended:
            self._end(*watch)
        return ended

    def _end(self, peer: Peer, query: int, room: Room) -> None:
        watchers = self._by_room[room]
        self._due.remove((peer, query, room), watchers.pop((peer, query)))
        if not watchers:
            del self._by_room[room]
        self._leave(peer, query, room)

    def _leave(self, peer: Peer, query: int, room: Room) -> None:
        held = self._by_peer[peer]
        held.discard((query, room))
        if not held:
            del self._by_peer[peer]
        self.size -= 1
