"""A prefill rank reads what the decode rank of the same request caches of the prompt, and computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from legs_world import PROMPT, VOCAB, Rank, World, start

from bus.wire.messages import CancelLeg, KvBlock, KvDone, KvMeta, KvPull, ReadBack
from nodes.link.read_back import LEND_S, READ_WAIT_S
from nodes.own.engines.sim import sim_generate
from nodes.own.runner import READ_STALL_S

SIZE = 4  # tokens of a block


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World) -> tuple[Rank, Rank]:
    return Rank(world, "prefill", "p", reads_back=True), Rank(world, "decode", "d", decode_cache=True, reads_back=True)


def lossy(world: World, lost: Callable[[Any], bool]) -> None:
    """Lose the messages of which `lost` is true, from now on."""
    world.tamper = lambda message, data: None if lost(message) else data


def conversation(world: World, pair: tuple[Rank, Rank], output: int = 8) -> list[int]:
    """Run a first turn and return the prompt of the second one: the decode rank caches more of it."""
    start(pair, "one", max_tokens=output)
    world.run(1.0)
    return [*PROMPT, *pair[1].tokens["one"], *range(100, 106)]


def is_reading(rank: Rank) -> bool:
    return any(leg.role == "prefill" and leg.kv_wanted for leg in rank.core.legs)


def computed(rank: Rank) -> int:
    return rank.scheduler.computed_tokens_total


def test_prefill_computes_only_what_neither_has(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = conversation(world, pair)
    assert len(prompt) == 25
    before = computed(pair[0])
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    assert pair[0].runner.load().waiting_tokens == 25 - 16, "what is read is not counted as work"
    world.run(1.0)
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert computed(pair[0]) - before == 25 - 16, "8 from its own cache, 8 from the decode rank"
    (end,) = pair[0].ended["two", 1]
    assert (end.code, end.cached_tokens) == ("ok", 16)
    assert [detail for _, what, detail in pair[0].core.history.of("two")[0].events if what == "read"] == [
        "8 tokens of the decode rank"
    ]
    assert all(rank.idle() for rank in pair)
    # and it keeps what it has read
    again = computed(pair[0])
    start(pair, "three", prompt[:20], bootstrap_room=7)
    world.run(1.0)
    assert computed(pair[0]) - again == 4


def test_a_prompt_that_is_all_cached_computes_its_last_token(world: World, pair: tuple[Rank, Rank]) -> None:
    other = Rank(world, "prefill", "q", reads_back=True)
    prompt = list(range(20, 20 + 3 * SIZE))
    start(pair, "one", prompt, max_tokens=2)
    world.run(1.0)
    start((other, pair[1]), "two", prompt, bootstrap_room=6, read_tokens=12)
    world.run(1.0)
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert computed(other) == SIZE, "the last block again, for its output"


@pytest.mark.parametrize("what", [KvPull, KvMeta, KvBlock, KvDone])
def test_what_is_lost_on_the_way_costs_time_and_nothing_else(world: World, pair: tuple[Rank, Rank], what: type) -> None:
    """Each first message of the read is lost; of those that do not come again, the prefill rank computes the rest."""
    prompt = conversation(world, pair)
    lost: list[Any] = []

    def lose(message: Any) -> bool:
        if (is_reading(pair[0]) or isinstance(message, KvDone)) and type(message) is what and not lost:
            lost.append(message)
        return bool(lost) and message is lost[-1]

    lossy(world, lose)
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(LEND_S + 2.0)
    assert len(lost) == 1
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert pair[0].ended["two", 1][0].cached_tokens == 16
    assert all(rank.idle() for rank in pair)


def test_a_decode_rank_that_does_not_answer_is_waited_for_in_bounds(world: World, pair: tuple[Rank, Rank]) -> None:
    """M97."""
    prompt = conversation(world, pair)
    lossy(world, lambda message: isinstance(message, KvMeta) and is_reading(pair[0]))
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(READ_WAIT_S - 0.2)
    assert pair[0].started == [("one", 1)]
    world.run(0.6)
    assert ("two", 1) in pair[0].started, "it computes what it lacks"
    world.run(LEND_S)
    assert pair[0].ended["two", 1][0].cached_tokens == 8
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert all(rank.idle() for rank in pair)


def test_blocks_that_stop_coming_are_computed_from_the_first_that_lacks(world: World, pair: tuple[Rank, Rank]) -> None:
    other = Rank(world, "prefill", "q", reads_back=True)
    prompt = conversation(world, pair)
    lossy(world, lambda message: isinstance(message, KvBlock) and message.index == 2)
    start((other, pair[1]), "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(4 * READ_STALL_S + 0.3)
    lossy(world, lambda message: False)
    world.run(3.0)
    assert other.ended["two", 1][0].cached_tokens == 8
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert all(rank.idle() for rank in (other, pair[1]))


def test_a_damaged_block_is_read_again(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = conversation(world, pair)
    damaged: list[int] = []

    def damage(message: Any, data: bytes) -> bytes:
        if isinstance(message, KvBlock) and message.index == 3 and not damaged:
            damaged.append(3)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    world.tamper = damage
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(1.0)
    assert damaged == [3]
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    assert pair[0].ended["two", 1][0].cached_tokens == 16


def test_the_question_may_come_before_the_decode_leg(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = conversation(world, pair)
    prefill, decode = pair
    prefill.dispatch("two", prompt, bootstrap_room=6, read_back=ReadBack(decode.location, 16))
    world.run(0.1)
    assert prefill.started == [("one", 1)]
    decode.read("two")
    decode.dispatch("two", prompt, bootstrap_room=6, prefill=prefill.location)
    world.run(0.1)
    assert prefill.ended["two", 1][0].cached_tokens == 16
    assert decode.tokens["two"] == sim_generate(prompt, 6, VOCAB)


def test_what_is_lent_is_not_evicted_and_an_end_takes_it_back(world: World, pair: tuple[Rank, Rank]) -> None:
    """M96."""
    prompt = conversation(world, pair)
    prefill, decode = pair
    lossy(world, lambda message: isinstance(message, KvBlock))
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(0.3)
    assert decode.pool.held == 4
    assert decode.scheduler.lend(99, [1, 2, 3]) == 0, "nothing of these is here"
    decode.do(decode.core.cancel(0, CancelLeg("two", 1), world.now))
    assert decode.pool.held == 0
    world.run(LEND_S)
    assert decode.idle()
    assert prefill.code("two") != "ok", "the decode leg is gone"


def test_a_rank_lends_half_of_its_memory_at_most(world: World) -> None:
    pair = (
        Rank(world, "prefill", "p", reads_back=True),
        Rank(world, "decode", "d", 8, decode_cache=True, reads_back=True),
    )
    prompt = list(range(20, 20 + 6 * SIZE))
    start(pair, "one", prompt, max_tokens=2)
    world.run(1.0)
    other = Rank(world, "prefill", "q", reads_back=True)
    start((other, pair[1]), "two", prompt, bootstrap_room=6, read_tokens=20)
    world.run(1.0)
    assert other.ended["two", 1][0].cached_tokens == 0, "5 of 8 blocks are more than half"
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)


def test_another_keys_question_gets_nothing(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = conversation(world, pair)
    prefill, decode = pair
    decode.read("two")
    decode.dispatch("two", prompt, bootstrap_room=6, prefill=prefill.location, client="alice")
    pull = KvPull(6, 1, decode.epoch, 0, 0, client="mallory")
    answers: list[Any] = []
    world.tamper = lambda message, data: answers.append(message)
    decode.do(decode.core.pulled(b"p", pull, world.now))
    assert [(type(answer), answer.ready) for answer in answers] == [(KvMeta, False)]
    assert decode.pool.held == 0


def test_a_cancel_while_it_reads_leaves_nothing(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = conversation(world, pair)
    prefill, decode = pair
    lossy(world, lambda message: isinstance(message, KvBlock))
    start(pair, "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(0.1)
    for rank in pair:
        rank.do(rank.core.cancel(0, CancelLeg("two", 1), world.now))
    world.run(0.1)
    assert prefill.idle()
    assert decode.idle()
    assert not prefill.pool.is_cached(0)
