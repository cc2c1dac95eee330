"""A decode rank with a prefix cache: it fetches only what it lacks, keeps what it generated, and computes the prompts
of unified legs."""

from __future__ import annotations

import pytest
from legs_world import PROMPT, VOCAB, Rank, World, start

from bus.wire.messages import CancelLeg, KvBlock, Params
from nodes.own.engines.sim import sim_generate

SIZE = 4  # tokens of a block


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World) -> tuple[Rank, Rank]:
    return Rank(world, "prefill", "p"), Rank(world, "decode", "d", decode_cache=True)


def moved(world: World) -> list[int]:
    """Return the list in which the numbers of all blocks that travel from now on will be."""
    blocks: list[int] = []

    def see(message: object, data: bytes) -> bytes:
        if isinstance(message, KvBlock):
            blocks.append(message.index)
        return data

    world.tamper = see
    return blocks


def next_turn(prompt: list[int], output: list[int], new: int = 6) -> list[int]:
    return [*prompt, *output, *range(100, 100 + new)]


def test_the_next_turn_fetches_only_what_is_not_there(world: World, pair: tuple[Rank, Rank]) -> None:
    start(pair, "one", max_tokens=8)
    world.run(1.0)
    output = pair[1].tokens["one"]
    assert output == sim_generate(PROMPT, 8, VOCAB)
    prompt = next_turn(PROMPT, output)
    blocks = moved(world)
    start(pair, "two", prompt, bootstrap_room=6)
    world.run(1.0)
    assert pair[1].tokens["two"] == sim_generate(prompt, 6, VOCAB)
    known = (len(PROMPT) + len(output) - 1) // SIZE  # the last token's KV was never computed
    assert blocks == list(range(known, -(-len(prompt) // SIZE)))
    assert pair[1].ended["two", 1][0].cached_tokens == known * SIZE
    assert all(rank.idle() for rank in pair)


def test_a_prompt_that_is_all_there_fetches_its_last_block(world: World, pair: tuple[Rank, Rank]) -> None:
    prompt = list(range(20, 20 + 3 * SIZE))
    start(pair, "one", prompt)
    world.run(1.0)
    blocks = moved(world)
    start(pair, "again", prompt, bootstrap_room=6)
    world.run(1.0)
    assert blocks == [2], "the prefill rank computes the last token again too"
    assert pair[1].tokens["again"] == pair[1].tokens["one"] == sim_generate(prompt, 6, VOCAB)


def test_it_computes_the_prompt_of_a_unified_leg_from_what_it_has(world: World, pair: tuple[Rank, Rank]) -> None:
    decode = pair[1]
    start(pair, "one", max_tokens=8)
    world.run(1.0)
    prompt = next_turn(PROMPT, decode.tokens["one"])
    blocks = moved(world)
    decode.read("two")
    decode.dispatch("two", prompt, leg="unified", bootstrap_room=6)
    world.run(1.0)
    assert decode.tokens["two"] == sim_generate(prompt, 6, VOCAB)
    (end,) = decode.ended["two", 1]
    assert (end.leg, end.code, end.cached_tokens, end.found_by) == ("unified", "ok", 16, "local")
    assert not blocks
    assert all(rank.idle() for rank in pair)
    start(pair, "three", next_turn(prompt, decode.tokens["two"]), bootstrap_room=7)
    world.run(1.0)
    assert decode.ended["three", 1][0].cached_tokens == 28, "what it computed itself is kept as well"


def test_without_a_cache_it_takes_no_unified_leg_and_no_prompt(world: World) -> None:
    pair = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    assert (pair[1].runner.facts.prefills, pair[1].runner.facts.wants_prompt) == (False, False)
    start(pair, "one")
    world.run(1.0)
    blocks = moved(world)
    start(pair, "two", bootstrap_room=6)
    pair[1].dispatch("three", PROMPT, leg="unified", bootstrap_room=7)
    world.run(1.0)
    assert blocks == [0, 1, 2]
    (end,) = pair[1].ended["three", 1]
    assert (end.code, end.leg, end.message) == ("bad_request", "unified", "a unified leg for a decode rank")


def test_a_prefill_rank_takes_no_unified_leg(world: World, pair: tuple[Rank, Rank]) -> None:
    pair[0].dispatch("one", PROMPT, leg="unified")
    assert pair[0].code("one") == "bad_request"


def test_salted_prompts_share_nothing(world: World, pair: tuple[Rank, Rank]) -> None:
    for number, salt in enumerate(("", "a", "b", "a")):
        start(pair, f"r{number}", params=Params(cache_salt=salt), bootstrap_room=number)
        world.run(1.0)
    assert [pair[1].ended[f"r{number}", 1][0].cached_tokens for number in range(4)] == [0, 0, 0, 8]


def test_blocks_of_a_fetch_that_is_cancelled_have_no_name(world: World, pair: tuple[Rank, Rank]) -> None:
    decode = pair[1]
    world.tamper = lambda message, data: None if isinstance(message, KvBlock) and message.index else data
    start(pair, "one")
    world.run(0.5)
    assert decode.scheduler.running == 1, "one of its three blocks has come"
    decode.do(decode.core.cancel(0, CancelLeg("one", 1), world.now))
    assert not decode.pool.cached
    blocks = moved(world)
    start(pair, "two", bootstrap_room=6)
    world.run(1.0)
    assert blocks == [0, 1, 2]
    assert decode.tokens["two"] == sim_generate(PROMPT, 6, VOCAB)


def test_a_block_in_use_by_another_is_never_fetched_into(world: World, pair: tuple[Rank, Rank]) -> None:
    """Two turns at once share the blocks of the first one's prompt."""
    decode = pair[1]
    start(pair, "one", max_tokens=40)
    world.run(0.05)
    start(pair, "two", bootstrap_room=6, max_tokens=40)
    world.run(5.0)
    assert decode.tokens["one"] == decode.tokens["two"] == sim_generate(PROMPT, 40, VOCAB)
    assert decode.ended["two", 1][0].cached_tokens == 8


def test_what_waits_for_prefill_counts_what_the_rank_lacks(world: World, pair: tuple[Rank, Rank]) -> None:
    """As its controller has charged it: with the whole prompt a rank that keeps a conversation looked busy with it."""
    start(pair, "one", max_tokens=8)
    world.run(1.0)
    decode = pair[1]
    prompt = next_turn(PROMPT, decode.tokens["one"])
    decode.dispatch("two", prompt, bootstrap_room=6, charge=len(prompt) - 16)
    assert (decode.core.load().waiting, decode.core.load().waiting_tokens) == (1, len(prompt) - 16)
    decode.do(decode.core.cancel(0, CancelLeg("two", 1), world.now))
    assert (decode.core.load().waiting, decode.core.load().waiting_tokens) == (0, 0)
    decode.dispatch("three", prompt, bootstrap_room=7, charge=10_000)
    assert decode.core.load().waiting_tokens == len(prompt), "it is never more than the prompt"
