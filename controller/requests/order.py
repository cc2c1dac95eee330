"""In which order requests of one client and priority wait: by arrival, or by what keeps most of their SLOs. Pure.

First come, first served makes nearly everybody late under a burst: all wait as long as the burst is. `SloOrder` serves
first what can still have its first token in time, the least work first, and behind it, by arrival, what cannot. Who has
seen `overtake_tokens` of work served that came later is next, so nobody starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What waits; told from others by identity."""

    work: int
    """Prompt tokens to compute for it, as far as is known. Does not change while it waits."""


T = TypeVar("T", bound=Waiting)


class ArrivalOrder(Generic[T]):
    """First come, first served."""

    def __init__(self) -> None:
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Behind all others."""
        self._items[item] = None

    def remove(self, item: T) -> None:
        """It was served, or went away."""
        del self._items[item]

    def head(self, in_time: Callable[[T], bool]) -> T:
        """Who is next. There is one."""
        return next(iter(self._items))


class SloOrder(ArrivalOrder[T]):
    """See the module. O(log n)."""

    def __init__(self, overtake_tokens: int) -> None:
        super().__init__()
        self._overtake = overtake_tokens
        self._hopeful: list[tuple[int, int, T]] = []  # heap by work and arrival; those that left may be in it still
        self._came: dict[T, int] = {}  # work of all that had come by then, its own included
        self._coming = 0
        self._left = 0  # work of all that left

    def add(self, item: T) -> None:
        """At its place."""
        super().add(item)
        self._coming += item.work
        self._came[item] = self._coming
        heapq.heappush(self._hopeful, (item.work, self._coming, item))
        if len(self._hopeful) > 2 * len(self) + 64:
            self._hopeful = [entry for entry in self._hopeful if self._came.get(entry[2]) == entry[1]]
            heapq.heapify(self._hopeful)

    def remove(self, item: T) -> None:
        """It was served, or went away."""
        super().remove(item)
        del self._came[item]
        self._left += item.work

    def head(self, in_time: Callable[[T], bool]) -> T:
        """Who is next. There is one. `in_time`: whether it would still keep its SLO if it were; once not, never again.

        In order of arrival the oldest would be served when all that came by then has left, so what left beyond that
        has overtaken it, and whoever is younger has been overtaken by no more.
        """
        oldest = super().head(in_time)
        if self._left >= self._came[oldest] - oldest.work + self._overtake:
            return oldest
        while self._hopeful:
            _, came, item = self._hopeful[0]
            if self._came.get(item) == came and in_time(item):
                return item
            heapq.heappop(self._hopeful)
        return oldest
