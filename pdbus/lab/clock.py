"""Virtual time: events in order of their time, ties in order of scheduling. Owns the queue alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualLoop:
    """A deterministic event loop: the same calls give the same order of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._cancelled: set[int] = set()

    def call_at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> int:
        """Call `function` at `time_s`, or at once if that is past. Returns the event for `cancel`."""
        self._scheduled += 1
        now = self.now
        heapq.heappush(self._events, (time_s if time_s > now else now, self._scheduled, function, arguments))
        return self._scheduled

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> int:
        return self.call_at(self.now + delay_s, function, *arguments)

    def cancel(self, event: int) -> None:
        """Forget a pending call."""
        self._cancelled.add(event)

    def run(self, done: Callable[[], bool]) -> None:
        """Run until `done()` is true or no event is left."""
        events, cancelled, pop = self._events, self._cancelled, heapq.heappop
        while events and not done():
            self.now, event, function, arguments = pop(events)
            if cancelled and event in cancelled:
                cancelled.remove(event)
            else:
                function(*arguments)
