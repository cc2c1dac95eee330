"""Why ranks were chosen: what `pdbus trace --why` shows of it, and for which requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from controller_world import World, hello, peer_of, submit

from bus.wire.messages import Cancel, HistoryQuery, HistoryReply, TraceEvent, TraceQuery, TraceReply
from controller.events import FromClient, FromNode

LARGE: dict[str, Any] = {"max_running": 1000, "kv_capacity": 100_000}
P = [hello("p", n, role="prefill", dp_size=3, **LARGE) for n in range(3)]
D = [hello("d", n, role="decode", dp_size=2, **LARGE) for n in range(2)]


def cluster(**settings: Any) -> World:
    methods = {"prefill_method": "total_tokens", "decode_method": "total_requests"}
    world = World(**{"explain": 1, **methods, **settings})
    for node in (*P, *D):
        world.join(node)
    for tokens, node in zip((300, 100, 200), P, strict=True):
        world.report(node, waiting=1, waiting_tokens=tokens)
    for node in D:
        world.report(node)
    return world


def run(world: World, rid: str) -> None:
    """A request from its submit to its end."""
    world.submit(submit(rid, "pair"))
    for node in (*D, *P):
        if legs := [leg for leg in world.dispatches(node) if leg.rid == rid]:
            world.progress(node, ended=legs)


def reasons(world: World, rid: str = "r") -> list[tuple[str, str | None, str]]:
    """What, of which leg, in which words; without asking ranks."""
    world.feed(FromClient("operator", TraceQuery(9, rid)))
    for node in (*P, *D):
        for query in world.sent(HistoryQuery, node)[-1:]:
            world.feed(FromNode(peer_of(node), HistoryReply(query.id)))
    events: list[TraceEvent] = [
        event for part in world.answers(TraceReply, "operator")[-1].parts for event in part.events
    ]
    return [(each.what, each.leg, each.detail) for each in events if each.what in ("weighed", "acknowledged")]


def test_the_chosen_rank_comes_first_then_the_others_by_cost() -> None:
    world = cluster()
    world.submit(submit("r", "pair"))
    assert reasons(world) == [
        ("weighed", "prefill", "total_tokens, in tokens at 3 candidates: p/1 100, p/2 200, p/0 300"),
        ("weighed", "decode", "total_requests, in requests at 2 candidates: d/0 0, d/1 0"),
    ]


def test_the_next_report_says_what_else_the_rank_had_and_the_least_loaded_one() -> None:
    world = cluster()
    world.submit(submit("r", "pair"))
    (leg,) = world.dispatches(P[1])
    world.report(P[1], waiting=2, waiting_tokens=950)  # it has not read the dispatch
    assert [what for what, *_ in reasons(world)] == ["weighed", "weighed"]
    world.report(P[1], waiting=3, waiting_tokens=950 + leg.charge, acks=[(world.core.epoch, 1, leg.charge)])
    assert reasons(world)[-1] == (
        "acknowledged", "prefill", "by its next report 950 tokens besides this request; the least loaded, p/2, 200",
    )  # fmt: skip
    assert not world.known(P[1]).explained


def test_what_compares_no_costs_says_how_it_was_chosen() -> None:
    world = cluster(prefill_method="follow_bootstrap_room", decode_method="round_robin")
    world.submit(submit("r", "pair", bootstrap_room=7))
    assert [words for _, _, words in reasons(world)] == [
        "follow_bootstrap_room: the rank of bootstrap_room 7",
        "round_robin, of 2 candidates; it compares no costs",
    ]
    world.submit(submit("s", "pair", bootstrap_room=8, routed_dp_rank=1))
    assert reasons(world, "s")[1][2] == "named by the caller"


@pytest.mark.parametrize(("one_in", "explained"), [(0, range(1)), (1, range(64, 65)), (4, range(8, 25))])
def test_one_request_in_so_many_is_explained_by_its_rid(one_in: int, explained: range) -> None:
    world = cluster(explain=one_in)
    found = 0
    for number in range(64):
        world.now += 0.001
        run(world, f"r{number}")
        found += bool(reasons(world, f"r{number}"))
    assert found in explained


def slo_world(**settings: Any) -> World:
    return cluster(explain=10**9, queue_order="slo", ttft_slo_s=1.0, late_tokens=10_000, **settings)


def first_token(world: World, rid: str, after_s: float, *, acked: bool = False) -> None:
    """A request whose first token comes so much later, and its end."""
    world.submit(submit(rid, "pair"))
    at = {node: leg for node in (*P, *D) for leg in world.dispatches(node) if leg.rid == rid}
    world.now += after_s
    for role in ("decode", "prefill"):
        (node,) = [node for node in at if node.role == role]
        world.progress(node, started=[at[node]])
        if acked:
            mine = world.dispatches(node)
            world.report(node, acks=[(world.core.epoch, len(mine), sum(leg.charge for leg in mine))])
    for node, leg in at.items():
        world.progress(node, ended=[leg])


def test_of_requests_with_an_slo_those_that_missed_it_keep_their_reasons() -> None:
    """Whichever rids they have, and though it was not known yet when they were placed."""
    world = slo_world()
    first_token(world, "kept", 0.9, acked=True)
    first_token(world, "missed", 1.1, acked=True)
    assert not reasons(world, "kept")
    assert [(what, leg) for what, leg, _ in reasons(world, "missed")] == [
        ("weighed", "prefill"), ("weighed", "decode"), ("acknowledged", "decode"), ("acknowledged", "prefill"),
    ]  # fmt: skip
    world.now += 10.0
    world.submit(submit("fails", "pair"))
    world.now += 2.0
    world.feed(FromClient("client", Cancel("fails")))
    assert [what for what, *_ in reasons(world, "fails")] == ["weighed", "weighed"]


def test_one_that_kept_its_slo_keeps_its_reasons_where_each_does_and_none_has_any_where_none_shall() -> None:
    world = slo_world()
    world.core.reconfigure(replace(world.core.config, explain=1))
    first_token(world, "kept", 0.5)
    assert [what for what, *_ in reasons(world, "kept")] == ["weighed", "weighed"]
    world.core.reconfigure(replace(world.core.config, explain=0))
    first_token(world, "missed", 1.5)
    assert not reasons(world, "missed")


def test_what_explanations_may_take_is_bounded_and_each_is_each() -> None:
    world = cluster(explain=2)
    for number in range(64):
        run(world, f"r{number}")  # all in one moment
    assert sum(bool(reasons(world, f"r{number}")) for number in range(64)) == 1
    world.core.reconfigure(replace(world.core.config, explain=1))
    for number in range(64, 80):
        run(world, f"r{number}")
    assert all(reasons(world, f"r{number}") for number in range(64, 80))
