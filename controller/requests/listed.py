"""The requests that people look for first: those that run or wait longest, and those that were slowest to their first
token. For `pdbus top --http`; no decision uses them. Pure.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from itertools import chain, islice
from math import inf

from bus.wire.messages import MAX_LISTED, ListedRequest, RequestLists, Rid
from controller.requests.queue import CentralQueue
from controller.requests.request import Request, had_output

MINUTE_S = 60.0
MINUTES = 15
SPAN_S = MINUTES * MINUTE_S
LOOKED_AT = 4096  # of those that wait


class Listed:
    """The lists, of the live `requests`, in the order in which they came, and of the `queue`. `now` is in seconds on
    the controller's clock; `wall_s` added to it gives seconds since 1970. What takes no longer than `least_s` to its
    first token need not be given to `slow`."""

    def __init__(self, requests: Mapping[Rid, Request], queue: CentralQueue, now: float, wall_s: float) -> None:
        self._requests = requests
        self._queue = queue
        self._wall_s = wall_s
        self._number = 0  # so that no two are compared further
        # of each minute the slowest, as a heap: seconds to the first token, number, when that came
        self._minutes: deque[list[tuple[float, int, float, ListedRequest]]] = deque([[]], maxlen=MINUTES + 1)
        self._until = now + MINUTE_S
        self.least_s = 0.0

    def turn(self, now: float) -> None:
        """Begin another minute if this one is over; call it about once a second."""
        if now >= self._until:
            self._until = now + MINUTE_S
            self._minutes.append([])
            self.least_s = 0.0

    def slow(self, request: Request, took_s: float, now: float) -> None:
        """Take a request whose first token came `now`, `took_s` after the request."""
        minute = self._minutes[-1]
        self._number += 1
        item = took_s, self._number, now, self._listed(request, now)
        if len(minute) < MAX_LISTED:
            heapq.heappush(minute, item)
        else:
            heapq.heappushpop(minute, item)
            self.least_s = minute[0][0]

    def lists(self, now: float) -> RequestLists:
        """Return all three. It looks at what waits, and at no more of what runs than it returns."""
        at_ranks = (request for request in self._requests.values() if request.lane is None)
        waiting = heapq.nsmallest(MAX_LISTED, islice(self._queue, LOOKED_AT), key=lambda request: request.came_at)
        slowest = heapq.nlargest(MAX_LISTED, [item for item in chain(*self._minutes) if item[2] >= now - SPAN_S])
        return RequestLists(
            tuple([self._listed(request, now) for request in islice(at_ranks, MAX_LISTED)]),
            tuple([self._listed(request, now) for request in waiting]),
            tuple([item[3] for item in slowest]),
        )

    def _listed(self, request: Request, now: float) -> ListedRequest:
        legs = request.legs
        came_at = request.came_at
        if came_at == inf:  # to an earlier start of this controller: since when it is known here
            came_at = legs[0].began if legs else request.past[0][0]
        first_at = min([leg.first_at for leg in legs if leg.answers], default=inf)
        took_s = max(0.0, first_at - came_at) if had_output(request) and request.came_at != inf else 0.0
        return ListedRequest(
            request.rid, max(0, round((came_at + self._wall_s) * 1e6)), took_s, request.model,
            request.submit.prompt_tokens, request.attempt, tuple(["{}/{}".format(*leg.rank.key) for leg in legs]),
            now > request.first_due,
        )  # fmt: skip
