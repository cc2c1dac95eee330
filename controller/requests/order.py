"""In which order requests of one client and priority wait: by arrival, or by what keeps most of their SLOs. Pure.

First come, first served makes nearly everybody late under a burst: all wait as long as the burst is. `SloOrder` serves
first what can still have its first token in time, the least work first, and behind it, by arrival, what cannot. Who has
seen `overtake_tokens` of work served that came later is next, so nobody starves. What waits in several orders for the
same ranks shares a `Tally`, and its heads compare by their urgency.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar


class Waiting(Protocol):
    """What waits; told from others by identity."""

    work: int
    """Prompt tokens to compute for it, as far as is known. Does not change while it waits."""

    @property
    def arrived(self) -> int:
        """Its number among all that came to wait."""


Urgency: TypeAlias = tuple[int, int, int]
"""The less, the sooner."""


class Tally:
    """How much work has come to wait, and how much of it has left; `waiting`: how many of it are there."""

    def __init__(self) -> None:
        self.came = self.left = self.waiting = 0


T = TypeVar("T", bound=Waiting)


class ArrivalOrder(Generic[T]):
    """First come, first served. `tally` is shared with orders of what waits for the same ranks."""

    def __init__(self, tally: Tally | None = None) -> None:
        self.tally = tally or Tally()
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Behind all others."""
        self._items[item] = None
        self.tally.came += item.work
        self.tally.waiting += 1

    def remove(self, item: T) -> None:
        """It was served, or went away."""
        del self._items[item]
        self.tally.left += item.work
        self.tally.waiting -= 1

    def head(self, in_time: Callable[[T], bool]) -> tuple[Urgency, T]:
        """Who is next, and how urgent it is beside the heads of other orders. There is one."""
        item = next(iter(self._items))
        return (0, 0, item.arrived), item


class SloOrder(ArrivalOrder[T]):
    """See the module. O(log n)."""

    def __init__(self, overtake_tokens: int, tally: Tally | None = None) -> None:
        super().__init__(tally)
        self._overtake = overtake_tokens
        self._hopeful: list[tuple[int, int, T]] = []  # heap by work and arrival; those that left may be in it still
        self._came: dict[T, int] = {}  # work of all that had come by then, its own included

    def add(self, item: T) -> None:
        """At its place."""
        super().add(item)
        self._came[item] = self.tally.came
        heapq.heappush(self._hopeful, (item.work, item.arrived, item))
        if len(self._hopeful) > 2 * len(self) + 64:
            self._hopeful = [entry for entry in self._hopeful if self._waits(entry)]
            heapq.heapify(self._hopeful)

    def remove(self, item: T) -> None:
        """It was served, or went away."""
        super().remove(item)
        del self._came[item]

    def head(self, in_time: Callable[[T], bool]) -> tuple[Urgency, T]:
        """Who is next. There is one. `in_time`: whether it would still keep its SLO if it were; once not, never again.

        In order of arrival the oldest would be served when all that came by then has left, so what left beyond that
        has overtaken it, and whoever is younger has been overtaken by no more.
        """
        urgency, oldest = super().head(in_time)
        if self.tally.left >= self._came[oldest] - oldest.work + self._overtake:
            return urgency, oldest
        while self._hopeful:
            item = self._hopeful[0][2]
            if self._waits(self._hopeful[0]) and in_time(item):
                return (1, item.work, item.arrived), item
            heapq.heappop(self._hopeful)
        return (2, 0, oldest.arrived), oldest

    def _waits(self, entry: tuple[int, int, T]) -> bool:
        """Whether it has not left, or left and come again."""
        return entry[2] in self._came and entry[2].arrived == entry[1]
