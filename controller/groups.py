"""Views of candidates: which ranks a policy may choose from, and the least loaded of them.

Owns the grouping of ranks by (role, model, instance) and their indexes; must not change a load. A `Group` answers in
O(log n); a `Subset` narrows one for a single request (ranks to avoid, prompts that only some ranks can hold) and
answers by looking at each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Protocol

from bus.messages import Role
from controller.index import NEVER, LeastIndex
from controller.rank import RankLoad


class Metric(IntEnum):
    """What a pick minimises; equals go to the rank picked least recently, so ties rotate."""

    TURN = 0  # nothing: plain rotation
    REQUESTS = 1
    TOKENS = 2  # ties by requests


def key_of(rank: RankLoad, metric: int) -> int:
    """What `rank` counts in `metric` (a Metric), as one integer, its last turn in the low bits."""
    if metric == 2:
        requests = rank.requests
        return (rank.tokens << 24 | (requests if requests < 0xFFFFFF else 0xFFFFFF)) << 48 | rank.picked
    if metric == 1:
        return rank.requests << 48 | rank.picked
    return rank.picked


class View(Protocol):
    """What a policy sees. `least` and iteration cover ranks that are ready and have credit."""

    def least(self, metric: Metric) -> RankLoad | None:
        """The candidate with the least `metric`, or None."""

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        """The known ranks of each instance by dp_rank, whatever their state (`RankLoad.ready`)."""

    def __iter__(self) -> Iterator[RankLoad]:
        """All candidates, in no order."""


class Group:
    """All ranks of a role, of one model and instance where these are named."""

    __slots__ = (
        "_facts", "_free", "_indexes", "_instances", "instance", "members", "model", "ready", "role",
    )  # fmt: skip

    def __init__(self, role: Role, model: str, instance: str) -> None:
        self.role, self.model, self.instance = role, model, instance
        self.members: list[RankLoad | None] = []
        self.ready: dict[str, int] = {}  # members that are ready, with credit or not, by model
        self._facts: tuple[int, frozenset[str]] | None = None  # `facts`, until members change
        self._free: list[int] = []
        self._indexes: dict[Metric, LeastIndex] = {}
        self._instances: dict[str, dict[int, RankLoad]] = {}

    def takes(self, rank: RankLoad) -> bool:
        """Whether `rank` belongs here."""
        info = rank.info
        return info.role == self.role and self.model in ("", info.model) and self.instance in ("", info.instance)

    def least(self, metric: Metric) -> RankLoad | None:
        index = self._indexes.get(metric) or self._index(metric)
        leaf = index.least()
        return self.members[leaf] if leaf >= 0 else None

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        return self._instances.values()

    def __iter__(self) -> Iterator[RankLoad]:
        return (rank for rank in self.members if rank is not None and rank.open)

    def facts(self) -> tuple[int, frozenset[str]]:
        """Most tokens of context that any member can hold, and the models that members serve, ready or not."""
        if self._facts is None:
            ranks = [rank for rank in self.members if rank is not None]
            largest = max((rank.largest for rank in ranks), default=0)
            self._facts = largest, frozenset(rank.info.model for rank in ranks)
        return self._facts

    def names(self) -> list[str]:
        """The instances in this group."""
        return list(self._instances)

    # --- for the load table -----------------------------------------------------------------------------------

    def add(self, rank: RankLoad) -> None:
        leaf = self._free.pop() if self._free else len(self.members)
        if leaf == len(self.members):
            self.members.append(None)
        self.members[leaf] = rank
        self._instances.setdefault(rank.info.instance, {})[rank.info.dp_rank] = rank
        if rank.ready:
            self._count(rank, 1)
        rank.places.append((self, leaf))
        for metric, index in self._indexes.items():
            self._enter(rank, metric, index, leaf)
        self.changed()

    def remove(self, rank: RankLoad) -> None:
        leaf = next(leaf for group, leaf in rank.places if group is self)
        rank.places.remove((self, leaf))
        for index in self._indexes.values():
            index.update(leaf, NEVER)
        mine = {id(index) for index in self._indexes.values()}
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
        """A member became ready, or no longer is."""
        self._count(rank, 1 if rank.ready else -1)

    def changed(self) -> None:
        """Members came, went, or have other capacities."""
        self._facts = None

    def validate(self) -> None:
        """Counts and indexes agree with the members."""
        ranks = [rank for rank in self.members if rank is not None]
        assert self.ready == Counter(rank.info.model for rank in ranks if rank.ready), "ready count"
        assert sum(len(ranks_of) for ranks_of in self._instances.values()) == len(ranks), "instances"
        for metric, index in self._indexes.items():
            index.validate()
            for leaf, rank in enumerate(self.members):
                want = NEVER if rank is None or not rank.open else key_of(rank, metric) << 16 | leaf
                assert index.key(leaf) == want, (metric, leaf)

    def _count(self, rank: RankLoad, by: int) -> None:
        model = rank.info.model
        left = self.ready.get(model, 0) + by
        if left:
            self.ready[model] = left
        else:
            del self.ready[model]

    def _index(self, metric: Metric) -> LeastIndex:
        index = self._indexes[metric] = LeastIndex()
        for leaf, rank in enumerate(self.members):
            if rank is not None:
                self._enter(rank, metric, index, leaf)
        return index

    @staticmethod
    def _enter(rank: RankLoad, metric: Metric, index: LeastIndex, leaf: int) -> None:
        rank.leaves.append((index, leaf, int(metric)))
        index.update(leaf, key_of(rank, metric) << 16 | leaf if rank.open else NEVER)


class Subset:
    """Some ready ranks of a group, for one request."""

    def __init__(self, ranks: Iterable[RankLoad]) -> None:
        self._ranks = list(ranks)

    def least(self, metric: Metric) -> RankLoad | None:
        return min(self, key=lambda rank: key_of(rank, metric), default=None)

    def instances(self) -> Iterable[Mapping[int, RankLoad]]:
        by_instance: dict[str, dict[int, RankLoad]] = {}
        for rank in self._ranks:
            by_instance.setdefault(rank.info.instance, {})[rank.info.dp_rank] = rank
        return by_instance.values()

    def __iter__(self) -> Iterator[RankLoad]:
        return (rank for rank in self._ranks if rank.open)
