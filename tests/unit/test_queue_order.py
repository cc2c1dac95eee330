"""The orders of the central queue: who is next, how far others may overtake, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from retained import retained

from controller.requests.order import ArrivalOrder, PolicyOrder, SloOrder

SMALL = st.integers(1, 9)


class Item:
    count = 0

    def __init__(self, work: int, hopeful: bool = True, order: int = 0) -> None:
        Item.count += 1
        self.arrived = Item.count
        self.work = work
        self.order = order
        self.hopeful = hopeful


def hopeful(item: Item) -> bool:
    return item.hopeful


def drained(order: ArrivalOrder[Item], in_time: Callable[[Item], bool] = hopeful) -> list[Item]:
    left = []
    while len(order):
        left.append(order.head(in_time)[1])
        order.remove(left[-1])
    return left


def test_by_arrival_whatever_the_work() -> None:
    items = [Item(5), Item(1, hopeful=False), Item(3)]
    order = ArrivalOrder[Item]()
    for item in items:
        order.add(item)
    assert drained(order) == [*order, *items]


def test_what_can_be_in_time_goes_by_work_and_what_cannot_behind_it_by_arrival() -> None:
    late, long, short, also, later = Item(2, hopeful=False), Item(9), Item(1), Item(1), Item(1, hopeful=False)
    order = SloOrder[Item](1000)
    for item in (late, long, short, also, later):
        order.add(item)
    assert drained(order) == [short, also, long, late, later]


def test_who_becomes_late_while_it_waits_steps_aside() -> None:
    first, second, third = Item(1), Item(2), Item(3)
    order = SloOrder[Item](1000)
    for item in (third, first, second):
        order.add(item)
    first.hopeful = False
    assert order.head(hopeful)[1] is second
    first.hopeful = True
    assert order.head(hopeful)[1] is second, "once late is late for good"
    order.remove(second)
    assert drained(order) == [third, first]


def test_a_policy_orders_by_its_numbers_then_by_arrival_and_whatever_the_time() -> None:
    third, first, also, second = Item(1, order=9), Item(5, False, -4), Item(1, order=9), Item(9)
    order = PolicyOrder[Item](1000)
    for item in (third, first, also, second):
        order.add(item)
    assert drained(order) == [first, second, third, also]


def test_a_policy_cannot_keep_anyone_back_by_more_than_the_bound() -> None:
    last, *others = [Item(10, order=9 - number) for number in range(9)]
    order = PolicyOrder[Item](30)
    for item in (last, *others):
        order.add(item)
    assert drained(order).index(last) == 3


def test_it_may_come_back_with_other_work() -> None:
    order = SloOrder[Item](1000)
    again, other = Item(1), Item(5)
    order.add(again)
    order.remove(again)
    again.work, again.arrived = 9, other.arrived + 1
    for item in (again, other):
        order.add(item)
    assert drained(order) == [other, again]


@given(st.lists(st.tuples(SMALL, st.booleans(), st.integers(0, 3)), max_size=40), st.integers(1, 30))
def test_nobody_is_overtaken_by_more_than_the_bound(arrivals: list[tuple[int, bool, int]], bound: int) -> None:
    """Work served that came later, for whoever waits: the bound, and what was on its way when the bound was met."""
    order = SloOrder[Item](bound)
    overtaken: dict[Item, int] = {}
    came: list[Item] = []

    def serve() -> None:
        if len(order):
            _, head = order.head(hopeful)
            order.remove(head)
            del overtaken[head]
            for item in overtaken:
                if came.index(item) < came.index(head):
                    overtaken[item] += head.work
                    assert overtaken[item] < bound + 9

    for work, in_time, leave in arrivals:
        item = Item(work, in_time)
        came.append(item)
        overtaken[item] = 0
        order.add(item)
        for _ in range(leave):
            serve()
    while len(order):
        serve()


@given(st.lists(st.tuples(SMALL, st.booleans()), max_size=40), st.integers(1, 30))
def test_who_goes_away_makes_nobody_wait_longer(arrivals: list[tuple[int, bool]], bound: int) -> None:
    order = SloOrder[Item](bound)
    items = [Item(work) for work, _ in arrivals]
    for item in items:
        order.add(item)
    for item, (_, goes) in zip(items, arrivals, strict=True):
        if goes:
            order.remove(item)
    left = drained(order)
    assert {*left} == {item for item, (_, goes) in zip(items, arrivals, strict=True) if not goes}


def test_those_that_left_are_not_kept() -> None:
    """The long one at the head of the line never leaves; what passes by leaves nothing."""
    order = SloOrder[Item](1 << 40)
    order.add(Item(0))
    for _ in range(200):
        order.add(Item(5))
    for item in [*order][1:]:
        order.remove(item)
    before = retained(order)
    for _ in range(1000):
        item = Item(5)
        order.add(item)
        order.remove(item)
    assert retained(order) <= before
