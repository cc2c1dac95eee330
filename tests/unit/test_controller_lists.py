"""The requests that people look for first: which a status lists, and to whom."""

from __future__ import annotations

import pytest
from controller_world import World, hello, submit

from bus.rights import Known
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, MAX_LISTED, RequestLists, Status, StatusQuery
from controller.events import FromClient, Tick
from controller.requests.listed import LOOKED_AT, SPAN_S

U = hello("u", dp_size=1, max_running=1000, kv_capacity=1_000_000)
P, D = hello("p", role="prefill", dp_size=1), hello("d", role="decode", dp_size=1)


def world_of(*nodes: object, **settings: object) -> World:
    world = World(now=100.0, lease_s=1e6, hang_s=1e6, **settings)
    for node in nodes or (U,):
        world.join(node)  # type: ignore[arg-type]
        world.report(node)  # type: ignore[arg-type]
    return world


def known(key: str) -> Known:
    peer = Known(b"id")
    peer.key = key
    return peer


def lists(world: World, peer: object = "op") -> RequestLists:
    world.feed(FromClient(peer, StatusQuery(1, requests=True)))
    answer = world.answers(Status)[-1]
    assert codec.decode(codec.encode(answer), CONTROLLER_TO_CLIENT) == answer
    assert answer.requests is not None
    return answer.requests


def rids(some: tuple) -> list[str]:  # type: ignore[type-arg]
    return [each.rid for each in some]


def answer(world: World, rid: str, took_s: float, prompt_tokens: int = 10) -> None:
    """A request whose first token comes so much later, and which is over then."""
    world.submit(submit(rid, prompt_tokens=prompt_tokens))
    (leg,) = [leg for leg in world.dispatches(U) if leg.rid == rid]
    world.now += took_s
    world.progress(U, started=[leg])
    world.progress(U, ended=[leg])


def test_lists_come_to_those_who_ask_and_may_see_all() -> None:
    world = world_of()
    world.feed(FromClient("op", StatusQuery(1)))
    assert world.answers(Status)[-1].requests is None
    assert lists(world) == RequestLists()
    for key, shown in (("viewers/wall", True), ("clients/alice", False)):
        world.feed(FromClient(known(key), StatusQuery(2, requests=True)))
        assert (world.answers(Status)[-1].requests is not None) == shown


def test_what_runs_is_in_the_order_in_which_it_came_and_no_more_than_the_first() -> None:
    world = world_of()
    for number in range(MAX_LISTED + 5):
        world.submit(submit(f"r{number}", prompt_tokens=7 + number))
        world.now += 1.0
    (first, *rest) = [leg for leg in world.dispatches(U) if leg.rid in ("r0", "r3")]
    world.progress(U, started=[first])
    world.progress(U, ended=rest)
    running = lists(world).running
    assert rids(running) == [f"r{n}" for n in range(MAX_LISTED + 1) if n != 3]
    assert (running[0].came_us, running[0].first_token_s) == (100_000_000, 25.0)
    assert (running[1].came_us, running[1].first_token_s) == (101_000_000, 0.0)
    assert (running[1].prompt_tokens, running[1].ranks, running[1].model) == (8, ("u/0",), "m")
    assert not lists(world).waiting


def test_what_waits_is_listed_by_when_it_came_whoever_sent_it() -> None:
    world = world_of(hello("u", dp_size=1, max_running=1), request_overcommit=1.0)
    world.submit(submit("runs"))
    for number, key in enumerate(("a", "b", "a", "c")):
        world.now += 1.0
        world.submit(submit(f"{key}{number}"), peer=known(f"clients/{key}"))  # type: ignore[arg-type]
    seen = lists(world)
    assert (rids(seen.running), rids(seen.waiting)) == (["runs"], ["a0", "b1", "a2", "c3"])
    assert {each.ranks for each in seen.waiting} == {()}


def test_a_pair_has_both_ranks_and_one_that_was_taken_over_counts_from_there() -> None:
    world = world_of(P, D)
    world.submit(submit("pair", "pair"))
    assert lists(world).running[0].ranks == ("p/0", "d/0")
    heir = World(now=50.0)
    heir.join(hello("u", running=(("old", 1),)))
    heir.report(hello("u"))
    heir.now = 51.0
    heir.submit(submit("old"))
    (old,) = lists(heir).running
    assert (old.came_us, old.first_token_s) == (51_000_000, 0.0)


def test_the_slowest_of_the_last_quarter_of_an_hour_are_those_of_all_its_minutes() -> None:
    """Whatever came between, and as any would find them who kept all."""
    world = world_of()
    came: dict[str, tuple[float, float]] = {}
    for number in range(300):
        took_s = 0.01 * ((number * 7919) % 313)
        answer(world, f"r{number}", took_s)
        came[f"r{number}"] = took_s, world.now
        world.now += 4.0
        world.feed(Tick())
    here = {rid: took_s for rid, (took_s, at) in came.items() if at >= world.now - SPAN_S}
    assert len(here) < 300
    found = lists(world).slowest
    assert rids(found) == sorted(here, key=lambda rid: -here[rid])[:MAX_LISTED]
    assert [each.first_token_s for each in found] == [pytest.approx(here[each.rid]) for each in found]
    assert all(each.ranks == ("u/0",) for each in found)
    world.now += SPAN_S
    assert not lists(world).slowest


def test_one_whose_first_token_was_later_than_its_slo_says_so() -> None:
    world = world_of(queue_order="slo", ttft_slo_s=1.0)
    answer(world, "kept", 0.9)
    answer(world, "missed", 1.1)
    world.submit(submit("still"))
    world.now += 2.0
    seen = lists(world)
    assert [(each.rid, each.late) for each in seen.slowest] == [("missed", True), ("kept", False)]
    assert [(each.rid, each.late) for each in seen.running] == [("still", True)]


def test_lists_look_at_a_bounded_number_of_requests() -> None:
    """They look at no more running requests than they list, and at a bounded number of those that wait."""
    world = world_of()
    looked = 0

    class Counting(dict):  # type: ignore[type-arg]
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal looked
            for value in super().values():
                looked += 1
                yield value

    for number in range(3 * MAX_LISTED):
        world.submit(submit(f"r{number}"))
    world.core.life.listed._requests = Counting(world.core.life.requests)
    assert len(lists(world).running) == MAX_LISTED
    assert looked <= MAX_LISTED + 1
    assert LOOKED_AT <= 4096
