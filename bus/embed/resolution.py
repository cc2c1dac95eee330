"""The look-up of a room's prefill rank, for the decode rank that needs the KV cache: the rank is told by the caller,
computed, or asked of the broker, in that order. Pure.

`ResolverCore`'s methods return actions: `Send("broker", message)` for the bootstrap DEALER, and `Resolved`, exactly one
for every room that an asker wants. The wants of one turn leave in one query at `flush`. A query is repeated when the
broker does not react or restarts. The core also keeps each want's deadline, so a dead broker never delays a want
without end. Askers (the decode ranks of a process) may want the same room, each in its own way and for its own time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from bus.actions import Send
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_ROOM,
    MAX_ROOMS_PER_MESSAGE,
    Answer,
    Beacon,
    FoundBy,
    InstanceInfo,
    Location,
    MemberInfo,
    Message,
    Query,
    Topology,
    TopologyQuery,
    Unwatch,
)

BROKER = "broker"  # the peer of every Send
ASK_AGAIN_S = 1.0  # a query that got no reaction is sent again
WATCH_AGAIN_S = 5.0  # a watch that the broker confirmed is asked for again, should it be lost after all
STALE_AGAIN_S = 0.05  # the broker knows an older attempt only
TOPOLOGY_AGAIN_S = 0.25  # while what is needed is not there
TOPOLOGY_OLD_S = 2.0  # older than this, it is fetched again before it is used
FETCH_WAIT_S = 1.0  # the longest wait of a want for that
SILENT_S = 3.0  # after this silence of the broker the last topology is used at once
MAX_WATCH_S = 3600.0
QUERY_ID = 1  # always the same, so that asking again moves a watch and never doubles it


@dataclass(frozen=True, slots=True)
class Resolved:
    """The end of one want: the location and attempt of the room, or None and the `code` that says why."""

    room: int
    at: Location | None  # where; None when it failed
    attempt: int
    code: Code
    found_by: FoundBy  # from the bus, or computed from the room
    asker: Hashable = 0  # whose want it was
    age_s: float = field(default=0.0, compare=False)  # of the topology, where told or computed; 2 s unless it is silent


Action: TypeAlias = Send | Resolved


class _Want:
    __slots__ = ("ask_at", "asked", "asker", "attempt", "deadline", "dp_rank", "instance", "max_age_s", "room", "since")

    def __init__(
        self,
        room: int,
        asker: Hashable,
        attempt: int,
        instance: str,
        dp_rank: int | None,
        deadline: float,
        max_age_s: float,
        now: float,
    ) -> None:
        self.room = room
        self.asker = asker
        self.attempt = attempt
        self.instance = instance
        self.dp_rank = dp_rank
        self.deadline = deadline
        self.max_age_s = max_age_s
        self.since = now
        self.ask_at = now
        self.asked = False  # the broker may watch it


class _Known:
    """One instance's topology as it was fetched last."""

    __slots__ = ("at", "info", "ranks")

    def __init__(self, info: InstanceInfo, at: float) -> None:
        self.info = info
        self.at = at
        self.ranks: dict[int, MemberInfo] = {rank.dp_rank: rank for rank in info.ranks}


class ResolverCore:
    """The look-up of rooms without sockets: it returns Send actions, and one `Resolved` for each want. `now` is seconds
    on a monotonic clock.

    It computes the rank where an instance follows bootstrap rooms; else it asks the broker, for all rooms of a turn in
    one query. It handles lost answers, a restarted broker and a restarted rank by itself. Beyond `max_wants` open wants
    a new one is lost at once (`too_many`).
    """

    def __init__(self, *, max_wants: int = 65_536) -> None:
        self.broker_epoch = 0  # 0: no beacon has come yet
        self.broker_seen_at: float | None = None
        ends = ("told", "computed", "asked", "lost", "cancelled")  # with `pending`, as many as were `wanted`
        self.counts = dict.fromkeys(("wanted", *ends, "queries", "topology_queries", "stale", "old"), 0)
        self._max_wants = max_wants
        self._wants: dict[int, list[_Want]] = {}  # by room, at most one of an asker
        self._pending = 0
        self._new: list[_Want] = []  # to be asked at the next flush
        self._unwatch: list[int] = []
        self._known: dict[str, _Known] = {}
        self._listed_at = float("-inf")  # when all instances were fetched
        self._reacted_at = float("-inf")  # when the broker's last message came
        self._missing: set[str] = set()  # instances whose topology is wanted; "" is all of them
        self._fetching: dict[str, tuple[int, float]] = {}  # -> id and time of the latest query
        self._next_id = QUERY_ID + 1

    @property
    def pending(self) -> int:
        """The number of wants without an end so far."""
        return self._pending

    @property
    def idle(self) -> bool:
        """True while `tick` has nothing to wait for."""
        return not (self._wants or self._unwatch or self._new)

    # --- from the scheduler -------------------------------------------------------------------------------------

    def want(
        self,
        room: int,
        now: float,
        *,
        deadline_s: float,
        attempt: int = 0,
        prefill_instance: str = "",
        dp_rank: int | None = None,
        asker: Hashable = 0,
        max_age_s: float = math.inf,
    ) -> list[Action]:
        """Find the prefill rank of `room`, with this `attempt` or a newer one (0: any), within `deadline_s` seconds (an
        hour at most). A room that the same asker wants again replaces its earlier want. What is no room is lost at once
        (`bad_room`).

        `dp_rank`: the caller knows the rank of `prefill_instance` (of the only instance, if that is empty), and only
        its address is looked up. `max_age_s`: while the broker is silent, use no topology that is older; by default,
        use the last one.
        """
        self.counts["wanted"] += 1
        if not isinstance(room, int) or not 0 <= room <= MAX_ROOM:
            return [self._lost(room, asker, "bad_room")]
        old = self._of(room, asker)
        if old is None and self._pending >= self._max_wants:
            return [self._lost(room, asker, "too_many")]
        deadline = now + min(MAX_WATCH_S, max(0.0, deadline_s))  # in this order, not-a-number is 0
        want = _Want(room, asker, attempt, prefill_instance, dp_rank, deadline, max_age_s, now)
        self._wants.setdefault(room, []).append(want)
        self._pending += 1
        if old is not None:
            want.asked, old.asked = old.asked, False
            self._cancel(old)
        if resolved := self._locate(want, now):
            return [self._settle(want, resolved)]
        if dp_rank is None:
            self._new.append(want)
        return []

    def cancel(self, room: int, asker: Hashable = 0) -> None:
        """Cancel the asker's want of `room`; it gets no `Resolved`."""
        want = self._of(room, asker)
        if want is not None:
            self._cancel(want)

    def abandon(self, code: Code) -> list[Action]:
        """End every want with `code` and return their results, because no later one will be collected."""
        return [self._settle(want, Resolved(want.room, None, 0, code, "", want.asker)) for want in self._all()]

    def forget(self, instance: str) -> None:
        """Drop the cached topology of `instance` after it proved wrong (a restarted rank). It is fetched again before
        use."""
        self._known.pop(instance, None)

    # --- from the broker ----------------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handle a message from the broker (an answer, a topology or a beacon) and return the wants that it ends; any
        other message is ignored."""
        if isinstance(message, Answer):
            self._reacted_at = now
            return self._on_answer(message, now)
        if isinstance(message, Topology):
            self._reacted_at = now
            return self._on_topology(message, now)
        if isinstance(message, Beacon):
            self.broker_seen_at = self._reacted_at = now
            if message.epoch != self.broker_epoch:
                self.broker_epoch = message.epoch
                self._fetching.clear()
                for want in self._all():
                    if want.asked:
                        want.ask_at = now
        return []

    def _on_answer(self, answer: Answer, now: float) -> list[Action]:
        out: list[Action] = []
        for room in answer.pending:
            asking = self._asking(room)
            for want in asking:
                want.ask_at = now + WATCH_AGAIN_S
            if not asking:  # an earlier answer ended the want, and the repeated query began another watch
                self._unwatch.append(room)
        for found in answer.found:
            for room in found.rooms:
                for want in self._asking(room):
                    want.asked = False  # an answer ends the watch
                    if found.attempt < want.attempt:
                        self.counts["stale"] += 1
                        want.ask_at = now + STALE_AGAIN_S
                    else:
                        resolved = Resolved(room, found.at, found.attempt, "ok", "asked", want.asker)
                        out.append(self._settle(want, resolved))
        for lost in answer.lost:
            for want in self._asking(lost.room):
                want.asked = False
                early = lost.code == "unknown_room" and now < want.deadline
                if early or 0 < lost.attempt < want.attempt:
                    want.ask_at = now + STALE_AGAIN_S
                else:
                    out.append(self._settle(want, Resolved(lost.room, None, 0, lost.code, "", want.asker)))
        return out

    def _on_topology(self, topology: Topology, now: float) -> list[Action]:
        name = next((name for name, (number, _) in self._fetching.items() if number == topology.id), None)
        if name is None:
            return []
        self._missing.discard(name)
        if name:
            self._known.pop(name, None)
        else:
            self._known.clear()
            self._listed_at = now
        for info in topology.instances:
            self._known[info.instance] = _Known(info, now)
        located = ((want, self._locate(want, now)) for want in self._all())
        return [self._settle(want, resolved) for want, resolved in located if resolved]

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """End the wants past their deadline (`unknown_room`), repeat the queries that are due, and `flush`. Call it
        every few tens of milliseconds while not `idle`."""
        out: list[Action] = []
        for want in self._all():
            if now >= want.deadline:
                out.append(self._settle(want, Resolved(want.room, None, 0, "unknown_room", "", want.asker)))
            elif now >= want.ask_at:
                if resolved := self._locate(want, now):
                    out.append(self._settle(want, resolved))
                elif want.dp_rank is None:
                    self._new.append(want)
        self._prune(now)
        return out + self.flush(now)

    def flush(self, now: float) -> list[Action]:
        """Return the messages that this turn collected: topology queries, rooms no longer watched, one query of all
        rooms wanted. Call it at the end of each turn of the loop."""
        out: list[Action] = []
        if not (self._missing or self._unwatch or self._new):  # asked each turn of a node's loop
            return out
        for name in sorted(self._missing):
            _, fetched_at = self._fetching.get(name, (0, float("-inf")))
            if now - fetched_at >= TOPOLOGY_AGAIN_S:
                self._fetching[name] = (self._next_id, now)
                out.append(Send(BROKER, TopologyQuery(self._next_id, name)))
                self._next_id += 1
                self.counts["topology_queries"] += 1
        unwatch, self._unwatch = self._unwatch, []
        for some in _chunks(unwatch):
            out.append(Send(BROKER, Unwatch(tuple(some))))
        new, self._new = self._new, []
        asking = dict.fromkeys(want.room for want in new if want in self._wants.get(want.room, ()))
        for some in _chunks(list(asking)):
            wants = [want for room in some for want in self._asking(room)]
            watch_s = max(0.001, min(MAX_WATCH_S, max(want.deadline for want in wants) - now))
            for want in wants:
                want.asked = True
                want.ask_at = now + ASK_AGAIN_S
            out.append(Send(BROKER, Query(QUERY_ID, tuple(some), watch_s)))
            self.counts["queries"] += 1
        return out

    # --- inside ---------------------------------------------------------------------------------------------------

    def _locate(self, want: _Want, now: float) -> Resolved | None:
        """Return the result from the topology alone: the rank that was told, or `room % dp_size`. None: unknown, or to
        be asked."""
        known = self._instance(want)
        if known is None:
            several = not want.instance and want.dp_rank is not None and len(self._prefill_names()) > 1
            if several:
                return Resolved(want.room, None, 0, "bad_request", "", want.asker)
            self._missing.add(want.instance)
            return None
        info = known.info
        age_s = now - (known.at if want.instance else min(known.at, self._listed_at))
        old = age_s >= TOPOLOGY_OLD_S
        if old:
            self._missing.add(want.instance)
            if age_s > want.max_age_s or not self._silent(want, now):
                return None
        if want.dp_rank is None and not info.follow_bootstrap_room:
            return None
        dp_rank = want.room % info.dp_size if want.dp_rank is None else want.dp_rank
        if not 0 <= dp_rank < info.dp_size:
            return Resolved(want.room, None, 0, "bad_rank", "", want.asker)
        rank = known.ranks.get(dp_rank)
        if rank is None or rank.state == "gone" or not rank.endpoint:
            self._missing.add(info.instance)
            return None
        at = Location(info.instance, dp_rank, rank.epoch, rank.endpoint)
        by: FoundBy = "computed" if want.dp_rank is None else "told"
        self.counts["old"] += old
        return Resolved(want.room, at, max(1, want.attempt), "ok", by, want.asker, age_s)

    def _silent(self, want: _Want, now: float) -> bool:
        """Return true if the broker does not answer for longer than `want` can wait."""
        return now - self._reacted_at >= SILENT_S or now - want.since >= FETCH_WAIT_S

    def _instance(self, want: _Want) -> _Known | None:
        if want.instance:
            return self._known.get(want.instance)
        names = self._prefill_names()
        return self._known[names[0]] if len(names) == 1 else None

    def _prefill_names(self) -> list[str]:
        return [name for name, known in self._known.items() if known.info.role == "prefill"]

    def _of(self, room: int, asker: Hashable) -> _Want | None:
        return next((want for want in self._wants.get(room, ()) if want.asker == asker), None)

    def _all(self) -> list[_Want]:
        return [want for wants in self._wants.values() for want in wants]

    def _asking(self, room: int) -> list[_Want]:
        """Return the wants whose room the broker must find, because no rank was told."""
        return [want for want in self._wants.get(room, ()) if want.dp_rank is None]

    def _prune(self, now: float) -> None:
        """Drop cached instances that are neither wanted nor known: clients may invent names."""
        of_use = self._known.keys() | {want.instance for want in self._all()}
        self._missing &= of_use
        self._fetching = {
            name: (number, at)
            for name, (number, at) in self._fetching.items()
            if name in of_use or now - at < TOPOLOGY_AGAIN_S
        }

    def _settle(self, want: _Want, resolved: Resolved) -> Resolved:
        self._leave(want)
        self.counts[resolved.found_by or "lost"] += 1
        return resolved

    def _cancel(self, want: _Want) -> None:
        self._leave(want)
        self.counts["cancelled"] += 1

    def _leave(self, want: _Want) -> None:
        """Remove an ended want, and the watch of its room unless another asker waits for it."""
        others = self._wants[want.room]
        others.remove(want)
        if not others:
            del self._wants[want.room]
        self._pending -= 1
        if want.asked and not any(other.asked for other in others):
            self._unwatch.append(want.room)

    def _lost(self, room: int, asker: Hashable, code: Code) -> Resolved:
        self.counts["lost"] += 1
        return Resolved(room, None, 0, code, "", asker)


def _chunks(rooms: list[int]) -> list[list[int]]:
    return [rooms[at : at + MAX_ROOMS_PER_MESSAGE] for at in range(0, len(rooms), MAX_ROOMS_PER_MESSAGE)]
