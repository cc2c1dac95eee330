"""The members of the bus, as the broker knows them: instances (deployments of one model), their ranks, and of each rank
its epochs and its lease. Pure; it knows no rooms or sockets.

An epoch is a random number that names one start of a rank. Of two starts the later has the rank's place, by the rule of
controllers: where both say when they began, the one that began later, while it lives; else the one that was heard of
last. The others are remembered for a while, so that a message of theirs does not bring them back. A lease is the time
for which a rank that publishes nothing counts as alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from bus.broker.rooms import Owner
from bus.defaults import SILENT_INTERVALS, bounded_interval_s
from bus.wire.messages import InstanceInfo, Member, MemberInfo, MemberKey, Role
from bus.wire.starts import is_later

FORGET_S = 60.0  # a rank that is gone, or silent for this long past its lease, leaves the table
MAX_INSTANCES = 1024
MAX_RANKS = 16_384
_EPOCHS_REMEMBERED = 8


class KnownRank:
    """The record of one rank, for its present epoch. Times are in seconds on the broker's clock."""

    __slots__ = (
        "dp_rank",
        "epoch",
        "instance",
        "last_seen_at",
        "lease_s",
        "member",
        "owner",
        "restate_after_s",
        "restate_at",
        "retired",
        "rooms_seq",
    )  # fmt: skip

    def __init__(self, instance: str, dp_rank: int, epoch: int, now: float) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.epoch = epoch
        self.retired: deque[int] = deque(maxlen=_EPOCHS_REMEMBERED)
        self.last_seen_at = now
        self.lease_s = SILENT_INTERVALS  # until the rank states its interval
        self.member: Member | None = None  # None: it has published, but not introduced itself
        self.owner: Owner | None = None
        self.rooms_seq = 0  # of its last Rooms message
        self.restate_at: float | None = None  # when to ask it to restate its rooms
        self.restate_after_s = 0.0

    def is_gone(self) -> bool:
        """Return true if the rank said goodbye."""
        return self.member is not None and self.member.state == "gone"

    def is_silent(self, now: float) -> bool:
        """Return true if nothing was published by the rank for longer than its lease."""
        return now - self.last_seen_at > self.lease_s

    def keeps_place(self, member: Member, now: float) -> bool:
        """Return true if this start lives, and began after the one that `member` is of."""
        lives = not self.is_gone() and not self.is_silent(now)
        return lives and self.member is not None and is_later(self.member, member)

    def is_ready(self, now: float) -> bool:
        """Return true if the rank takes requests: its last stated state is `ready`, and it is not silent."""
        return self.member is not None and self.member.state == "ready" and not self.is_silent(now)


class Instance:
    """The ranks of one instance, which agree on role, model and dp_size."""

    __slots__ = ("ranks", "shape")

    def __init__(self) -> None:
        self.shape: tuple[Role, str, int] | None = None  # role, model, dp_size
        self.ranks: dict[int, KnownRank] = {}


class Membership:
    """The table of all ranks. The broker's core calls it for each publication; iterating gives every rank. `counts` has
    the refusals, by reason."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(
            ("stale_epoch", "dp_size_mismatch", "role_mismatch", "model_mismatch", "bad_rank", "too_many_ranks"), 0
        )
        self.size = 0
        self._instances: dict[str, Instance] = {}

    def __iter__(self) -> Iterator[KnownRank]:
        for instance in self._instances.values():
            yield from instance.ranks.values()

    def get(self, key: MemberKey) -> KnownRank | None:
        """Return the record of a rank; None if it is unknown."""
        instance = self._instances.get(key[0])
        return instance.ranks.get(key[1]) if instance else None

    # --- signs of life ----------------------------------------------------------------------------------------------

    def seen(self, name: str, dp_rank: int, epoch: int, now: float) -> KnownRank | None:
        """Record that a rank published something and return its record, made if it is new. A new epoch resets the
        record. None if another start has the rank's place or the table is full; this is counted."""
        instance = self._instances.get(name)
        rank = instance.ranks.get(dp_rank) if instance else None
        if rank is None:
            if self.size >= MAX_RANKS or (instance is None and len(self._instances) >= MAX_INSTANCES):
                self.counts["too_many_ranks"] += 1
                return None
            rank = KnownRank(name, dp_rank, epoch, now)
            self._instances.setdefault(name, Instance()).ranks[dp_rank] = rank
            self.size += 1
        elif rank.epoch != epoch:
            if epoch in rank.retired:
                self.counts["stale_epoch"] += 1
                return None
            rank.retired.append(rank.epoch)
            rank.epoch = epoch
            rank.member = None
            rank.rooms_seq = 0
            rank.restate_at = None
        rank.last_seen_at = now
        return rank

    def refusal(self, member: Member, now: float) -> str:
        """Return why `member` is invalid or contradicts the living ranks of its instance (a key of `counts`); an empty
        string if neither. Nothing changes."""
        if member.dp_rank >= member.dp_size:
            return "bad_rank"
        instance = self._instances.get(member.instance)
        if instance is None or instance.shape is None:
            return ""
        role, model, dp_size = instance.shape
        reason = (
            "role_mismatch" if member.role != role
            else "model_mismatch" if member.model != model
            else "dp_size_mismatch" if member.dp_size != dp_size
            else ""
        )  # fmt: skip
        others = (rank for rank in instance.ranks.values() if rank.dp_rank != member.dp_rank)
        if reason and not any(rank.member and not rank.is_gone() and not rank.is_silent(now) for rank in others):
            return ""  # no other rank is left: the instance was deployed again
        return reason

    def introduce(self, member: Member, now: float) -> KnownRank | None:
        """Record what a rank states of itself and return its record. None if it contradicts its instance, or as for
        `seen`; the reason is counted."""
        if reason := self.refusal(member, now):
            self.counts[reason] += 1
            return None
        self._order(member, now)
        rank = self.seen(member.instance, member.dp_rank, member.epoch, now)
        if rank is None:
            return None
        rank.member = member
        rank.lease_s = SILENT_INTERVALS * bounded_interval_s(member.interval_s)
        instance = self._instances[member.instance]
        shape = (member.role, member.model, member.dp_size)
        if instance.shape not in (None, shape):
            for other in instance.ranks.values():
                if other is not rank:
                    other.member = None  # of the earlier deployment
        instance.shape = shape
        return rank

    def _order(self, member: Member, now: float) -> None:
        """Decide, before a member of another start than the present one is recorded, which of the two has the place."""
        rank = self.get((member.instance, member.dp_rank))
        if rank is None or rank.epoch == member.epoch:
            return
        kept = rank.keeps_place(member, now)
        if member.epoch not in rank.retired:
            if kept:
                rank.retired.append(member.epoch)
        elif not kept and rank.member is not None and member.started_us and rank.member.started_us:
            rank.retired.remove(member.epoch)  # it began later, or lives while the later one does not

    def forget(self, now: float) -> list[KnownRank]:
        """Remove the ranks that have been silent for FORGET_S beyond their lease, and return them. The caller retires
        their claims on rooms."""
        away = [rank for rank in self if now - rank.last_seen_at > rank.lease_s + FORGET_S]
        for rank in away:
            instance = self._instances[rank.instance]
            del instance.ranks[rank.dp_rank]
            self.size -= 1
            if not instance.ranks:
                del self._instances[rank.instance]
        return away

    # --- descriptions -------------------------------------------------------------------------------------------------

    def infos(self, name: str, now: float) -> tuple[InstanceInfo, ...]:
        """Return the description of one instance (nothing if it is unknown), or of all instances for an empty name."""
        names = [name] if name else sorted(self._instances)
        known = ((each, self._instances.get(each)) for each in names)
        return tuple(_info(each, instance, now) for each, instance in known if instance and instance.shape)


def _info(name: str, instance: Instance, now: float) -> InstanceInfo:
    assert instance.shape is not None
    role, model, dp_size = instance.shape
    known = sorted((rank for rank in instance.ranks.values() if rank.member), key=lambda rank: rank.dp_rank)
    present = [rank.member for rank in known if rank.member and not rank.is_gone()]
    return InstanceInfo(
        instance=name,
        role=role,
        model=model,
        dp_size=dp_size,
        ready=len(known) == dp_size and all(rank.is_ready(now) for rank in known),
        follow_bootstrap_room=bool(present) and all(member.follow_bootstrap_room for member in present),
        ranks=tuple(
            MemberInfo(
                dp_rank=rank.dp_rank,
                epoch=rank.epoch,
                state=rank.member.state,
                endpoint=rank.member.endpoint,
                age_s=max(0.0, now - rank.last_seen_at),
            )
            for rank in known
            if rank.member
        ),
    )
