"""What not every rank can do: prompts for decode, other KV caches, sampling parameters. Who gets which leg then."""

from __future__ import annotations

from typing import Any

import pytest
from controller_world import PARAMS, World, hello, prompt, submit
from msgspec.structs import replace

from bus.wire.messages import Failed, Hello

OWN = [replace(hello("p", n, role="prefill"), kv_layout="own") for n in range(2)]
OWN_D = [replace(hello("d", n, role="decode"), kv_layout="own") for n in range(2)]
NIXL = {"kv_transfer": "nixl", "kv_layout": "llama/fp16/32", "wants_prompt": True, "params": ("min_p", "logprobs")}
NIXL_P = replace(hello("vp", role="prefill", dp_size=1), **NIXL)
NIXL_D = replace(hello("vd", role="decode", dp_size=1), **NIXL)


def world_of(*nodes: Hello, **settings: Any) -> World:
    world = World(**{"prefill_method": "total_tokens", "decode_method": "total_requests", **settings})
    for node in nodes:
        world.join(node)
    return world


def ranks_of(world: World, rid: str) -> dict[str, str]:
    """Leg to instance."""
    return {
        action.message.leg: action.peer.split("/")[0]
        for action in world.to_nodes
        if getattr(action.message, "rid", "") == rid
    }


def test_a_decode_rank_that_wants_the_prompt_gets_it() -> None:
    """M51."""
    world = world_of(NIXL_P, NIXL_D)
    world.submit(submit("r", "pair"))
    frames = {action.message.leg: action.frames for action in world.to_nodes if hasattr(action.message, "rid")}
    assert frames == {"prefill": (prompt(10), PARAMS), "decode": (prompt(10), PARAMS)}


def test_ranks_that_cannot_exchange_kv_are_never_paired() -> None:
    """M77: whatever the load says."""
    world = world_of(*OWN, *OWN_D, NIXL_P, NIXL_D)
    for n in range(12):
        world.submit(submit(f"r{n}", "pair"))
    pairs = {tuple(sorted(ranks_of(world, f"r{n}").values())) for n in range(12)}
    assert pairs == {("d", "p"), ("vd", "vp")}
    counts = [len(world.dispatches(node)) for node in (*OWN, NIXL_P)]
    assert max(counts) - min(counts) <= 1, "the load is balanced over both kinds all the same"


def test_prefill_goes_where_decode_can_follow() -> None:
    world = world_of(*OWN, *OWN_D, NIXL_P)  # no decode rank of the second kind
    for n in range(6):
        world.submit(submit(f"r{n}", "pair"))
        assert ranks_of(world, f"r{n}") == {"prefill": "p", "decode": "d"}


def test_prefill_prefers_the_kind_whose_decode_ranks_have_room() -> None:
    world = world_of(replace(OWN[0], kv_capacity=100_000), replace(OWN_D[0], max_running=1), NIXL_P, NIXL_D)
    for n in range(6):
        world.submit(submit(f"r{n}", "pair"))
        assert ranks_of(world, f"r{n}"), "nobody waits while the other kind has room"


def test_who_waits_for_able_ranks_holds_up_nobody_else() -> None:
    world = world_of(hello("u", dp_size=1), replace(hello("v", dp_size=1, max_running=1), params=("min_p",)))
    for n in range(4):
        world.submit(submit(f"needs{n}", needs=("min_p",)))
    assert not ranks_of(world, "needs3")
    world.submit(submit("plain"))
    assert ranks_of(world, "plain") == {"unified": "u"}


def test_where_no_pair_fits_the_refusal_says_so_and_may_be_tried_again() -> None:
    world = world_of(*OWN, NIXL_D)
    world.submit(submit("r", "pair"))
    (failed,) = world.answers(Failed)
    assert (failed.code, failed.retryable) == ("no_rank", True)
    assert "exchange KV caches" in failed.message
    assert "the model at the same path" in failed.message, "what NIXL insists on, which nothing else tells"
    assert not world.dispatches()


def test_a_rank_that_states_no_layout_is_left_to_find_out() -> None:
    world = world_of(*OWN, hello("d", role="decode"))
    world.submit(submit("r", "pair"))
    assert ranks_of(world, "r") == {"prefill": "p", "decode": "d"}


def test_a_chosen_pair_that_does_not_fit_is_refused() -> None:
    world = world_of(*OWN, *OWN_D, NIXL_P, NIXL_D)
    world.submit(submit("r", "pair", instance="vd", prefill_instance="p", routed_dp_rank=0, disagg_prefill_dp_rank=1))
    (failed,) = world.answers(Failed)
    assert failed.code in ("bad_rank", "no_rank")
    assert "KV caches" in failed.message


def test_a_parameter_goes_to_ranks_that_know_it() -> None:
    """M78."""
    knows = replace(hello("v", dp_size=1), params=("min_p", "logprobs"))
    world = world_of(hello("u", 0), hello("u", 1), knows, unified_method="total_requests")
    for n in range(6):
        world.submit(submit(f"r{n}", needs=("min_p",)))
        assert ranks_of(world, f"r{n}") == {"unified": "v"}
    for n in range(6, 12):
        world.submit(submit(f"r{n}"))
    assert {ranks_of(world, f"r{n}")["unified"] for n in range(6, 12)} == {"u"}, "the others are less loaded now"


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (("typical_p",), "knows typical_p"),
        (("min_p", "typical_p"), "knows typical_p"),
        (("min_p", "n"), "knows all of"),
    ],
)
def test_what_no_rank_knows_is_refused_for_good(needs: tuple[str, ...], sentence: str) -> None:
    """M78."""
    world = world_of(
        replace(hello("u", dp_size=1), params=("n",)), replace(hello("v", dp_size=1), params=("min_p", "logprobs"))
    )
    world.submit(submit("r", needs=needs))
    (failed,) = world.answers(Failed)
    assert (failed.code, failed.retryable) == ("bad_request", False)
    assert sentence in failed.message


def test_a_fixed_rank_that_lacks_it_is_named() -> None:
    world = world_of(hello("u", 0), replace(hello("u", 1), params=("min_p",)))
    world.submit(submit("r", routed_dp_rank=0, needs=("min_p",)))
    (failed,) = world.answers(Failed)
    assert (failed.code, failed.message) == ("bad_rank", "rank u/0 does not know min_p")
    world.submit(submit("s", routed_dp_rank=1, needs=("min_p",)))
    assert ranks_of(world, "s") == {"unified": "u"}
