"""Who waits is overtaken in no lane by what came later, as far as the order allows, whatever competes for its ranks."""

from __future__ import annotations

from typing import Any

from controller_world import EPOCH, PARAMS, World, hello, prompt, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.rights import Known
from bus.wire.messages import Submit
from controller.events import FromClient

PENALTY = "presence_penalty"
LARGE = replace(hello("large", dp_size=1, max_running=1), params=(PENALTY,))
SMALL = hello("small", dp_size=1, max_running=2, max_context=50, kv_capacity=50)
KINDS: list[dict[str, Any]] = [
    {},
    {"model": "m"},
    {"needs": (PENALTY,)},
    {"instance": "large"},
    {"prompt_tokens": 100},
    {"avoid": (("small", 0),)},
]
ARRIVALS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 30)), min_size=5, max_size=40)


class Queue:
    """Two unified ranks, or the large one alone, that take what they have places for."""

    def __init__(self, *nodes: Any, **more: Any) -> None:
        self.world = World(request_overcommit=1.0, unified_method="total_requests", late_tokens=1 << 40, **more)
        for node in nodes:
            self.world.join(node)
            self.world.report(node)
        self.submits: dict[str, Submit] = {}  # in the order that they came

    def ask(self, more: dict[str, Any], tokens: int, client: str = "") -> None:
        peer = Known(b"c")
        peer.key = client and f"clients/{client}"
        rid = f"r{len(self.submits)}"
        self.submits[rid] = submit(rid, **({"prompt_tokens": tokens, "priority": 0} | more))
        tokens = self.submits[rid].prompt_tokens
        self.world.feed(FromClient(peer, self.submits[rid], (prompt(tokens), PARAMS)))

    def serve(self, node: Any) -> bool:
        """One of those at `node` ends; False: none is there."""
        rank = self.world.rank(node)
        live = [each for each in self.world.dispatches(node) if each.rid in self.world.work(node)]
        if live:
            self.world.progress(node, started=live[:1], ended=live[:1])
            self.world.report(node, acks=[(EPOCH, rank.sent, rank.sent_tokens)], running=len(live) - 1)
        return bool(live)


def takes(node: Any, asked: Submit) -> bool:
    return (
        asked.prompt_tokens + asked.max_tokens <= node.max_context
        and asked.instance in ("", node.instance)
        and set(node.params) >= set(asked.needs)
        and (node.instance, 0) not in asked.avoid
    )


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.data())
def test_a_rank_takes_the_first_that_came_of_all_that_it_can_take(arrivals: list[Any], data: st.DataObject) -> None:
    queue = Queue(LARGE, SMALL)
    world, taken = queue.world, 0

    def check() -> None:
        nonlocal taken
        waiting = {request.rid for request in world.core.life.queue}
        for dispatch in world.dispatches()[taken:]:
            node = next(each for each in (LARGE, SMALL) if dispatch in world.dispatches(each))
            came = list(queue.submits).index(dispatch.rid)
            earlier = [rid for rid in list(queue.submits)[:came] if rid in waiting and takes(node, queue.submits[rid])]
            assert not earlier, f"{dispatch.rid} went to {node.instance} before {earlier}"
        taken = len(world.dispatches())

    world.after = check
    for kind, tokens in arrivals:
        queue.ask(kind, tokens)
        if data.draw(st.booleans()):
            queue.serve(data.draw(st.sampled_from([LARGE, SMALL])))
    while queue.serve(LARGE) or queue.serve(SMALL):
        pass
    assert len(world.dispatches()) == len(queue.submits)


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.integers(1, 200))
def test_none_is_overtaken_by_more_than_the_bound_by_all_lanes_together(arrivals: list[Any], bound: int) -> None:
    queue = Queue(LARGE, queue_order="slo", overtake_tokens=bound)
    asked = [(kind, tokens) for kind, tokens in arrivals if "avoid" not in kind]
    for kind, tokens in asked:
        queue.ask(kind, tokens)
        if len(queue.submits) % 2:
            queue.serve(LARGE)
    while queue.serve(LARGE):
        pass
    order = [dispatch.rid for dispatch in queue.world.dispatches()]
    came = list(queue.submits)
    assert sorted(order) == sorted(came)
    work = {rid: each.prompt_tokens for rid, each in queue.submits.items()}
    for at, rid in enumerate(order):
        later = [each for each in order[:at] if came.index(each) > came.index(rid)]
        assert sum(work[each] for each in later[:-1]) < bound, f"{rid} was overtaken by {later}"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS[:5]), st.sampled_from("abc")), min_size=12, max_size=40))
def test_clients_take_turns_over_all_lanes(arrivals: list[Any]) -> None:
    queue = Queue(LARGE)
    for kind, client in arrivals:
        queue.ask(kind | {"prompt_tokens": 10}, 10, client)
    before = len(queue.world.dispatches())
    waiting = {client: sum(r.client == f"clients/{client}" for r in queue.world.core.life.queue) for client in "abc"}
    rounds = min(count for count in waiting.values() if count) if any(waiting.values()) else 0
    clients = [client for client, count in waiting.items() if count]
    for _ in range(rounds * len(clients)):
        queue.serve(LARGE)
    owners = [arrivals[int(each.rid[1:])][1] for each in queue.world.dispatches()[before:]]
    assert {owners.count(client) for client in clients} <= {rounds}, owners
