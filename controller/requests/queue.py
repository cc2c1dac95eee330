"""The central queue: requests that wait for a rank with credit. Owns their order and its bounds. Pure.

Clients take turns, by tokens (`bus.turns`). A client is a key; without keys all are one. A priority is a client's word,
so it counts among its own requests: those go by priority, then in the order asked for (`controller.requests.order`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

from bus.turns import Turns
from bus.wire.messages import Rid
from controller.requests.order import ArrivalOrder
from controller.requests.request import Request

_Line: TypeAlias = dict[int, ArrivalOrder[Request]]  # what waits of one client in one lane, by priority
InTime: TypeAlias = Callable[[Request], bool]


class CentralQueue:
    """Requests by lane: those of one lane wait for the same ranks. Without keys, and where one client waits alone, all
    operations are O(1) in the number of requests and clients, but `turns` is O(lanes)."""

    def __init__(
        self, *, max_requests: int, max_bytes: int, order: Callable[[], ArrivalOrder[Request]] = ArrivalOrder
    ) -> None:
        self._order = order
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._lanes: dict[Hashable, dict[str, _Line]] = {}
        self._of_client: dict[str, dict[Rid, Request]] = {}
        self._bytes_of: Counter[str] = Counter()
        self._turns = Turns()
        self.requests = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        for mine in self._of_client.values():
            yield from mine.values()

    def has_room(self, size: int) -> bool:
        """Whether one more request of `size` payload bytes may wait."""
        return self.requests < self.max_requests and self.bytes + size <= self._max_bytes

    def in_the_way(self, request: Request) -> Request | None:
        """What must go for `request` to have room: the newest of the client that takes most of the queue, if that is
        more than the client of `request` takes with it."""
        if self._of_client.keys() <= {request.client}:
            return None
        most = max(self._of_client, key=self._share)
        if self._share(most) <= self._share(request.client, 1, request.frames_bytes):
            return None
        return self._of_client[most][next(reversed(self._of_client[most]))]

    def waits(self, lane: Hashable) -> bool:
        """Whether somebody already waits there, so that nobody overtakes."""
        return lane in self._lanes

    def add(self, lane: Hashable, request: Request) -> None:
        """At the end of its priority, among its client's."""
        client = request.client
        assert request.lane is None, request.rid
        if client not in self._of_client:
            self._of_client[client] = {}
            self._turns.enter(client)
        self._of_client[client][request.rid] = request
        line = self._lanes.setdefault(lane, {}).setdefault(client, {})
        level = line.get(request.submit.priority)
        if level is None:
            level = line[request.submit.priority] = self._order()
        level.add(request)
        request.lane = lane
        self._bytes_of[client] += request.frames_bytes
        self.requests += 1
        self.bytes += request.frames_bytes

    def remove(self, request: Request, *, served: bool = False) -> None:
        """It leaves; `served`: to a rank, which counts as its client's turn."""
        client, lane = request.client, self._lanes[request.lane]
        if served:
            self._turns.serve(client, request.submit.prompt_tokens + request.submit.max_tokens)
        level = lane[client][request.submit.priority]
        level.remove(request)
        if not level:
            del lane[client][request.submit.priority]
            if not lane[client]:
                del lane[client]
                if not lane:
                    del self._lanes[request.lane]
        request.lane = None
        self._bytes_of[client] -= request.frames_bytes
        self.requests -= 1
        self.bytes -= request.frames_bytes
        del self._of_client[client][request.rid]
        if not self._of_client[client]:
            del self._of_client[client], self._bytes_of[client]
            if not self._of_client:
                self._turns.clear()

    def lanes(self) -> list[Hashable]:
        return list(self._lanes)

    def head(self, lane: Hashable, in_time: InTime = lambda request: True) -> Request | None:
        """Who is next in `lane`."""
        lines = self._lanes.get(lane)
        if lines is None:
            return None
        client = next(iter(lines)) if len(lines) == 1 else self._turns.next(lines)
        line = lines[client]
        return line[max(line)].head(in_time)

    def turns(self, in_time: InTime = lambda request: True) -> Iterator[Request]:
        """The next request of each lane, and so on until it stays where it is: who is furthest behind comes first.
        `in_time`: whether a request would keep its SLO if it were served now."""
        waiting: list[tuple[int, int, Hashable]] = []
        for order, lane in enumerate(list(self._lanes)):
            request = self.head(lane, in_time)
            while request is not None and len(self._of_client) <= 1:
                yield request
                request = None if request.lane is not None else self.head(lane, in_time)
            if request is not None:
                waiting.append((self._turns.clock(request.client), order, lane))
        heapq.heapify(waiting)
        while waiting:
            _, order, lane = heapq.heappop(waiting)
            request = self.head(lane, in_time)
            if request is not None:
                yield request
                following = None if request.lane is not None else self.head(lane, in_time)
                if following is not None:
                    heapq.heappush(waiting, (self._turns.clock(following.client), order, lane))

    def _share(self, client: str, more: int = 0, more_bytes: int = 0) -> float:
        """How much of the queue it takes, with so much more."""
        requests = len(self._of_client.get(client, ())) + more
        return max(requests / self.max_requests, (self._bytes_of[client] + more_bytes) / self._max_bytes)

    def validate(self) -> None:
        requests = [r for lane in self._lanes.values() for line in lane.values() for lvl in line.values() for r in lvl]
        assert self.requests == len(requests)
        assert self.bytes == sum(request.frames_bytes for request in self)
        assert {*requests} == {*self}
        assert all(
            lane and all(line and all(map(len, line.values())) for line in lane.values())
            for lane in self._lanes.values()
        )
        assert all(mine and self._turns.clock(client) >= 0 for client, mine in self._of_client.items())
        for client, mine in self._of_client.items():
            assert self._bytes_of[client] == sum(request.frames_bytes for request in mine.values())
