"""An SGLang decode rank's side: where rooms are prefilled, which rooms are lost, and which prefill ranks have died. A
room is SGLang's number of a request, by which its decode rank finds its prefill rank.

There is one `PrefillBus` for each bus that requests name, made at its first use. It is called on the scheduler's
thread; only SGLang's own query blocks, and it is used only where the bus cannot answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from bus.wire.codes import Code
from bus.wire.messages import Beacon, LoadReport, Location, Member, MemberKey, Message, Rooms
from pdbus.sglang.rank import BROKER_LOST_S, fits

Query = Callable[[list[int]], dict[str, int]]  # SGLang's own query over HTTP: rooms to ranks, the rooms as text
REMEMBERED = 65_536  # number of rooms whose prefill rank is kept
PAUSE_S = 1.0  # a bus silent for this long was down, and publications of that time are lost
FORGET_S = 3600.0
OTHERS_S = 1.0  # between queries for rooms that may not be on the bus
UNHEARD_S = 15.0  # a room unknown on the bus for this long is asked for elsewhere too
REASONS: dict[str, str] = {
    "unknown_room": "no prefill rank has registered it within {room_s:g} s",
    "prefill_failed": "its prefill failed",
}


class Finder(Protocol):
    """The part of `bus.Resolver` that is used here: `want` asks for rooms in the background, for `deadline_s` at most;
    `poll` and `lost` return what was found or given up since their last call; `silent_s` is the seconds since the
    broker's last sign of life."""

    @property
    def silent_s(self) -> float: ...
    def want(self, *rooms: int, deadline_s: float) -> None: ...
    def poll(self) -> dict[int, Location]: ...
    def lost(self) -> dict[int, Code]: ...


class RankLiveness:
    """Finds the ranks of a bus that have been silent for `lost_s` while the bus was alive. Time in which the bus itself
    was down does not count."""

    def __init__(self, lost_s: float) -> None:
        self._lost_s = lost_s
        self._last_at: dict[MemberKey, float] = {}
        self._left: set[MemberKey] = set()  # ranks that left in order, because something of ours failed there
        self._bus_at = float("-inf")
        self._bus_since = float("-inf")

    def on_message(self, message: Message, now: float) -> None:
        """Note any message of the bus: a sign of life of the bus, and of the rank that sent it. `now` is in seconds."""
        if not isinstance(message, Beacon | Member | LoadReport | Rooms):
            return
        if now - self._bus_at > PAUSE_S:
            self._bus_since = now
        self._bus_at = now
        if isinstance(message, Beacon):
            return
        key = (message.instance, message.dp_rank)
        self._last_at[key] = now
        if isinstance(message, Member):
            (self._left.add if message.state == "gone" else self._left.discard)(key)

    @property
    def left(self) -> bool:
        """True if some rank has left the bus in order and is not back."""
        return bool(self._left)

    def expect(self, key: MemberKey, now: float) -> None:
        """Expect publications of a rank where a room was found, so that it counts as lost even if none ever comes. Any
        thread may call this."""
        self._last_at.setdefault(key, now)

    def lost(self) -> frozenset[MemberKey]:
        """Return the ranks silent for more than `lost_s`, without those that left in order. Ranks are forgotten after
        an hour of silence."""
        last = list(self._last_at.items())
        for key, at in last:
            if self._bus_at - at > FORGET_S:
                self._last_at.pop(key, None)
                self._left.discard(key)
        silent = (key for key, at in last if self._bus_at - max(at, self._bus_since) > self._lost_s)
        return frozenset(silent) - self._left


class PrefillBus:
    """The rooms of one bus. A room that no rank has registered for `room_s` seconds is lost. `shared` says that the bus
    is not a prefill server's own, so some servers may not be on it; their rooms are asked for over HTTP."""

    def __init__(
        self,
        finder: Finder,
        lives: RankLiveness,
        *,
        room_s: float,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finder = finder
        self._lives = lives
        self._room_s = room_s
        self._shared = shared
        self._clock = clock
        self._wanted: dict[int, float] = {}  # wanted rooms, and since when
        self._found: dict[int, Location] = {}
        self._lost: dict[int, Code] = {}
        self._began = self._others_at = clock()
        self._where: OrderedDict[int, MemberKey] = OrderedDict()

    @property
    def broker_alive(self) -> bool:
        """True if the broker has given a sign of life within BROKER_LOST_S."""
        return self._finder.silent_s < BROKER_LOST_S

    @property
    def asked(self) -> bool:
        """True if rooms are asked for on this bus and not over HTTP: the broker is alive, or still has time to
        appear."""
        return self.broker_alive or self._clock() - self._began < BROKER_LOST_S

    def find(self, rooms: Sequence[int], query: Query) -> dict[str, int]:
        """Return the ranks of those `rooms` that are known by now, the room as text. `rooms` must be all rooms that
        wait here, at each call; others are forgotten. It waits only for `query`, SGLang's own question over HTTP, for
        rooms that the bus cannot answer."""
        odd = [room for room in rooms if not fits(room)]
        mine = [room for room in rooms if fits(room)]
        fresh = [room for room in mine if room not in self._wanted]
        if fresh:
            self._wanted.update(dict.fromkeys(fresh, self._clock()))
            self._finder.want(*fresh, deadline_s=self._room_s)
        self._collect(mine)
        ranks = {str(room): self._found[room].dp_rank for room in mine if room in self._found}
        rest = [room for room in mine if room not in self._found]
        if self.asked:
            rest = self._of_others(rest)
        if odd or rest:
            ranks.update(query([*rest, *odd]))
        for room in [room for room in mine if str(room) in ranks]:
            if (at := self._found.get(room)) is not None:
                self._where[room] = key = (at.instance, at.dp_rank)
                self._where.move_to_end(room)
                self._lives.expect(key, self._clock())
            self._settle(room)
        while len(self._where) > REMEMBERED:
            self._where.popitem(last=False)
        return ranks

    def lost(self) -> dict[int, str]:
        """Return the rooms given up since the last call, with the reason in words. Empty while the broker is silent;
        `find` then asks for them again."""
        lost, self._lost = self._lost, {}
        for room in lost:
            self._settle(room)
        if not self.broker_alive:
            return {}
        return {
            room: f"bootstrap_room {room}: {REASONS.get(code, code).format(room_s=self._room_s)}"
            for room, code in lost.items()
            if code != "too_many"
        }

    def where(self, room: int) -> MemberKey | None:
        """Return the prefill rank where `room` was found; None: not found, or long ago."""
        return self._where.get(room)

    def _collect(self, rooms: Iterable[int]) -> None:
        found, lost = self._finder.poll(), self._finder.lost()
        waiting = set(rooms)
        for room in self._wanted.keys() - waiting:  # their requests have ended
            self._settle(room)
        self._found.update({room: at for room, at in found.items() if room in waiting})
        self._lost.update({room: code for room, code in lost.items() if room in waiting})

    def _settle(self, room: int) -> None:
        self._wanted.pop(room, None)
        self._found.pop(room, None)
        self._lost.pop(room, None)

    def _of_others(self, rest: list[int]) -> list[int]:
        """Return the rooms to ask SGLang's server for, although this bus is alive: on a shared bus, or one that a rank
        has left, all unknown rooms; otherwise those unknown for long. At most every OTHERS_S."""
        now = self._clock()
        if now - self._others_at < OTHERS_S:
            return []
        if not self._shared and not self._lives.left:
            rest = [room for room in rest if now - self._wanted.get(room, now) > UNHEARD_S]
        if rest:
            self._others_at = now
        return rest
