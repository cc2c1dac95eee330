"""Virtual time: functions are called in order of their times, ties in the order in which they were scheduled. Owns the
queue alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualLoop:
    """A deterministic event loop: the same calls give the same order of events. `now` is the virtual time in seconds,
    from 0; it jumps from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._cancelled: set[int] = set()

    def call_at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> int:
        """Schedule `function(*arguments)` for the time `time_s`, or for now if that is past. Return the event's number,
        for `cancel`."""
        self._scheduled += 1
        now = self.now
        heapq.heappush(self._events, (time_s if time_s > now else now, self._scheduled, function, arguments))
        return self._scheduled

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> int:
        """Schedule a call in `delay_s` seconds, as `call_at` does."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + delay_s, self._scheduled, function, arguments))
        return self._scheduled

    def cancel(self, event: int) -> None:
        """Drop a call that has not been made. The number of a call that was made must not be given."""
        self._cancelled.add(event)

    def run(self, done: Callable[[float], bool]) -> None:
        """Make the calls in order until `done(now)` is true, asked before each, or none is left."""
        events, cancelled, pop = self._events, self._cancelled, heapq.heappop
        while events and not done(self.now):
            self.now, event, function, arguments = pop(events)
            if cancelled and event in cancelled:
                cancelled.remove(event)
            else:
                function(*arguments)
