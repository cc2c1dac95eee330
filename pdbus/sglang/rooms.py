"""A decode rank's side: where rooms are prefilled, which of them are lost, and which prefill ranks have died.

One `PrefillBus` for each bus that requests name, made at its first use. Called on the scheduler's thread; nothing here
blocks but SGLang's own query, where that is the way that is left.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from bus.wire.codes import Code
from bus.wire.messages import Beacon, LoadReport, Location, Member, MemberKey, Message, Rooms
from pdbus.sglang.rank import BROKER_LOST_S, fits

Query = Callable[[list[int]], dict[str, int]]  # SGLang's: rooms to ranks by HTTP, the rooms as text
REMEMBERED = 65_536  # rooms whose prefill rank is known, the last ones
PAUSE_S = 1.0  # a bus that carried nothing for so long was away, and what the ranks said meanwhile is lost
FORGET_S = 3600.0
OTHERS_S = 1.0  # between queries for rooms that are not on the bus, perhaps
UNHEARD_S = 15.0  # a room that the bus does not know for so long is asked for elsewhere too
REASONS: dict[str, str] = {
    "unknown_room": "no prefill rank has registered it within {room_s:g} s",
    "prefill_failed": "its prefill failed",
}


class Finder(Protocol):
    """Of `bus.Resolver`, what is used here."""

    @property
    def silent_s(self) -> float: ...
    def want(self, *rooms: int, deadline_s: float) -> None: ...
    def poll(self) -> dict[int, Location]: ...
    def lost(self) -> dict[int, Code]: ...


class RankLiveness:
    """Which ranks of a bus have been silent for `lost_s` while others, or the broker, spoke. When the bus itself was
    away nobody is blamed for it."""

    def __init__(self, lost_s: float) -> None:
        self._lost_s = lost_s
        self._last_at: dict[MemberKey, float] = {}
        self._left: set[MemberKey] = set()  # they said goodbye, which is no death: something of ours failed there
        self._bus_at = float("-inf")
        self._bus_since = float("-inf")

    def on_message(self, message: Message, now: float) -> None:
        """Anything that the bus carried."""
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
        """Whether ranks are there that have left the bus."""
        return bool(self._left)

    def expect(self, key: MemberKey, now: float) -> None:
        """A room was found there: one that died before anything of it was heard is missed too. From any thread."""
        self._last_at.setdefault(key, now)

    def lost(self) -> frozenset[MemberKey]:
        """They are forgotten after an hour."""
        heard = list(self._last_at.items())
        for key, at in heard:
            if self._bus_at - at > FORGET_S:
                self._last_at.pop(key, None)
                self._left.discard(key)
        silent = (key for key, at in heard if self._bus_at - max(at, self._bus_since) > self._lost_s)
        return frozenset(silent) - self._left


class PrefillBus:
    """The rooms of one bus. `shared`: it is not a prefill server's own, so there may be servers that are not on it."""

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
        self._wanted: dict[int, float] = {}  # and since when
        self._found: dict[int, Location] = {}
        self._lost: dict[int, Code] = {}
        self._began = self._others_at = clock()
        self._where: OrderedDict[int, MemberKey] = OrderedDict()

    @property
    def broker_alive(self) -> bool:
        """Whether the broker is there."""
        return self._finder.silent_s < BROKER_LOST_S

    @property
    def asked(self) -> bool:
        """Whether rooms are asked for here, and not of SGLang's HTTP server: a broker wants a moment to be heard."""
        return self.broker_alive or self._clock() - self._began < BROKER_LOST_S

    def find(self, rooms: Sequence[int], query: Query) -> dict[str, int]:
        """Of `rooms` (all that wait here), those whose prefill rank is known by now."""
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
        """The rooms given up since the last call, and why. While no broker is heard none is: they are wanted anew."""
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
        """The prefill rank that `room` was found at."""
        return self._where.get(room)

    def _collect(self, rooms: Iterable[int]) -> None:
        found, lost = self._finder.poll(), self._finder.lost()
        waiting = set(rooms)
        for room in self._wanted.keys() - waiting:  # their requests are gone
            self._settle(room)
        self._found.update({room: at for room, at in found.items() if room in waiting})
        self._lost.update({room: code for room, code in lost.items() if room in waiting})

    def _settle(self, room: int) -> None:
        self._wanted.pop(room, None)
        self._found.pop(room, None)
        self._lost.pop(room, None)

    def _of_others(self, rest: list[int]) -> list[int]:
        """What SGLang's server is asked for now and then, though this bus is there: what is not known on one that is
        shared, or that a rank has left; else what has not been known for long."""
        now = self._clock()
        if now - self._others_at < OTHERS_S:
            return []
        if not self._shared and not self._lives.left:
            rest = [room for room in rest if now - self._wanted.get(room, now) > UNHEARD_S]
        if rest:
            self._others_at = now
        return rest
