"""The central queue: requests that wait for a rank with credit. Owns their order and its bounds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from controller.requests.request import Request


class CentralQueue:
    """Requests by lane, priority and arrival; all operations O(1) in the number of requests."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._lanes: dict[Hashable, dict[int, dict[str, Request]]] = {}
        self.requests = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            for level in lane.values():
                yield from level.values()

    def has_room(self, size: int) -> bool:
        """Whether one more request of `size` payload bytes may wait."""
        return self.requests < self._max_requests and self.bytes + size <= self._max_bytes

    def waits(self, lane: Hashable) -> bool:
        """Whether somebody already waits there, so that nobody overtakes."""
        return lane in self._lanes

    def add(self, lane: Hashable, request: Request) -> None:
        """At the end of its priority."""
        level = self._lanes.setdefault(lane, {}).setdefault(request.submit.priority, {})
        assert request.lane is None, request.rid
        level[request.rid] = request
        request.lane = lane
        self.requests += 1
        self.bytes += request.frames_bytes

    def remove(self, request: Request) -> None:
        lane = self._lanes[request.lane]
        level = lane[request.submit.priority]
        del level[request.rid]
        if not level:
            del lane[request.submit.priority]
            if not lane:
                del self._lanes[request.lane]
        request.lane = None
        self.requests -= 1
        self.bytes -= request.frames_bytes

    def lanes(self) -> list[Hashable]:
        return list(self._lanes)

    def head(self, lane: Hashable) -> Request | None:
        """Who is next in `lane`: the oldest of the highest priority."""
        levels = self._lanes.get(lane)
        return next(iter(levels[max(levels)].values())) if levels else None

    def validate(self) -> None:
        requests = list(self)
        assert self.requests == len(requests)
        assert self.bytes == sum(request.frames_bytes for request in requests)
        assert all(levels and all(levels.values()) for levels in self._lanes.values())
