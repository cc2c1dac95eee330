"""A clock and timers that a test moves: no waiting, and the same order every time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None


class VirtualTime:
    """Timers fire when they are due, those of one moment in the order in which they were made."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Timer:
        timer = Timer(function)
        heapq.heappush(self._timers, (self.now + delay_s, next(self._order), timer))
        return timer

    @property
    def next_due(self) -> float:
        """When the next timer fires; infinity without any."""
        while self._timers and self._timers[0][2].function is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else float("inf")

    def fire(self) -> None:
        """Let time pass until the next timer, and run it."""
        self.now = max(self.now, self.next_due)
        function = heapq.heappop(self._timers)[2].function
        assert function is not None
        function()
