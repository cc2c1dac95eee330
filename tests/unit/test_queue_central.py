"""The central queue: order and bounds."""

from __future__ import annotations

from collections import Counter

from controller_world import submit
from retained import retained

from bus.rights import Known
from controller.requests.lanes import Lane
from controller.requests.queue import CentralQueue
from controller.requests.request import Request

LANES = [Lane("m", ("unified",), number) for number in range(4)]


def request(rid: str, priority: int = 0, size: int = 8, key: str = "", tokens: int = 10) -> Request:
    peer = Known(b"p")
    peer.key = key
    header = submit(rid, priority=priority, prompt_tokens=tokens)
    return Request(peer, key, header, (b"x" * size,), size, (), None)


def served(queue: CentralQueue, count: int = 1000) -> list[str]:
    """Whose requests leave, in order, as ranks take them."""
    order = []
    for head in queue.turns():
        queue.remove(head, served=True)
        queue.validate()
        order.append(head.client)
        if len(order) == count:
            break
    return order


def test_priority_first_then_arrival_in_each_lane() -> None:
    queue = CentralQueue(max_requests=10, max_bytes=1000)
    for rid, priority, lane in (("a", 0, 1), ("b", 5, 1), ("c", 5, 1), ("d", -3, 1), ("e", 0, 2)):
        queue.add(LANES[lane], request(rid, priority))
        queue.validate()
    order = []
    while (head := queue.head(LANES[1])) is not None:
        order.append(head.rid)
        queue.remove(head)
        queue.validate()
    assert order == ["b", "c", "a", "d"]
    assert not queue.waits(LANES[1])
    assert queue.waits(LANES[2])
    assert queue.lanes() == [LANES[2]]


def test_bounded_by_count_and_by_bytes() -> None:
    queue = CentralQueue(max_requests=2, max_bytes=20)
    assert queue.has_room(20)
    assert not queue.has_room(21)
    queue.add(LANES[0], request("a", size=8))
    assert queue.has_room(12)
    assert not queue.has_room(13)
    queue.add(LANES[0], request("b", size=1))
    assert not queue.has_room(0)


def test_whoever_leaves_from_the_middle_leaves_nothing() -> None:
    queue = CentralQueue(max_requests=10, max_bytes=1000)
    a, b = request("a"), request("b")
    queue.add(LANES[0], a)
    queue.add(LANES[0], b)
    queue.remove(a)
    assert queue.head(LANES[0]) is b
    queue.remove(b)
    assert (len(queue), queue.bytes, queue.lanes(), list(queue)) == (0, 0, [], [])


def test_clients_take_turns_by_tokens_whoever_came_first_and_whatever_priority_they_ask_for() -> None:
    queue = CentralQueue(max_requests=1000, max_bytes=10_000)
    for number in range(100):
        queue.add(LANES[number % 3], request(f"m{number}", priority=1000, key="mallory"))  # in several lanes
    for number in range(10):
        queue.add(LANES[0], request(f"a{number}", key="alice"))
    assert Counter(served(queue, 20)) == {"mallory": 10, "alice": 10}
    for number in range(10):
        queue.add(LANES[0], request(f"b{number}", key="bob", tokens=40))  # 45 with its output, against 15
    assert Counter(served(queue, 20)) == {"mallory": 15, "bob": 5}


def test_who_comes_back_has_saved_up_nothing_and_owes_what_it_took() -> None:
    queue = CentralQueue(max_requests=1000, max_bytes=10_000)
    for number in range(40):
        queue.add(LANES[0], request(f"a{number}", key="alice"))
    assert served(queue, 20) == ["alice"] * 20  # alone
    queue.add(LANES[0], request("big", key="bob", tokens=145))
    queue.add(LANES[0], request("small", key="bob", tokens=1))
    assert served(queue, 12) == ["bob", *["alice"] * 10, "bob"]


def test_a_full_queue_makes_room_at_the_cost_of_who_has_most_of_it() -> None:
    queue = CentralQueue(max_requests=4, max_bytes=1000)
    for number in range(4):
        queue.add(LANES[0], request(f"m{number}", key="mallory"))
    mine = request("m4", key="mallory")
    assert queue.in_the_way(mine) is None
    for number in range(2):
        honest = request(f"a{number}", key="alice")
        other = queue.in_the_way(honest)
        assert other is not None
        assert other.rid == f"m{3 - number}", "the newest"
        queue.remove(other)
        queue.add(LANES[0], honest)
        queue.validate()
    assert queue.in_the_way(request("a2", key="alice")) is None, "they have as much as each other"
    by_bytes = CentralQueue(max_requests=100, max_bytes=100)
    by_bytes.add(LANES[0], request("m", size=90, key="mallory"))
    assert by_bytes.in_the_way(request("a", size=20, key="alice")) is not None
    assert by_bytes.in_the_way(request("a", size=95, key="alice")) is None


def test_nothing_is_remembered_of_an_empty_queue() -> None:
    queue = CentralQueue(max_requests=10, max_bytes=1000)
    empty = retained(queue)
    for number in range(6):
        queue.add(LANES[number % 2], request(f"r{number}", key=f"k{number % 3}"))
    filled = retained(queue)
    assert len(served(queue)) == 6
    assert retained(queue) == empty < filled


def test_heads_of_lanes_go_by_priority_and_arrival() -> None:
    queue = CentralQueue(max_requests=100, max_bytes=1000)
    for rid, priority, lane in (("a", 0, 0), ("b", 0, 0), ("c", 0, 1), ("d", 1, 2), ("e", 0, 0), ("f", 0, 2)):
        queue.add(LANES[lane], request(rid, priority))
    order = []
    for head in queue.turns():
        queue.remove(head, served=True)
        order.append(head.rid)
    assert order == ["d", "a", "b", "c", "e", "f"]


def test_a_lane_whose_head_stays_is_left_for_the_others() -> None:
    queue = CentralQueue(max_requests=100, max_bytes=1000)
    for number in range(6):
        queue.add(LANES[number % 2], request(f"r{number}"))
    seen = []
    for head in queue.turns():
        seen.append(head.rid)
        if head.lane == LANES[1]:
            queue.remove(head, served=True)
    assert seen == ["r0", "r1", "r3", "r5"]


def test_behind_a_head_that_is_put_aside_its_lane_goes_on_with_other_clients() -> None:
    queue = CentralQueue(max_requests=100, max_bytes=1000)
    for number in range(6):
        queue.add(LANES[0], request(f"{'ab'[number % 2]}{number}", key="ab"[number % 2]))
    seen = []
    for head in queue.turns():
        seen.append(head.rid)
        if head.client == "a":
            head.aside = True
        else:
            queue.remove(head, served=True)
    assert seen == ["a0", "b1", "b3", "b5"]
