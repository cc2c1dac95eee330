"""What a rank reports of its KV memory by kind, and of the KV bytes that it has moved."""

from __future__ import annotations

from typing import Any

import pytest
from legs_world import PROMPT, Rank, World, start
from msgspec.structs import replace

from bus.wire import codec
from bus.wire.messages import PUBLICATIONS, CancelLeg, Load, LoadReport
from nodes.link.actions import Start
from nodes.link.leg import Leg
from nodes.link.runner import Began, Held, RankFacts
from nodes.link.threaded_runner import LoadUpdate, ThreadedRunner

SIZE = 4  # tokens of a block
BLOCK_BYTES = 4 * 4


@pytest.fixture
def world() -> World:
    return World()


def memory(load: Load) -> tuple[int, int | None, int | None]:
    return load.kv_tokens, load.kv_cached, load.kv_pinned


def moved(load: Load) -> tuple[int | None, int | None]:
    return load.kv_sent_bytes_total, load.kv_received_bytes_total


def test_a_prompt_is_pinned_from_its_computation_until_it_is_fetched_and_then_cached(world: World) -> None:
    prefill, decode = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    prefill.dispatch("r", PROMPT)
    assert memory(prefill.core.load()) == (0, 0, 0), "nothing is computed yet"
    world.run(0.5)
    assert memory(prefill.core.load()) == (11, 0, 11)
    prefill.dispatch("s", PROMPT, bootstrap_room=6)
    world.run(0.5)
    assert memory(prefill.core.load()) == (16, 0, 16), "two full blocks are shared: 11 and 3 tokens in four blocks"
    decode.read("r")
    decode.dispatch("r", PROMPT, prefill=prefill.location, max_tokens=100)
    world.run(0.3)
    assert memory(prefill.core.load()) == (11, 0, 11), "the other one is held still"
    held, _, pinned = memory(decode.core.load())
    assert held > 11
    assert pinned == 0
    assert moved(prefill.core.load()) == moved(decode.core.load())[::-1] == (3 * BLOCK_BYTES, 0)
    prefill.do(prefill.core.cancel(0, CancelLeg("s", 1), world.now))
    assert memory(prefill.core.load()) == (0, 8, 0), "the full blocks are named"


def queue(rank: Rank) -> tuple[int, int | None]:
    load = rank.core.load()
    return load.waiting_tokens, load.to_compute_tokens


def test_a_prompt_that_another_rank_computes_waits_and_is_not_to_be_computed(world: World) -> None:
    prefill, decode = Rank(world, "prefill", "p"), Rank(world, "decode", "d", decode_cache=True)
    start((prefill, decode), "r", max_tokens=100)
    assert queue(prefill) == (11, 11)
    assert queue(decode) == (11, 0)
    decode.dispatch("s", PROMPT, bootstrap_room=6, leg="unified")
    assert queue(decode) == (22, 11)
    world.run(1.0)
    assert queue(prefill) == queue(decode) == (0, 0)


def test_what_a_decode_rank_lends_is_pinned_and_neither_live_nor_cached(world: World) -> None:
    prefill = Rank(world, "prefill", "p", reads_back=True)
    decode = Rank(world, "decode", "d", decode_cache=True, reads_back=True)
    start((prefill, decode), "one", max_tokens=8)
    world.run(1.0)
    prompt = [*PROMPT, *decode.tokens["one"], 100, 101]
    cached = decode.core.load().kv_cached
    assert cached == 16
    seen: list[tuple[int, int | None, int | None]] = []

    def look(message: Any, data: bytes) -> bytes:
        seen.append(memory(decode.core.load()))
        return data

    world.tamper = look
    start((prefill, decode), "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(1.0)
    assert (0, 0, 16) in seen
    assert memory(decode.core.load())[2] == 0
    assert moved(prefill.core.load()) == moved(decode.core.load())[::-1]
    assert moved(decode.core.load())[0] == 2 * BLOCK_BYTES, "8 tokens were read back"


def test_a_damaged_block_is_counted_as_often_as_it_came(world: World) -> None:
    pair = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    damage = [b"\1" * BLOCK_BYTES]
    world.tamper = lambda message, data: damage.pop() if data and damage else data
    start(pair)
    world.run(1.0)
    assert not damage
    assert moved(pair[1].core.load()) == (0, 4 * BLOCK_BYTES)


def test_an_engine_with_a_connector_of_its_own_says_only_what_is_pinned(world: World) -> None:
    facts = RankFacts(
        model="m", max_context=100, kv_capacity=1000, max_running=4, block_tokens=4, vocab_size=512, eos_ids=(),
        kv_layout="l", kv_transfer="theirs",
    )  # fmt: skip
    started: list[Leg] = []
    runner = ThreadedRunner(facts, lambda leg, order: started.append(leg) if isinstance(order, Start) else None)
    rank = Rank(world, "prefill", "p", runner=runner)
    rank.dispatch("r", PROMPT)
    (leg,) = started
    assert queue(rank) == (11, 11)
    runner.on_event(Began(leg))
    assert queue(rank) == (0, 0)
    assert memory(rank.core.load()) == (11, None, 0)
    for _ in range(2):  # the second one is invalid, and the leg is over
        assert memory(rank.core.load())[2] == 0
        runner.on_event(Held(leg, 1, b"handle", 60.0))
        if leg.live:
            assert memory(rank.core.load()) == (11, None, 11)
            assert moved(rank.core.load()) == (None, None)
            runner.on_event(LoadUpdate(kv_tokens=-4))
            assert memory(rank.core.load()) == (7, None, 7), "never more than is held at all"
            rank.do(rank.core.cancel(0, CancelLeg("r", 1), world.now))
    assert memory(rank.core.load()) == (0, None, 0)


def test_who_does_not_say_one_is_no_rank_with_none() -> None:
    """A peer of an earlier version says none of them; nil on the wire is no 0."""
    load = Load(seq=1, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=9, max_running=1)
    whole = codec.encode(LoadReport("i", 0, 1, 1, replace(load, kv_pinned=0)))
    said = codec.decode(whole, PUBLICATIONS).load  # type: ignore[attr-defined]
    assert memory(said) == (0, None, 0)
    fields = codec.unpack(whole[1:])  # type: ignore[index]
    assert isinstance(fields, list)
    fields[-1] = fields[-1][:18]
    old = codec.decode(whole[:1] + codec.pack(fields), PUBLICATIONS).load  # type: ignore[attr-defined]
    assert (memory(old), moved(old)) == ((0, None, None), (None, None))
