"""When each request of a trace arrives, and which requests count. This module owns the sessions and the window: the
time in which a request must arrive to count. It knows no rank and no clock, so that a run in virtual time and one in
real time have the same arrivals.

A session is under way from its first arrival until all of its requests have ended. The window opens when the warm-up
ends. It closes at `end_s`, or with the `end_requests`-th arrival in it. With a fixed number of sessions under way it
also closes when a session ends and none is left to take its place, because the load is lower from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdbus.lab.config import LabConfig
from pdbus.lab.traces import Trace


class Arrivals:
    """The arrivals of one run. `begin(place, at_s)` is called once for each request, as soon as the time of its arrival
    is known. The owner calls `arrived` when that time has come, and `ended` when the request has ended. A `place` is an
    index in `trace.requests`; times are in seconds of the run."""

    def __init__(self, trace: Trace, config: LabConfig, begin: Callable[[int, float], None]) -> None:
        requests = trace.requests
        self._trace, self._begin = trace, begin
        self._concurrency = config.concurrency
        self._end_s = config.end_s or math.inf
        self._most = config.end_requests or math.inf
        self._waits_for = [len(request.after) for request in requests]
        self._followers: list[list[int]] = [[] for _ in requests]
        self._sessions: dict[int, list[int]] = {}  # those of a session that nothing has to end before, in order
        self._left: dict[int, int] = {}  # requests of each session that have not ended
        for place, request in enumerate(requests):
            session = trace.session_of(place)
            self._left[session] = self._left.get(session, 0) + 1
            roots = self._sessions.setdefault(session, [])
            if not request.after:
                roots.append(place)
            for former in request.after:
                self._followers[former].append(place)
        self._to_come = iter(list(self._sessions))
        self._unended = len(requests)
        self._pending: set[int] = set()  # those that count and have not ended
        self.counted: list[int] = []  # places of the requests that count, by arrival
        self.began_s = config.warm_up_s
        self.closed_s = math.inf  # when the window closed

    def start(self) -> None:
        """Begin the first requests of all sessions at their own times; with `config.concurrency`, begin that many
        sessions at 0."""
        if self._concurrency:
            for _ in range(self._concurrency):
                self._next_session(0.0)
        else:
            for roots in self._sessions.values():
                for place in roots:
                    self._begin(place, self._trace.requests[place].arrival_s)

    def arrived(self, place: int, now: float) -> None:
        """Note the arrival of a request: it counts (in `counted`) if the window is open."""
        if self.began_s <= now < self._end_s and now < self.closed_s:
            self._pending.add(place)
            self.counted.append(place)
            if len(self.counted) >= self._most:
                self._close(now)

    def ended(self, place: int, now: float) -> None:
        """Note the end of a request. Begin the turns that waited only for it, after their think time, and with
        `config.concurrency` the next session, if this one has ended."""
        self._unended -= 1
        self._pending.discard(place)
        for follower in self._followers[place]:
            self._waits_for[follower] -= 1
            if not self._waits_for[follower]:
                self._begin(follower, now + self._trace.requests[follower].think_s)
        session = self._trace.session_of(place)
        self._left[session] -= 1
        if self._concurrency and not self._left[session]:
            self._next_session(now)

    def done(self, now: float) -> bool:
        """Return true once all requests that count have ended and no later one can count."""
        return not self._unended or (not self._pending and now >= min(self._end_s, self.closed_s))

    def until_s(self, ended_s: float) -> float:
        """Return the time after which no arrival counted: when the window closed, or `ended_s` (the run's end) if that
        was sooner."""
        return min(self._end_s, self.closed_s, ended_s)

    def share(self, now: float) -> float:
        """Return the share of the run that is done, from 0 to 1: an estimate, to show progress."""
        requests = len(self._trace)
        return min(1.0, max(1 - self._unended / requests, now / self._end_s, len(self.counted) / self._most))

    def _next_session(self, now: float) -> None:
        session = next(self._to_come, None)
        if session is None:
            self._close(now)
            return
        for place in self._sessions[session]:
            self._begin(place, now)

    def _close(self, now: float) -> None:
        self.closed_s = min(self.closed_s, max(now, self.began_s))
