"""Views of candidates: the ranks that a policy may choose from (ready, and with credit: their limits allow more
requests), and the least loaded of them.

This module owns the grouping of ranks by (role, model, instance) and the indexes; it must not change a load. A `Group`
answers in O(log n). A `Subset` narrows a group for a single request (ranks to avoid, prompts that only some ranks can
hold) and looks at each rank. A set of slots is an integer with the bits of its ranks (`RankLoad.slot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from bus.wire.messages import Role
from controller.load.index import NEVER, LeastIndex, SlotKeys
from controller.load.rank import RankLoad


class Metric(IntEnum):
    """The measure that a pick minimises. Among equals the rank picked least recently wins, so ties rotate."""

    TURN = 0  # nothing: plain rotation
    REQUESTS = 1  # the estimate of requests
    TOKENS = 2  # the estimate of tokens; ties by requests


def key_of(rank: RankLoad, metric: int, leaf: int = 0) -> int:
    """Return the value of `rank` in `metric` as one integer, for comparison: its last turn and `leaf` (16 bits) are the
    low bits."""
    if metric == 2:
        requests = rank.requests
        if requests > 0xFFFFFF:
            requests = 0xFFFFFF
        return (rank.tokens << 24 | requests) << 64 | (rank.last_turn << 16 | leaf)
    if metric == 1:
        return rank.requests << 64 | (rank.last_turn << 16 | leaf)
    return rank.last_turn << 16 | leaf


KvKind: TypeAlias = tuple[str, str]  # (transfer, layout) as ranks say in their hello


def exchange(one: KvKind, other: KvKind) -> bool:
    """Return true if ranks of these kinds can hand KV caches to each other. A rank that states no layout, or nothing
    behind a `#`, is tried."""
    if one[0] != other[0]:
        return False
    if one[1] == other[1] or not one[1] or not other[1]:
        return True
    first, _, further = one[1].partition("#")
    its_first, _, its_further = other[1].partition("#")
    return first == its_first and not (further and its_further)


def group_names(rank: RankLoad) -> set[tuple[Role, str, str]]:
    """Return (role, model, instance) of the groups that `rank` belongs to."""
    info = rank.info
    return {(info.role, model, instance) for model in ("", info.model) for instance in ("", info.instance)}


class Facts(NamedTuple):
    """Facts about all members of a group, ready or not."""

    largest: int  # most tokens of context that any of them can hold
    sizes: tuple[int, ...]  # how many one or another can hold, rising
    models: frozenset[str]
    kv_kinds: frozenset[KvKind]
    params: frozenset[str]  # sampling parameters that each of them knows
    params_of: frozenset[frozenset[str]]  # what one of them or another knows
    prefills: bool  # one of them is a decode rank that computes prompts too


class View(Protocol):
    """The view of a policy: the ranks for one request. `least`, `least_loaded` and iteration cover candidates: ranks
    that are ready and have credit."""

    def least(self, metric: Metric) -> RankLoad | None:
        """Return the candidate with the least `metric`; None: there is no candidate."""

    def least_loaded(self, slots: int) -> RankLoad | None:
        """Return the candidate in `slots` (some of those that `same_block_size` returned) with the least tokens; None:
        none of them is a candidate."""

    def same_block_size(self, block_tokens: int) -> int:
        """Return the slots of the ranks with KV blocks of this size, whatever their state."""

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        """Return the known ranks of each instance by dp_rank, whatever their state (`RankLoad.ready`)."""

    def has(self, rank: RankLoad) -> bool:
        """Return true if `rank` is one of these, whatever its state."""

    def __iter__(self) -> Iterator[RankLoad]:
        """Iterate over all candidates, in no order."""


class Group:
    """All ranks of a role, of one model and instance where these are named (an empty name: of all). It is a `View`; the
    load table adds and removes ranks."""

    __slots__ = (
        "_by_slot",
        "_facts",
        "_free",
        "_indexes",
        "_instances",
        "_leaves",
        "_same_block_size",
        "_slot_keys",
        "instance",
        "members",
        "model",
        "ready",
        "role",
    )  # fmt: skip

    def __init__(self, role: Role, model: str, instance: str) -> None:
        self.role, self.model, self.instance = role, model, instance
        self.members: list[RankLoad | None] = []
        self.ready: dict[str, int] = {}  # members that are ready, with credit or not, by model
        self._facts: Facts | None = None  # `facts`, until members change
        self._same_block_size: dict[int, int] | None = None  # `same_block_size` by size, until members change
        self._free: list[int] = []
        self._leaves: dict[int, int] = {}  # where in `members` a slot's rank is
        self._indexes: dict[Metric, LeastIndex] = {}
        self._instances: dict[str, dict[int, RankLoad]] = {}
        self._by_slot: dict[int, RankLoad] = {}
        self._slot_keys: SlotKeys | None = None  # tokens by slot, from their first use

    def takes(self, rank: RankLoad) -> bool:
        """Return true if `rank` belongs to this group."""
        return (self.role, self.model, self.instance) in group_names(rank)

    def least(self, metric: Metric) -> RankLoad | None:
        index = self._indexes.get(metric) or self._index(metric)
        leaf = index.least()
        return self.members[leaf] if leaf >= 0 else None

    def least_loaded(self, slots: int) -> RankLoad | None:
        index = self._slot_keys
        if index is None:
            index = self._slot_keys = SlotKeys()
            for rank in self._by_slot.values():
                self._enter(rank, Metric.TOKENS, index, rank.slot)
        slot = index.least(slots)
        return self._by_slot[slot] if slot >= 0 else None

    def same_block_size(self, block_tokens: int) -> int:
        if self._same_block_size is None:
            self._same_block_size = {}
            for slot, rank in self._by_slot.items():
                size = rank.info.block_tokens
                self._same_block_size[size] = self._same_block_size.get(size, 0) | 1 << slot
        return self._same_block_size.get(block_tokens, 0)

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        return self._instances.values()

    def has(self, rank: RankLoad) -> bool:
        return self._by_slot.get(rank.slot) is rank

    def __iter__(self) -> Iterator[RankLoad]:
        return (rank for rank in self.members if rank is not None and rank.candidate)

    def facts(self) -> Facts:
        """Return the facts about all members."""
        if self._facts is None:
            ranks = [rank for rank in self.members if rank is not None]
            self._facts = Facts(
                max((rank.largest for rank in ranks), default=0),
                tuple(sorted({rank.largest for rank in ranks})),
                frozenset(rank.info.model for rank in ranks),
                frozenset(rank.kv_kind for rank in ranks),
                frozenset.intersection(*(rank.params for rank in ranks)) if ranks else frozenset(),
                frozenset(rank.params for rank in ranks),
                any(rank.info.prefills for rank in ranks),
            )
        return self._facts

    def ranks_of(self, instance: str) -> Mapping[int, RankLoad]:
        """Return an instance's ranks in this group by number, whatever their state; empty for an instance that is not
        here."""
        return self._instances.get(instance, {})

    def names(self) -> list[str]:
        """Return the instances in this group."""
        return list(self._instances)

    # --- for the load table -----------------------------------------------------------------------------------

    def add(self, rank: RankLoad) -> None:
        """Add a member."""
        leaf = self._free.pop() if self._free else len(self.members)
        if leaf == len(self.members):
            self.members.append(None)
        self.members[leaf] = rank
        self._leaves[rank.slot] = leaf
        self._by_slot[rank.slot] = rank
        self._instances.setdefault(rank.info.instance, {})[rank.info.dp_rank] = rank
        if rank.ready:
            self._count(rank, 1)
        for metric, index in self._indexes.items():
            self._enter(rank, metric, index, leaf)
        if self._slot_keys is not None:
            self._enter(rank, Metric.TOKENS, self._slot_keys, rank.slot)
        self.changed()

    def remove(self, rank: RankLoad) -> None:
        """Remove a member."""
        leaf = self._leaves.pop(rank.slot)
        for index in self._indexes.values():
            index.update(leaf, NEVER)
        if self._slot_keys is not None:
            self._slot_keys.update(rank.slot, NEVER)
        del self._by_slot[rank.slot]
        mine = {id(index) for index in (*self._indexes.values(), self._slot_keys)}
        rank.leaves[:] = [entry for entry in rank.leaves if id(entry[0]) not in mine]
        self.members[leaf] = None
        self._free.append(leaf)
        if rank.ready:
            self._count(rank, -1)
        ranks = self._instances[rank.info.instance]
        del ranks[rank.info.dp_rank]
        if not ranks:
            del self._instances[rank.info.instance]
        self.changed()

    def turned(self, rank: RankLoad) -> None:
        """Note that a member became ready, or is no longer ready."""
        self._count(rank, 1 if rank.ready else -1)

    def changed(self) -> None:
        """Note that members came, went, or state other facts."""
        self._facts = self._same_block_size = None

    def validate(self) -> None:
        """Check, for tests, that counts and indexes agree with the members. Raises AssertionError if they do not."""
        ranks = [rank for rank in self.members if rank is not None]
        ready: dict[str, int] = {}
        for member in ranks:
            if member.ready:
                ready[member.info.model] = ready.get(member.info.model, 0) + 1
        assert self.ready == ready, "ready count"
        assert sum(len(ranks_of) for ranks_of in self._instances.values()) == len(ranks), "instances"
        assert self._by_slot == {rank.slot: rank for rank in ranks}, "slots"
        assert self._leaves == {rank.slot: leaf for leaf, rank in enumerate(self.members) if rank}, "leaves"
        for member in ranks:
            assert self.same_block_size(member.info.block_tokens) >> member.slot & 1, "same_block_size"
            if self._slot_keys is not None:
                want = key_of(member, Metric.TOKENS, member.slot) if member.candidate else NEVER
                assert self._slot_keys.key(member.slot) == want, member
        for metric, index in self._indexes.items():
            index.validate()
            for leaf, rank in enumerate(self.members):
                want = NEVER if rank is None or not rank.candidate else key_of(rank, metric, leaf)
                assert index.key(leaf) == want, (metric, leaf)

    def _count(self, rank: RankLoad, by: int) -> None:
        model = rank.info.model
        left = self.ready.get(model, 0) + by
        if left:
            self.ready[model] = left
        else:
            del self.ready[model]

    def _index(self, metric: Metric) -> LeastIndex:
        metric = Metric(metric)  # ValueError before there is an index of what is none
        index = self._indexes[metric] = LeastIndex()
        for leaf, rank in enumerate(self.members):
            if rank is not None:
                self._enter(rank, metric, index, leaf)
        return index

    @staticmethod
    def _enter(rank: RankLoad, metric: Metric, index: LeastIndex | SlotKeys, leaf: int) -> None:
        rank.leaves.append((index, leaf, int(metric)))
        index.update(leaf, key_of(rank, metric, leaf) if rank.candidate else NEVER)


class Subset:
    """A `View` of some ranks of a group, for one request."""

    def __init__(self, ranks: Iterable[RankLoad]) -> None:
        self._ranks = list(ranks)

    def least(self, metric: Metric) -> RankLoad | None:
        return min(self, key=lambda rank: key_of(rank, metric), default=None)

    def least_loaded(self, slots: int) -> RankLoad | None:
        some = (rank for rank in self if slots >> rank.slot & 1)
        return min(some, key=lambda rank: key_of(rank, Metric.TOKENS), default=None)

    def same_block_size(self, block_tokens: int) -> int:
        return sum(1 << rank.slot for rank in self._ranks if rank.info.block_tokens == block_tokens)

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        by_instance: dict[str, dict[int, RankLoad]] = {}
        for rank in self._ranks:
            by_instance.setdefault(rank.info.instance, {})[rank.info.dp_rank] = rank
        return by_instance.values()

    def has(self, rank: RankLoad) -> bool:
        return any(each is rank for each in self._ranks)

    def __iter__(self) -> Iterator[RankLoad]:
        return (rank for rank in self._ranks if rank.candidate)
