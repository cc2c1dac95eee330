"""Virtual time: events in order of their time, ties in order of scheduling. Owns the queue; knows nothing of what runs.

It offers what the sim engine asks of a loop (`clock`, `call_later`), so the same engine code can run on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Event:
    """A pending call; `cancel()` forgets it."""

    __slots__ = ("active", "arguments", "function")

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.active = True

    def cancel(self) -> None:
        self.active = False


class VirtualLoop:
    """Deterministic: the same calls give the same order of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = 0

    def clock(self) -> float:
        return self.now

    def call_at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> Event:
        event = Event(function, arguments)
        self._order += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._order, event))
        return event

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> Event:
        return self.call_at(self.now + delay_s, function, *arguments)

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done()` or nothing is left."""
        events = self._events
        while events and not done():
            self.now, _, event = heapq.heappop(events)
            if event.active:
                event.function(*event.arguments)
