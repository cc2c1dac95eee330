"""The broker's pure core: from what ranks publish it keeps which rank prefills which room (the number that joins the
prefill and the decode leg of a request), and answers decode ranks that ask. It must not touch sockets or the clock.

`BrokerCore.handle(event, now) -> actions`. A publication counts only for the rank that its topic names. Registrations
are soft state, kept for a TTL. When the core sees a gap in a publisher's `seq`, or an unknown publisher, it asks for a
restatement of all its rooms (`resync`): first after RESTATE_FIRST_S, because a restatement is often on its way already,
then at growing intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from bus import defaults
from bus.actions import Note, Publish, Send
from bus.broker.events import Asked, Event, Published, Unreachable
from bus.broker.rooms import TAKEN, Owner, RoomTable
from bus.broker.topology import KnownRank, Membership
from bus.broker.watches import Peer, Watches
from bus.wire import topics
from bus.wire.messages import (
    MAX_ROOMS_PER_MESSAGE,
    Answer,
    Beacon,
    BrokerStatus,
    BrokerStatusQuery,
    Conflict,
    Found,
    Location,
    Lost,
    Member,
    Message,
    Query,
    Refused,
    Registration,
    Resync,
    Rooms,
    Topology,
    TopologyQuery,
    Unwatch,
)

RESTATE_FIRST_S = 0.02
RESTATE_AGAIN_S = 0.1
RESTATE_MAX_S = 2.0
CONFLICTS_SENT_MAX = 64  # per publication; the rest are counted
NOTES_REMEMBERED = 1024

Action: TypeAlias = Send | Publish | Note


@dataclass(frozen=True)
class BrokerLimits:
    """The core's settings, in seconds and counts. A registration or watch beyond a limit is refused and counted."""

    room_ttl_s: float = defaults.ROOM_TTL_S
    beacon_s: float = defaults.BEACON_S
    max_rooms: int = defaults.MAX_ROOMS
    max_rooms_per_publisher: int = 200_000
    max_watches: int = 262_144
    max_watches_per_peer: int = 65_536
    metrics: str = ""  # where others find this broker's


class BrokerCore:
    """The broker's rooms, watches (a rank waits for a room that is not known yet) and ranks. Its shell makes one at
    each start, with that start's random `epoch`, and calls it from one thread. `now` is seconds on a monotonic clock.
    `dropped` returns the shell's counts, of messages and connections that it did not take, for the status.
    """

    def __init__(
        self, limits: BrokerLimits, epoch: int, now: float, dropped: Callable[[], dict[str, int]] = dict
    ) -> None:
        self.limits = limits
        self.epoch = epoch
        self.rooms = RoomTable(
            limits.room_ttl_s,
            max_rooms=limits.max_rooms,
            max_rooms_per_publisher=limits.max_rooms_per_publisher,
            now=now,
        )
        self.watches = Watches(max_per_peer=limits.max_watches_per_peer, max_total=limits.max_watches)
        self.ranks = Membership()
        self.counts: Counter[str] = Counter()
        self._dropped = dropped
        self._started_at = now
        self._beacon_at = now
        self._beacon_seq = 0
        self._restating: dict[tuple[str, int], KnownRank] = {}  # ranks with a `restate_at`
        self._noted: set[tuple[str, ...]] = set()

    def reconfigure(self, beacon_s: float, max_rooms: int) -> None:
        """Apply new settings from now on. Rooms that are held stay, even beyond a lower `max_rooms`."""
        self.limits = replace(self.limits, beacon_s=beacon_s, max_rooms=max_rooms)
        self.rooms.max_rooms = max_rooms

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in `event` and return the actions that it calls for, to be carried out in order. It raises on nothing
        that a peer can cause."""
        if isinstance(event, Published):
            return self._on_publication(event.topic, event.message, now)
        if isinstance(event, Asked):
            return self._on_request(event.peer, event.message, now)
        if isinstance(event, Unreachable):
            self.counts["watches_dropped"] += self.watches.forget(event.peer)
            return []
        return self._on_tick(now)

    @property
    def needs_ticks(self) -> bool:
        """True while a tick may end something (a room, a watch, a restatement to ask for); if false, one tick for each
        beacon is enough."""
        return bool(self.rooms.size or self.watches.size or self._restating)

    @property
    def behind(self) -> bool:
        """True if the sweep of ended rooms is not complete, so that the next tick should come soon."""
        return self.rooms.behind

    def tally(self) -> dict[str, int]:
        """Return the numbers for status and metrics, by name. `rooms_alive`, `rooms_held`, `watches` and `ranks` are
        gauges; all others count since the start."""
        rooms = {f"rooms_{name}": value for name, value in self.rooms.counts.items()}
        refused = {f"members_{name}": value for name, value in self.ranks.counts.items()}
        return {
            "rooms_alive": self.rooms.alive,
            "rooms_held": self.rooms.size,
            "watches": self.watches.size,
            "ranks": self.ranks.size,
            **rooms,
            **refused,
            **self.counts,
        }

    # --- publications -----------------------------------------------------------------------------------------------

    def _on_publication(self, topic: bytes, message: Message, now: float) -> list[Action]:
        if not isinstance(message, Rooms | Member):
            return []
        if topics.of(message) != topic:
            self.counts["topic_mismatches"] += 1
            key = ("topic", message.instance, str(message.dp_rank))
            return self._note_once(key, "publication.rejected", claimed=message.instance, topic=repr(topic[:100]))
        return self._on_rooms(message, now) if isinstance(message, Rooms) else self._on_member(message, now)

    def _on_member(self, member: Member, now: float) -> list[Action]:
        refused = self.ranks.refusal(member, now)
        known = self.ranks.get((member.instance, member.dp_rank))
        was = known.member.state if known and known.member and known.epoch == member.epoch else None
        rank = self.ranks.introduce(member, now)
        if rank is None:
            key = ("member", member.instance, str(member.dp_rank), refused)
            reason = refused or "old epoch, or too many ranks"
            return self._note_once(key, "member.refused", member=f"{member.instance}/{member.dp_rank}", reason=reason)
        owner = self._owner(rank, member.endpoint)
        if member.state == "gone":
            self.rooms.retire(owner)
            self._want_restatement(rank, None)
        elif member.rooms_seq != rank.rooms_seq:
            rank.rooms_seq = member.rooms_seq
            self._want_restatement(rank, now)
        if was == member.state:
            return []
        fields = {"instance": rank.instance, "dp_rank": rank.dp_rank, "state": member.state, "epoch": rank.epoch}
        return [Note("member.changed", fields=fields)]

    def _on_rooms(self, message: Rooms, now: float) -> list[Action]:
        rank = self.ranks.seen(message.instance, message.dp_rank, message.epoch, now)
        if rank is None or rank.is_gone():
            self.counts["rooms_ignored"] += 1
            return []
        contiguous = message.seq == rank.rooms_seq + 1
        if message.seq <= rank.rooms_seq:
            self.counts["rooms_repeated"] += 1
            return []
        rank.rooms_seq = message.seq
        if contiguous and message.snapshot:
            self._want_restatement(rank, None)
        elif not contiguous or rank.member is None:
            self.counts["gaps"] += not contiguous
            self._want_restatement(rank, now)
        owner = self._owner(rank, message.endpoint)
        return self._apply(message, owner, now)

    def _apply(self, message: Rooms, owner: Owner, now: float) -> list[Action]:
        actions: list[Action] = []
        found: dict[tuple[Peer, int], dict[int, list[int]]] = {}  # rooms by attempt
        lost: dict[tuple[Peer, int], list[Lost]] = {}
        rooms, watches = self.rooms, self.watches
        for claim in message.register:
            outcome = rooms.register(owner, claim.room, claim.attempt, now)
            if outcome in TAKEN:
                if claim.room in watches:
                    for watcher in watches.take(claim.room):
                        found.setdefault(watcher, {}).setdefault(claim.attempt, []).append(claim.room)
                        self.counts["watches_answered"] += 1
            elif outcome == "conflict" and len(actions) < 2 * CONFLICTS_SENT_MAX:
                actions += self._conflict(claim, owner, now)
        for drop in message.drop:
            if drop.code == "ok":
                rooms.drop(owner, drop.room, drop.attempt)
            elif rooms.fail(owner, drop.room, drop.attempt, drop.code, now) in TAKEN and drop.room in watches:
                failure = Lost(drop.room, drop.code, drop.attempt)
                for watcher in watches.take(drop.room):
                    lost.setdefault(watcher, []).append(failure)
                    self.counts["watches_answered"] += 1
        for (peer, query), by_attempt in found.items():
            known = tuple(Found(owner.location, attempt, tuple(some)) for attempt, some in by_attempt.items())
            actions.append(Send(peer, Answer(query, found=known)))
        for (peer, query), losses in lost.items():
            actions.append(Send(peer, Answer(query, lost=tuple(losses))))
        return actions

    def _conflict(self, claim: Registration, later: Owner, now: float) -> Iterable[Action]:
        kept = self.rooms.find(claim.room, now)
        assert kept is not None
        for addressed, other, stands in ((later, kept.owner, False), (kept.owner, later, True)):
            at = addressed.location
            conflict = Conflict(at.instance, at.dp_rank, at.epoch, claim.room, claim.attempt, other.location, stands)
            yield Publish(conflict)

    def _owner(self, rank: KnownRank, endpoint: str) -> Owner:
        """Return the owner of the rank's claims in its present epoch. The owner of an earlier epoch is retired."""
        owner = rank.owner
        if owner is None or owner.location.epoch != rank.epoch:
            if owner is not None:
                self.rooms.retire(owner)
            owner = rank.owner = Owner(Location(rank.instance, rank.dp_rank, rank.epoch, endpoint))
        elif owner.location.endpoint != endpoint:
            owner.location = Location(rank.instance, rank.dp_rank, rank.epoch, endpoint)
        owner.holds = owner.live
        return owner

    def _want_restatement(self, rank: KnownRank, now: float | None) -> None:
        """Plan a request to `rank` to restate its rooms; None cancels it."""
        key = (rank.instance, rank.dp_rank)
        if now is None:
            rank.restate_at = None
            self._restating.pop(key, None)
        elif rank.restate_at is None:
            rank.restate_at = now + RESTATE_FIRST_S
            rank.restate_after_s = RESTATE_AGAIN_S
            self._restating[key] = rank

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_request(self, peer: Peer, message: Message, now: float) -> list[Action]:
        if isinstance(message, Query):
            return [Send(peer, self._answer(peer, message, now))]
        if isinstance(message, Unwatch):
            self.counts["watches_dropped"] += self.watches.drop(peer, message.rooms)
            return []
        if isinstance(message, TopologyQuery):
            self.counts["topology_queries"] += 1
            infos = self.ranks.infos(message.instance, now)
            return [Send(peer, Topology(message.id, self.epoch, infos))]
        assert isinstance(message, BrokerStatusQuery), message
        counts = self.tally() | self._dropped()
        return [Send(peer, BrokerStatus(message.id, self.epoch, max(0.0, now - self._started_at), counts))]

    def _answer(self, peer: Peer, query: Query, now: float) -> Answer | Refused:
        self.counts["queries"] += 1
        self.counts["query_rooms"] += len(query.rooms)
        held, lost, missing = self.rooms.sort(dict.fromkeys(query.rooms), now)
        if not query.watch_s:
            missing.clear()
        elif not self.watches.fits(peer, len(missing)):
            self.counts["watches_refused"] += len(missing)
            return Refused("too_many", f"{len(missing)} watches more than allowed; ask for fewer rooms", query.id)
        before = self.watches.size
        for room in missing:
            self.watches.add(peer, query.id, room, now + query.watch_s)
        self.counts["watches_added"] += self.watches.size - before
        known = tuple(Found(owner.location, attempt, tuple(rooms)) for (owner, attempt), rooms in held.items())
        return Answer(query.id, known, tuple(missing), tuple(lost))

    # --- time -------------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Action]:
        self.rooms.expire(now)
        actions: list[Action] = []
        overdue: dict[tuple[Peer, int], list[Lost]] = {}
        for peer, query, room in self.watches.due(now, MAX_ROOMS_PER_MESSAGE):
            overdue.setdefault((peer, query), []).append(Lost(room, "unknown_room"))
        for (peer, query), losses in overdue.items():
            self.counts["watches_overdue"] += len(losses)
            actions.append(Send(peer, Answer(query, lost=tuple(losses))))
        for rank in list(self._restating.values()):
            actions += self._ask_to_restate(rank, now)
        if now >= self._beacon_at:
            self._beacon_at = max(self._beacon_at + self.limits.beacon_s, now)
            self._beacon_seq += 1
            actions.append(Publish(Beacon(self.epoch, self._beacon_seq, self.limits.beacon_s, self.limits.metrics)))
            self._check_leases(now)
        return actions

    def _ask_to_restate(self, rank: KnownRank, now: float) -> list[Action]:
        if rank.restate_at is None or rank.is_silent(now):  # a new epoch starts without the old one's gaps
            self._want_restatement(rank, None)
            return []
        if now < rank.restate_at:
            return []
        rank.restate_at = now + rank.restate_after_s
        rank.restate_after_s = min(RESTATE_MAX_S, 2 * rank.restate_after_s)
        self.counts["resyncs"] += 1
        return [Publish(Resync(rank.instance, rank.dp_rank, rank.epoch))]

    def _check_leases(self, now: float) -> None:
        for rank in self.ranks:
            if rank.owner is not None and rank.is_silent(now):
                rank.owner.holds = False
        for rank in self.ranks.forget(now):
            self._want_restatement(rank, None)
            if rank.owner is not None:
                self.rooms.retire(rank.owner)

    def _note_once(self, key: tuple[str, ...], event: str, **fields: object) -> list[Action]:
        if key in self._noted or len(self._noted) >= NOTES_REMEMBERED:
            return []
        self._noted.add(key)
        return [Note(event, "warning", fields=fields)]
