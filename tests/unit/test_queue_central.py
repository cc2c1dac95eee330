"""The central queue: order and bounds."""

from __future__ import annotations

from controller_world import submit

from controller.requests.request import Request
from controller.requests.table import CentralQueue


def request(rid: str, priority: int = 0, size: int = 8) -> Request:
    return Request("p", submit(rid, priority=priority), (b"x" * size,), size, 0.0)


def test_priority_first_then_arrival_in_each_lane() -> None:
    queue = CentralQueue(max_requests=10, max_bytes=1000)
    for rid, priority, lane in (("a", 0, 1), ("b", 5, 1), ("c", 5, 1), ("d", -3, 1), ("e", 0, 2)):
        queue.add(lane, request(rid, priority))
        queue.validate()
    order = []
    while (head := queue.head(1)) is not None:
        order.append(head.rid)
        queue.remove(head)
        queue.validate()
    assert order == ["b", "c", "a", "d"]
    assert not queue.waits(1)
    assert queue.waits(2)
    assert queue.lanes() == [2]


def test_bounded_by_count_and_by_bytes() -> None:
    queue = CentralQueue(max_requests=2, max_bytes=20)
    assert queue.has_room(20)
    assert not queue.has_room(21)
    queue.add(0, request("a", size=8))
    assert queue.has_room(12)
    assert not queue.has_room(13)
    queue.add(0, request("b", size=1))
    assert not queue.has_room(0)


def test_whoever_leaves_from_the_middle_leaves_nothing() -> None:
    queue = CentralQueue(max_requests=10, max_bytes=1000)
    a, b = request("a"), request("b")
    queue.add(0, a)
    queue.add(0, b)
    queue.remove(a)
    assert queue.head(0) is b
    queue.remove(b)
    assert (len(queue), queue.bytes, queue.lanes(), list(queue)) == (0, 0, [], [])
