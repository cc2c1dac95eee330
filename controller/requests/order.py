"""The order in which requests of one client and priority wait: by arrival, or so that most of their SLOs (limits of the
time to the first token) are kept. Pure.

First come, first served makes nearly all requests late under a burst, because each waits as long as the burst lasts.
`SloOrder` first serves requests that can still have their first token in time, the least work first, and then, by
arrival, those that cannot. A request that `overtake_tokens` of later work have overtaken is next, so none starves.
`PolicyOrder` goes by a policy's numbers instead, with the same bound. Requests that wait in several orders for the same
ranks share a `Tally`, and their heads compare by urgency.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar


class Waiting(Protocol):
    """An item that waits; items differ by identity."""

    work: int
    """Prompt tokens to compute for it, as far as is known. Does not change while it waits."""

    order: int
    """Its policy's number, for `PolicyOrder`. Does not change either."""

    @property
    def arrived(self) -> int:
        """The item's number among all requests that came to wait."""


Urgency: TypeAlias = tuple[int, int, int]
"""The less, the sooner."""


class Tally:
    """The work (prompt tokens) that has come to wait, and that has left; `waiting` is the number of requests that
    wait."""

    def __init__(self) -> None:
        self.came = self.left = self.waiting = 0


T = TypeVar("T", bound=Waiting)


class ArrivalOrder(Generic[T]):
    """First come, first served. `tally` is shared with the orders of requests that wait for the same ranks."""

    def __init__(self, tally: Tally | None = None) -> None:
        self.tally = tally or Tally()
        self._items: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Add an item behind all others."""
        self._items[item] = None
        self.tally.came += item.work
        self.tally.waiting += 1

    def remove(self, item: T) -> None:
        """Remove an item: it was served, or it ended."""
        del self._items[item]
        self.tally.left += item.work
        self.tally.waiting -= 1

    def head(self, in_time: Callable[[T], bool]) -> tuple[Urgency, T]:
        """Return the next item, and its urgency beside the heads of other orders. The order must not be empty."""
        item = next(iter(self._items))
        return (0, 0, item.arrived), item


class SloOrder(ArrivalOrder[T]):
    """The order by SLOs; see the module's docstring. `overtake_tokens` is the most later work that may overtake an
    item. O(log n)."""

    def __init__(self, overtake_tokens: int, tally: Tally | None = None) -> None:
        super().__init__(tally)
        self._overtake = overtake_tokens
        self._hopeful: list[tuple[int, int, T]] = []  # heap by work and arrival; those that left may be in it still
        self._came: dict[T, int] = {}  # work of all that had come by then, its own included

    def add(self, item: T) -> None:
        """Add an item at its place."""
        super().add(item)
        self._came[item] = self.tally.came
        heapq.heappush(self._hopeful, (self._number(item), item.arrived, item))
        if len(self._hopeful) > 2 * len(self) + 64:
            self._hopeful = [entry for entry in self._hopeful if self._waits(entry)]
            heapq.heapify(self._hopeful)

    def remove(self, item: T) -> None:
        """Remove an item: it was served, or it ended."""
        super().remove(item)
        del self._came[item]

    def head(self, in_time: Callable[[T], bool]) -> tuple[Urgency, T]:
        """Return the next item. The order must not be empty. `in_time`: true if the item would still keep its SLO if
        it were served; once false, always false.

        In order of arrival the oldest would be served when all that came before it has left. What left beyond that
        has overtaken it, and no younger item was overtaken by more.
        """
        urgency, oldest = super().head(in_time)
        if self.tally.left >= self._came[oldest] - oldest.work + self._overtake:
            return urgency, oldest
        while self._hopeful:
            item = self._hopeful[0][2]
            if self._waits(self._hopeful[0]) and in_time(item):
                return (1, self._number(item), item.arrived), item
            heapq.heappop(self._hopeful)
        return (2, 0, oldest.arrived), oldest

    def _number(self, item: T) -> int:
        """Return the number of an item by which those that can be in time are ordered."""
        return item.work

    def _waits(self, entry: tuple[int, int, T]) -> bool:
        """Return true if the entry has not left, or left and come again."""
        return entry[2] in self._came and entry[2].arrived == entry[1]


class PolicyOrder(SloOrder[T]):
    """The order of a policy's numbers, the least first, whatever the SLOs."""

    def head(self, in_time: Callable[[T], bool]) -> tuple[Urgency, T]:
        return super().head(_any)

    def _number(self, item: T) -> int:
        return item.order


def _any(item: object) -> bool:
    return True
