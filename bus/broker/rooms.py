"""The rooms that the broker knows: which rank prefills which `bootstrap_room` (the number that joins a request's
prefill and decode legs), each for exactly its TTL.

This module owns claims, their precedence and their expiry. It knows no watches, members or sockets; `now` is an
argument, in seconds.

A claim counts until `registered + ttl_s` and no longer, because every look-up compares the times. A sweep frees the
memory. It goes round the shards once per `ttl_s / SWEEPS_PER_TTL` (less often if its budget is too small for that). So
it visits each claim at most SWEEPS_PER_TTL times (amortised O(1)), a refresh is one dict store, and the work of one
turn is bounded.

Shards also keep dict resizing short. The claims of one message share one object. The garbage collector tracks neither
claims nor shards, so a million rooms cause no collector pause and need little memory beyond the dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from bus.wire.codes import Code
from bus.wire.messages import Attempt, Location, Lost, Room

SHARDS = 2039  # prime, so that rooms made as k * dp_size + rank spread too
SWEEPS_PER_TTL = 16
EXPIRE_BUDGET = 512  # per call of `expire`, in claims looked at: under a millisecond, even out of cold memory
REMOVAL_COST = 8  # removing a claim takes as long as looking at about 8

Outcome = Literal["new", "refreshed", "replaced", "stale", "conflict", "full"]
TAKEN: frozenset[str] = frozenset({"new", "refreshed", "replaced"})


class Owner:
    """One start of one rank, as the owner of claims. `RoomTable.retire` ends it for good; `holds` is the core's: false
    while the rank is silent past its lease, true again at its next publication."""

    __slots__ = ("holds", "live", "location", "rooms")

    def __init__(self, location: Location) -> None:
        self.location = location
        self.rooms = 0  # claims in the table, swept or not
        self.live = True  # False: all its claims are void
        self.holds = True  # False (silent past its lease): another rank may take over its rooms


class Claim(Struct, frozen=True, gc=False):
    """A rank's claim to own the room, as `attempt` (a request that is dispatched again gets a higher one). A `code`
    other than ok states that no KV cache will come."""

    attempt: int
    owner: Owner
    expires_at: float
    code: Code


_NOBODY = Claim(0, Owner(Location("-", 0, 1, "")), 0.0, "ok")


class RoomTable:
    """The claims on rooms, one a room at most, as the broker's core holds them. `max_rooms` limits all,
    `max_rooms_per_publisher` those of one owner. `counts` has outcomes since the start."""

    def __init__(
        self, ttl_s: float, *, max_rooms: int = 2_000_000, max_rooms_per_publisher: int = 200_000, now: float = 0.0
    ) -> None:
        self.ttl_s = ttl_s
        self.size = 0  # claims held in memory
        self.alive = 0  # of those, not swept yet and of a live owner
        self.counts = dict.fromkeys(
            ("registered", "refreshed", "replaced", "dropped", "failed", "expired", "stale", "conflicts", "refused"), 0
        )
        self.max_rooms = max_rooms
        self._max_per_owner = max_rooms_per_publisher
        self._shards: list[dict[Room, Claim]] = [{} for _ in range(SHARDS)]
        self._last = _NOBODY
        self._cursor = 0
        self._owed = 0.0  # shards that the sweep is behind
        self._swept_at = now

    # --- look-up --------------------------------------------------------------------------------------------------

    def find(self, room: Room, now: float) -> Claim | None:
        """Return the claim on `room` that counts at `now`. Its `code` may be a failure. None: no claim, or one that has
        expired or whose owner was retired."""
        claim = self._shards[room % SHARDS].get(room)
        if claim is None or claim.expires_at <= now or not claim.owner.live:
            return None
        return claim

    def sort(
        self, rooms: Iterable[Room], now: float
    ) -> tuple[dict[tuple[Owner, Attempt], list[Room]], list[Lost], list[Room]]:
        """Sort `rooms` by their claims at `now` and return three groups: rooms held, by owner and attempt; rooms whose
        prefill failed, with the code; rooms without a claim."""
        held: dict[tuple[Owner, Attempt], list[Room]] = {}
        failed: list[Lost] = []
        missing: list[Room] = []
        shards = self._shards
        for room in rooms:
            claim = shards[room % SHARDS].get(room)
            if claim is None or claim.expires_at <= now or not claim.owner.live:
                missing.append(room)
            elif claim.code == "ok":
                author = (claim.owner, claim.attempt)
                if author in held:
                    held[author].append(room)
                else:
                    held[author] = [room]
            else:
                failed.append(Lost(room, claim.code, claim.attempt))
        return held, failed, missing

    # --- claims ---------------------------------------------------------------------------------------------------

    def register(self, owner: Owner, room: Room, attempt: int, now: float) -> Outcome:
        """Claim `room` for `owner` for `ttl_s` from `now`. The higher attempt wins; the same attempt of the same owner
        is a refresh. An outcome that is not in TAKEN changed nothing: `stale` (a higher attempt is known), `conflict`
        (the same attempt is that of another owner, which `holds` and has not failed it) or `full` (a limit)."""
        return self._claim(owner, room, attempt, now, "ok")

    def fail(self, owner: Owner, room: Room, attempt: int, code: Code, now: float) -> Outcome:
        """Record that no KV cache of `owner` will come for `room`, with the `code` that says why. Queries get this code
        at once; a claim of the same or a higher attempt replaces it. The outcome is as for `register`, but `stale`
        where that has `conflict`."""
        outcome = self._claim(owner, room, attempt, now, code)
        self.counts["failed"] += outcome in TAKEN
        return outcome

    def drop(self, owner: Owner, room: Room, attempt: int) -> bool:
        """Remove the owner's claim on `room`, if it is of this attempt or an older one. Return false if there is no
        such claim; a claim of another owner stays."""
        shard = self._shards[room % SHARDS]
        claim = shard.get(room)
        if claim is None or claim.owner is not owner or claim.attempt > attempt:
            return False
        self._remove(shard, room, claim)
        self.counts["dropped"] += 1
        return True

    def retire(self, owner: Owner) -> None:
        """Make all claims of `owner` void at once. The sweep frees their memory soon."""
        if owner.live:
            owner.live = owner.holds = False
            self.alive -= owner.rooms
            if owner.rooms:
                self._owed = float(SHARDS)

    def _claim(self, owner: Owner, room: Room, attempt: int, now: float, code: Code) -> Outcome:
        shard = self._shards[room % SHARDS]
        old = shard.get(room)
        if old is not None and (old.expires_at <= now or not old.owner.live):
            self._remove(shard, room, old)
            self.counts["expired"] += 1
            old = None
        outcome: Outcome = "new"
        if old is not None:
            mine = old.owner is owner
            if attempt < old.attempt:
                self.counts["stale"] += 1
                return "stale"
            if attempt == old.attempt and not mine and old.owner.holds and old.code == "ok":
                if code != "ok":  # a failure that another rank reports of this room
                    self.counts["stale"] += 1
                    return "stale"
                self.counts["conflicts"] += 1
                return "conflict"
            outcome = "refreshed" if mine and attempt == old.attempt else "replaced"
        if old is None or old.owner is not owner:
            if owner.rooms >= self._max_per_owner or (old is None and self.size >= self.max_rooms):
                self.counts["refused"] += 1
                return "full"
            if old is not None:
                self._remove(shard, room, old)
            owner.rooms += 1
            self.size += 1
            self.alive += 1
        shard[room] = self._shared(attempt, owner, now + self.ttl_s, code)
        self.counts["registered" if outcome == "new" else outcome] += 1
        return outcome

    def _shared(self, attempt: int, owner: Owner, expires_at: float, code: Code) -> Claim:
        last = self._last
        if last.owner is not owner or last.attempt != attempt or last.expires_at != expires_at or last.code != code:
            last = self._last = Claim(attempt, owner, expires_at, code)
        return last

    # --- expiry ---------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Return true if the sweep has more to do: `expire` ran out of budget, or an owner was retired since."""
        return self._owed >= 1.0

    def expire(self, now: float, budget: int = EXPIRE_BUDGET) -> int:
        """Free the memory of ended claims, looking at about `budget` claims. Return how many were removed. It is called
        with each tick."""
        elapsed_s = max(0.0, now - self._swept_at)
        self._swept_at = now
        self._owed = min(float(SHARDS), self._owed + elapsed_s * SHARDS * SWEEPS_PER_TTL / self.ttl_s)
        spent = removed = 0
        while self._owed >= 1.0 and spent < budget:
            self._owed -= 1.0
            at, self._cursor = self._cursor, (self._cursor + 1) % SHARDS
            shard = self._shards[at]
            spent += len(shard) + 1
            if not shard:
                continue
            ended = [item for item in shard.items() if item[1].expires_at <= now or not item[1].owner.live]
            for room, claim in ended:
                self._remove(shard, room, claim)
            removed += len(ended)
            spent += len(ended) * REMOVAL_COST
            if not shard:
                self._shards[at] = {}  # an emptied dict keeps its size
        self.counts["expired"] += removed
        return removed

    def _remove(self, shard: dict[Room, Claim], room: Room, claim: Claim) -> None:
        del shard[room]
        self.size -= 1
        claim.owner.rooms -= 1
        if claim.owner.live:
            self.alive -= 1
