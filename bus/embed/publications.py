"""The publications of one rank: registrations of rooms (which requests it prefills), load, membership and restatements.
Pure; it must not touch sockets.

`PublisherCore`'s methods return publications to send, in order. Registrations and drops of one turn leave together at
`flush`, with the load piggybacked. `tick` (every few tens of milliseconds) flushes, refreshes rooms before their TTL
ends, repeats the membership, and restates the live rooms when the broker asks or is new. A rank without work and rooms
publishes less often, and states its interval (`Member.interval_s`); each change is still published at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from operator import index
from typing import Any

from msgspec import structs

from bus.actions import Publish
from bus.defaults import IDLE_INTERVALS, REPORT_INTERVAL_S, ROOM_TTL_S
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_ATTEMPT,
    MAX_ROOM,
    Beacon,
    Conflict,
    Drop,
    Endpoint,
    Load,
    LoadReport,
    Member,
    Message,
    NodeState,
    Registration,
    Resync,
    Role,
    Rooms,
)

CHUNK = 1024  # registrations in a message: decoding and applying one takes the broker about a millisecond
CHUNKS_PER_FLUSH = 4  # of a restatement or refresh, so that a turn stays short
REPORT_GAP_S = 0.05  # the shortest time between two loads, unless the caller sets another
RESTATE_GAP_S = 0.05
IDLE_AFTER_INTERVALS = 4  # a rank is idle when nothing has changed for so many
LIVES = 10  # a room that is never dropped is refreshed for this many TTLs, then forgotten


class _Live:
    """A room that is registered and not dropped; the times are those of the first and the latest registration."""

    __slots__ = ("attempt", "refreshed_at", "since")

    def __init__(self, attempt: int, now: float) -> None:
        self.attempt = attempt
        self.since = now
        self.refreshed_at = now


class PublisherCore:
    """The publications of one rank; times are in seconds on a monotonic clock. Arguments are not checked here, except
    rooms and attempts: `bus.embed.checked` and `Publisher` do. `on_conflict` is called for each room that another rank
    claims too."""

    def __init__(
        self,
        *,
        instance: str,
        dp_rank: int,
        epoch: int,
        role: Role,
        model: str,
        dp_size: int,
        endpoint: Endpoint,
        interval_s: float = REPORT_INTERVAL_S,
        report_gap_s: float = REPORT_GAP_S,
        room_ttl_s: float = ROOM_TTL_S,
        max_rooms: int = 100_000,
        state: NodeState = "starting",
        follow_bootstrap_room: bool = False,
        on_conflict: Callable[[Conflict], None] | None = None,
        started_us: int = 0,
    ) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.epoch = epoch
        self.started_us = started_us
        self.role: Role = role
        self.model = model
        self.dp_size = dp_size
        self.endpoint = endpoint
        self.interval_s = interval_s
        self.report_gap_s = report_gap_s
        self.room_ttl_s = room_ttl_s
        self.state: NodeState = state
        self.follow_bootstrap_room = follow_bootstrap_room
        self.broker_epoch = 0  # 0: no beacon has come yet
        self.conflicts: deque[Conflict] = deque(maxlen=1024)
        self.counts = dict.fromkeys(("registered", "dropped", "refreshed", "restated", "evicted", "invalid"), 0)
        self._on_conflict = on_conflict
        self._max_rooms = max_rooms
        self._live: OrderedDict[int, _Live] = OrderedDict()  # the longest unrefreshed first
        self._registering: dict[int, int] = {}  # room -> attempt; a room is in at most one of these two
        self._dropping: dict[int, Drop] = {}
        self._restating: deque[int] = deque()  # rooms of a restatement under way
        self._restate_wanted = False
        self._restated_at: float | None = None
        self._load: Load | None = None
        self._load_seq = 0
        self._load_sent_seq = 0
        self._load_changed = False
        self._load_sent_at: float | None = None
        self._sent_work = False  # the load that was sent last has some
        self._member_sent_at: float | None = None
        self._promised_s = interval_s  # by then the next membership comes
        self._changed_at = 0.0  # anything but the time
        self._seqs = {"load": 0, "rooms": 0, "member": 0}

    @property
    def load_seq(self) -> int:
        """The `seq` of the newest load: no load was published with a higher one. 0 before the first `report`."""
        return self._load_seq

    @property
    def live_rooms(self) -> int:
        """The number of rooms that are registered and not dropped."""
        return len(self._live)

    # --- from the scheduler -------------------------------------------------------------------------------------

    def register(self, room: Any, attempt: Any, now: float) -> list[Publish]:
        """Register `room`: it is or will be prefilled here, as `attempt` (1 or more; a request that is dispatched again
        has a higher one). The registration leaves at the next flush and is refreshed until `drop`, for LIVES TTLs at
        most; a lost conflict, or more than `max_rooms`, ends it earlier. A room or attempt out of range is counted as
        `invalid`; an attempt older than the registered one changes nothing."""
        if not _valid(room, attempt):
            self.counts["invalid"] += 1
            return []
        live = self._live.get(room)
        if live is not None and live.attempt > attempt:
            return []
        self._live[room] = _Live(attempt, now)
        self._live.move_to_end(room)
        if len(self._live) > self._max_rooms:
            evicted, _ = self._live.popitem(last=False)
            self._registering.pop(evicted, None)
            self.counts["evicted"] += 1
        self._dropping.pop(room, None)
        self._registering[room] = attempt
        self.counts["registered"] += 1
        return self._overflow(now)

    def drop(self, room: Any, attempt: Any, code: Code, now: float) -> list[Publish]:
        """End the registration of `room` (this attempt and older ones): `ok`, or the code that says why no KV cache
        will come, which ranks that wait for the room get. It leaves at the next flush."""
        if not _valid(room, attempt):
            self.counts["invalid"] += 1
            return []
        live = self._live.get(room)
        if live is not None and live.attempt > attempt:
            return []
        self._live.pop(room, None)
        self._registering.pop(room, None)
        self._dropping[room] = Drop(room, attempt, code)
        self._changed_at = now
        self.counts["dropped"] += 1
        return self._overflow(now)

    def report(self, load: Load, now: float) -> list[Publish]:
        """Replace the load that is published; `seq` is set here. It leaves with the next message, or alone at a flush:
        after `report_gap_s` if it differs from the last one, at once if the last one had work and this has none, else
        after `interval_s`."""
        old = self._load
        self._load_seq += 1
        self._load = structs.replace(load, seq=self._load_seq)
        if old is None or structs.replace(load, seq=old.seq) != old:
            self._load_changed = True
            self._changed_at = now
        return []

    def set_state(self, state: NodeState, now: float) -> list[Publish]:
        """Publish the rank's state, if it has changed, at once. `gone` is the last state, after which the rank has no
        rooms."""
        if state == self.state:
            return []
        out = self.flush(now)
        self.state = state
        self._changed_at = now
        if state == "gone":
            self._live.clear()
            self._restating.clear()
        return [*out, self._member(now)]

    def set_follow(self, flag: bool, now: float) -> list[Publish]:
        """Set and publish whether `bootstrap_room % dp_size` gives the rank of every room of this instance."""
        if flag == self.follow_bootstrap_room:
            return []
        self.follow_bootstrap_room = flag
        return [self._member(now)]

    def goodbye(self, now: float) -> list[Publish]:
        """Publish that the rank leaves (state `gone`). It has no rooms from here on."""
        return self.set_state("gone", now)

    # --- from the broker ----------------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> list[Publish]:
        """Handle a message from the broker: a new broker's beacon or a resync makes the rank publish all its rooms
        again, a conflict is recorded. Any other message, or one for another rank, is ignored."""
        if isinstance(message, Beacon):
            if message.epoch != self.broker_epoch:
                self.broker_epoch = message.epoch
                return self._restate(now)
        elif isinstance(message, Resync) and self._is_me(message):
            return self._restate(now)
        elif isinstance(message, Conflict) and self._is_me(message):
            live = self._live.get(message.room)
            if not message.kept and live is not None and live.attempt == message.attempt:
                del self._live[message.room]
                self._registering.pop(message.room, None)
            self.conflicts.append(message)
            if self._on_conflict is not None:
                self._on_conflict(message)
        return []

    def _is_me(self, message: Resync | Conflict) -> bool:
        return (message.instance, message.dp_rank, message.epoch) == (self.instance, self.dp_rank, self.epoch)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Publish]:
        """Return everything that is due at `now`: restatement, refreshes, membership, and `flush`."""
        out: list[Publish] = []
        if self._restate_wanted:
            out += self._restate(now)
        self._refresh(now)
        if self._registering or self._dropping:
            out += self.flush(now)
        if self._member_sent_at is None or now - self._member_sent_at >= min(self._promised_s, self._interval_s(now)):
            out.append(self._member(now))  # with the load: after it, no report is due
        return out + self.flush(now)

    def due_s(self, now: float) -> float:
        """Return the seconds until `tick` has anything to do; 0: now."""
        if self._registering or self._dropping or self._restating or self._member_sent_at is None:
            return 0.0
        due = self._member_sent_at + min(self._promised_s, self._interval_s(now))
        if self._restate_wanted and self._restated_at is not None:
            due = min(due, self._restated_at + RESTATE_GAP_S)
        if self._load_changed and self._load_sent_at is not None:
            due = min(due, self._load_sent_at + self._gap_s())
        if self._live:
            due = min(due, next(iter(self._live.values())).refreshed_at + self.room_ttl_s / 2)
        return max(0.0, due - now)

    def flush(self, now: float) -> list[Publish]:
        """Return what this turn collected: messages with registrations and drops (and the load), or the load alone if
        it is due. Call it at the end of each turn of the loop."""
        out = self._restatement(now)
        while self._registering or self._dropping:
            out.append(self._rooms_message(now))
        if not out and self._load is not None and self._load_is_due(now):
            self._seqs["load"] += 1
            load = self._take_load(now)
            assert load is not None
            report = LoadReport(self.instance, self.dp_rank, self.epoch, self._seqs["load"], load)
            out.append(Publish(report))
        return out

    def _load_is_due(self, now: float) -> bool:
        if self._load_seq == self._load_sent_seq:
            return False
        if self._load_sent_at is None:
            return True
        age_s = now - self._load_sent_at
        return age_s >= (self._gap_s() if self._load_changed else self._interval_s(now))

    def _gap_s(self) -> float:
        """Return the shortest time between the last load and one that differs, in seconds. That all work is done is
        published at once: a client that has its answer may ask again soon, and this rank caches what it would need."""
        assert self._load is not None
        return 0.0 if self._sent_work and not _has_work(self._load) else self.report_gap_s

    def _interval_s(self, now: float) -> float:
        """Return how often this rank publishes although nothing changes, in seconds."""
        load = self._load
        working = bool(self._live) or (load is not None and _has_work(load))
        if working or now - self._changed_at < IDLE_AFTER_INTERVALS * self.interval_s:
            return self.interval_s
        return IDLE_INTERVALS * self.interval_s

    def _take_load(self, now: float) -> Load | None:
        """Return the newest load if one may go out. The same load again is a report too: an idle scheduler has no newer
        one."""
        if self._load is not None:
            if self._load_seq == self._load_sent_seq:
                self._load_seq += 1
                self._load = structs.replace(self._load, seq=self._load_seq)
            self._load_sent_at = now
            self._load_sent_seq = self._load_seq
            self._load_changed = False
            self._sent_work = _has_work(self._load)
        return self._load

    # --- messages -------------------------------------------------------------------------------------------------

    def _overflow(self, now: float) -> list[Publish]:
        """Flush within the turn if the turn has collected very much."""
        return [self._rooms_message(now)] if len(self._registering) + len(self._dropping) >= 2 * CHUNK else []

    def _rooms_message(self, now: float) -> Publish:
        register = tuple(Registration(room, self._registering.pop(room)) for room in list(self._registering)[:CHUNK])
        drop = tuple(self._dropping.pop(room) for room in list(self._dropping)[:CHUNK])
        return self._rooms(register, drop, now)

    def _rooms(
        self, register: tuple[Registration, ...], drop: tuple[Drop, ...], now: float, snapshot: bool = False
    ) -> Publish:
        self._seqs["rooms"] += 1
        message = Rooms(
            self.instance, self.dp_rank, self.epoch, self._seqs["rooms"], self._take_load(now), self.endpoint,
            register, drop, snapshot,
        )  # fmt: skip
        return Publish(message)

    def _member(self, now: float) -> Publish:
        self._seqs["member"] += 1
        self._member_sent_at = now
        self._promised_s = self._interval_s(now)
        member = Member(
            self.instance, self.dp_rank, self.epoch, self._seqs["member"], self._take_load(now), self.role, self.model,
            self.dp_size, self.state, self.endpoint, self.follow_bootstrap_room, self._seqs["rooms"],
            self._promised_s, self.started_us,
        )  # fmt: skip
        return Publish(member)

    # --- live rooms -----------------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        """Register again the rooms whose TTL is half over, and forget those that were never dropped."""
        for _ in range(CHUNK * CHUNKS_PER_FLUSH):
            room, live = next(iter(self._live.items()), (0, None))
            if live is None or now - live.refreshed_at < self.room_ttl_s / 2:
                return
            if now - live.since >= LIVES * self.room_ttl_s:
                del self._live[room]
                self.counts["evicted"] += 1
                continue
            live.refreshed_at = now
            self._live.move_to_end(room)
            self._registering[room] = live.attempt
            self.counts["refreshed"] += 1

    def _restate(self, now: float) -> list[Publish]:
        """Publish the membership, then all live rooms, over several flushes; at least one message, so seqs match."""
        if self._restated_at is not None and now - self._restated_at < RESTATE_GAP_S:
            self._restate_wanted = True
            return []
        self._restate_wanted = False
        self._restated_at = now
        self._restating = deque(self._live)
        self.counts["restated"] += 1
        return [self._member(now), self._snapshot(now), *self._restatement(now)]

    def _restatement(self, now: float) -> list[Publish]:
        return [self._snapshot(now) for _ in range(CHUNKS_PER_FLUSH) if self._restating]

    def _snapshot(self, now: float) -> Publish:
        register: list[Registration] = []
        while self._restating and len(register) < CHUNK:
            room = self._restating.popleft()
            live = self._live.get(room)
            if live is not None:
                live.refreshed_at = now
                self._live.move_to_end(room)
                self._registering.pop(room, None)
                register.append(Registration(room, live.attempt))
        return self._rooms(tuple(register), (), now, snapshot=True)


def integer(value: object) -> int | None:
    """Return `value` as an int, from the integer type of any library; None if it is no integer."""
    try:
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        return None


def _has_work(load: Load) -> bool:
    return load.running + load.waiting > 0


def _valid(room: object, attempt: object) -> bool:
    """Return true if both numbers fit the protocol. One invalid number would make the broker drop the whole message."""
    if not isinstance(room, int) or not isinstance(attempt, int):
        return False
    return 0 <= room <= MAX_ROOM and 1 <= attempt <= MAX_ATTEMPT
