"""What a status says of latencies, restarts and since when, over requests of every kind."""

from __future__ import annotations

import pytest
from controller_world import D, P, U, World, hello, pd, submit, unified

from bus.histogram import quantile
from bus.wire.messages import RankStatus, Status, StatusQuery
from controller.events import FromClient


def shown(world: World, instance: str, dp_rank: int = 0) -> RankStatus:
    world.feed(FromClient("op", StatusQuery(1), ()))
    ranks = world.answers(Status)[-1].ranks
    return next(rank for rank in ranks if (rank.instance, rank.dp_rank) == (instance, dp_rank))


def near(counts: tuple[int, ...], seconds: float) -> bool:
    """Whether one value was counted, of about `seconds`."""
    middle = quantile(counts, 0.5)
    return sum(counts) == 1 and middle is not None and 0.6 * seconds < middle < 1.5 * seconds


def test_a_pair_counts_at_both_its_ranks() -> None:
    world = pd()
    world.submit(submit("r", "pair"))
    (prefill,), (decode,) = world.dispatches(P[0]), world.dispatches(D[0])
    world.now += 0.4
    world.progress(D[0], started=[decode])
    world.progress(D[0], started=[decode])  # said again
    world.progress(P[0], ended=[prefill], first_token_s=0.25)
    world.now += 0.9
    world.progress(D[0], ended=[decode], output_tokens=10)
    assert near(shown(world, "p").ttft_counts, 0.25), "as the prefill rank says"
    assert near(shown(world, "d").ttft_counts, 0.4), "from the submit on"
    assert near(shown(world, "d").tpot_counts, 0.1)
    assert shown(world, "p").tpot_counts == shown(world, "d", 1).ttft_counts == ()


def test_time_in_the_queue_counts_and_failures_do_not() -> None:
    world = unified(hello("u", max_running=1), request_overcommit=1.0)
    for rid in ("a", "b"):
        world.submit(submit(rid))
    (first,) = world.dispatches(U[0])
    world.now += 3.9
    world.progress(U[0], ended=[first], code="bad_request")
    world.report(U[0], acks=[(77, 1, 10)])
    second = world.dispatches(U[0])[-1]
    assert second.rid == "b"
    world.progress(U[0], started=[second], ended=[second], output_tokens=5)
    assert near(shown(world, "u").ttft_counts, 3.9)
    assert shown(world, "u").tpot_counts == (), "reported together: no time between its tokens is known"


@pytest.mark.parametrize("how", ["resumed", "adopted"])
def test_what_began_elsewhere_tells_no_latency(how: str) -> None:
    world = unified(hello("u", running=(("r", 1),) if how == "adopted" else ()))
    world.report(U[0])
    world.submit(submit("r", offset=3 if how == "resumed" else 0))
    (dispatch,) = world.dispatches(U[0])
    assert world.core.counts["adopted"] == (how == "adopted")
    world.now += 1.0
    world.progress(U[0], started=[dispatch])
    world.now += 1.0
    world.progress(U[0], ended=[dispatch], output_tokens=2)
    assert shown(world, "u").ttft_counts == ()
    assert sum(shown(world, "u").tpot_counts) == (how == "resumed")


def test_restarts_and_since_when() -> None:
    world = unified(U[0])
    world.submit(submit("r"))
    (dispatch,) = world.dispatches(U[0])
    world.progress(U[0], started=[dispatch])
    world.now = 5.0
    world.cut(U[0])
    world.now = 7.0
    rank = shown(world, "u")
    assert (rank.state, rank.state_age_s, rank.epoch_age_s, rank.restarts) == ("lost", 2.0, 7.0, 0)
    world.join(hello("u", epoch=2))
    world.now = 8.0
    rank = shown(world, "u")
    assert (rank.state, rank.state_age_s, rank.epoch_age_s, rank.restarts) == ("ready", 1.0, 1.0, 1)
    assert sum(rank.ttft_counts) == 1, "of all its starts"
