"""The central queue: requests that wait for a rank with credit (one whose limits allow more). Owns their order and its
bounds. Pure.

Clients take turns, by tokens (`bus.fair_queue`). A client is a key; without keys all are one. A priority is stated by a
client, so it counts among its own requests: those go by priority, then in the order asked for
(`controller.requests.order`), also where they wait in several lanes, since these may want the same ranks. A lane has
the requests that wait for the same ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import TypeAlias

from bus.fair_queue import FairQueue
from bus.wire.messages import MAX_QUEUED_KINDS, QueuedKind, QueueStatus, Rid, Role
from controller.requests.lanes import Lane
from controller.requests.order import ArrivalOrder, Tally, Urgency
from controller.requests.request import Request

_Line: TypeAlias = dict[int, ArrivalOrder[Request]]  # what waits of one client in one lane, by priority
_Turn: TypeAlias = tuple[int, int, int, Urgency]  # client's clock and number, priority downwards, urgency
InTime: TypeAlias = Callable[[Request], bool]


def _by_arrival(lane: Lane, tally: Tally) -> ArrivalOrder[Request]:
    return ArrivalOrder(tally)


class CentralQueue:
    """The waiting requests by lane: at most `max_requests`, with `max_bytes` of payload in all; the caller asks
    `has_room` before `add`. `requests` and `bytes` are what waits now. Without keys, and where one client waits alone,
    all operations are O(1) in the number of requests and clients, except `turns`: O(lanes log lanes)."""

    def __init__(
        self, *, max_requests: int, max_bytes: int, order: Callable[[Lane, Tally], ArrivalOrder[Request]] = _by_arrival
    ) -> None:
        self._order = order
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._lanes: dict[Lane, dict[str, _Line]] = {}
        self._tallies: dict[tuple[str, str, int], Tally] = {}  # by client, model and priority, of all lanes
        self._entered: dict[str, int] = {}  # clients with something here, by number
        self._arrivals = 0
        self._of_client: dict[str, dict[Rid, Request]] = {}
        self._bytes_of: Counter[str] = Counter()
        self._fair = FairQueue()
        self.requests = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        for mine in self._of_client.values():
            yield from mine.values()

    def has_room(self, size: int) -> bool:
        """Return true if one more request of `size` payload bytes may wait."""
        return self.requests < self.max_requests and self.bytes + size <= self._max_bytes

    def in_the_way(self, request: Request) -> Request | None:
        """Return the request that must be removed so that `request` has room: the newest of the client that takes most
        of the queue, if that is more than the client of `request` would take; None: `request` itself has no room."""
        if self._of_client.keys() <= {request.client}:
            return None
        most = max(self._of_client, key=self._share)
        if self._share(most) <= self._share(request.client, 1, request.frames_bytes):
            return None
        return self._of_client[most][next(reversed(self._of_client[most]))]

    def waits(self, lane: Lane, *, competing: bool = False) -> bool:
        """Return true if a request waits in the lane, so that none overtakes it; or with `competing`, in a lane that
        wants the same ranks."""
        return lane in self._lanes or (competing and any(map(lane.competes, self._lanes)))

    def add(self, lane: Lane, request: Request) -> None:
        """Add a request at the end of its priority, among its client's."""
        client = request.client
        assert request.lane is None, request.rid
        if client not in self._of_client:
            self._of_client[client] = {}
            self._entered[client] = self._arrivals
            self._fair.enter(client)
        self._of_client[client][request.rid] = request
        self._arrivals += 1
        request.arrived, request.aside = self._arrivals, False
        line = self._lanes.setdefault(lane, {}).setdefault(client, {})
        level = line.get(request.submit.priority)
        if level is None:
            shared = client, lane.model, request.submit.priority
            level = line[request.submit.priority] = self._order(lane, self._tallies.setdefault(shared, Tally()))
        level.add(request)
        request.lane = lane
        self._bytes_of[client] += request.frames_bytes
        self.requests += 1
        self.bytes += request.frames_bytes

    def remove(self, request: Request, *, served: bool = False) -> None:
        """Remove a request. `served`: it went to a rank, which counts as its client's turn."""
        assert request.lane is not None, request.rid
        client, lane = request.client, self._lanes[request.lane]
        if served:
            self._fair.serve(client, request.submit.prompt_tokens + request.submit.max_tokens)
        level = lane[client][request.submit.priority]
        level.remove(request)
        if not level:
            if not level.tally.waiting:
                del self._tallies[client, request.lane.model, request.submit.priority]
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
            del self._of_client[client], self._bytes_of[client], self._entered[client]
            if not self._of_client:
                self._fair.clear()
                self._arrivals = 0

    def lanes(self) -> list[Lane]:
        """Return the lanes with waiting requests."""
        return list(self._lanes)

    def head(self, lane: Lane, in_time: InTime = lambda request: True) -> Request | None:
        """Return the next request in `lane`; None: none waits there. `in_time`: see `turns`."""
        turn = self._turn(lane, in_time, ())
        return None if turn is None else turn[1]

    def turns(self, in_time: InTime = lambda request: True) -> Iterator[Request]:
        """Yield the next request of all, and so on, until each lane's head was not removed by the caller. The client
        furthest behind comes first; among its own requests the higher priority, then the order asked for. Behind a head
        that the caller puts `aside` its lane goes on with other clients. `in_time`: true if a request would keep its
        SLO if it were served now."""
        aside: dict[Lane, set[str]] = {}
        waiting: list[tuple[_Turn, Lane]] = []

        def line_up(lane: Lane) -> None:
            turn = self._turn(lane, in_time, aside.get(lane, ()))
            if turn is not None:
                heapq.heappush(waiting, (turn[0], lane))

        for lane in self.lanes():
            line_up(lane)
        while waiting:
            due, lane = heapq.heappop(waiting)
            turn = self._turn(lane, in_time, aside.get(lane, ()))
            if turn is None:
                continue
            if waiting and turn[0] > due and turn[0] > waiting[0][0]:  # its client was served in another lane meanwhile
                heapq.heappush(waiting, (turn[0], lane))
                continue
            request = turn[1]
            request.aside = False
            yield request
            if request.aside:
                aside.setdefault(lane, set()).add(request.client)
            if request.aside or request.lane is None:
                line_up(lane)

    def _turn(self, lane: Lane, in_time: InTime, aside: Container[str]) -> tuple[_Turn, Request] | None:
        """Return the next request in `lane`, without the clients that are put `aside`, and its turn beside those of
        other lanes."""
        lines = self._lanes.get(lane, {})
        if len(lines) == 1:
            (client,) = lines
            if client in aside:
                return None
        else:
            clients = [client for client in lines if client not in aside]
            if not clients:
                return None
            client = self._fair.next(clients)
        line = lines[client]
        priority = max(line)
        urgency, request = line[priority].head(in_time)
        return (self._fair.clock(client), self._entered[client], -priority, urgency), request

    def status(self, now: float) -> QueueStatus:
        """Return what waits, by lane, priority and client, at `now`."""
        kinds: Counter[tuple[str, tuple[Role, ...], bool]] = Counter()
        priorities: Counter[int] = Counter()
        came_at = now
        for lane, lines in self._lanes.items():
            for line in lines.values():
                for priority, level in line.items():
                    kinds[lane.model, lane.roles, lane.pinned] += len(level)
                    priorities[priority] += len(level)
                    came_at = min(came_at, next(iter(level)).came_at)
        most = heapq.nlargest(10, self._of_client, key=lambda client: len(self._of_client[client]))
        return QueueStatus(
            self.requests,
            max(0.0, now - came_at),
            tuple(QueuedKind(*kind[:2], count, kind[2]) for kind, count in kinds.most_common(MAX_QUEUED_KINDS)),
            tuple(sorted(priorities.most_common(MAX_QUEUED_KINDS), reverse=True)),
            tuple((client, len(self._of_client[client])) for client in most),
        )

    def _share(self, client: str, more: int = 0, more_bytes: int = 0) -> float:
        """Return the client's share of the queue, with this much more."""
        requests = len(self._of_client.get(client, ())) + more
        return max(requests / self.max_requests, (self._bytes_of[client] + more_bytes) / self._max_bytes)

    def validate(self) -> None:
        """Check that every sum and map follows its definition (for tests)."""
        requests = [r for lane in self._lanes.values() for line in lane.values() for lvl in line.values() for r in lvl]
        assert self.requests == len(requests)
        assert self.bytes == sum(request.frames_bytes for request in self)
        assert {*requests} == {*self}
        assert all(
            lane and all(line and all(map(len, line.values())) for line in lane.values())
            for lane in self._lanes.values()
        )
        assert all(mine and self._fair.clock(client) >= 0 for client, mine in self._of_client.items())
        assert self._entered.keys() == self._of_client.keys()
        waiting = Counter((r.client, lane.model, r.submit.priority) for r in self for lane in [r.lane] if lane)
        assert waiting == {shared: tally.waiting for shared, tally in self._tallies.items()}
        for client, mine in self._of_client.items():
            assert self._bytes_of[client] == sum(request.frames_bytes for request in mine.values())
