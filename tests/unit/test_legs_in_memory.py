"""Prefill, decode and unified cores with sim engines, joined in memory: what each leg gives and how it ends."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from typing import Any

import pytest
from legs_world import PROMPT, VOCAB, Rank, World, start

from bus.wire.codec import encode
from bus.wire.codes import Refusal
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    Ack,
    Attach,
    CancelLeg,
    Detach,
    Dispatch,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Params,
    Role,
    Tokens,
)
from nodes.link.actions import SendBlock, Unregister
from nodes.link.config import Limits
from nodes.link.leg import Leg, leg_of
from nodes.link.reports import MAX_ACKS, Reports
from nodes.link.runner import Finished, LegFailed, Output, RankFacts
from nodes.own.engines.sim import sim_generate


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World) -> tuple[Rank, Rank]:
    return Rank(world, "prefill", "p"), Rank(world, "decode", "d")


def test_a_pair_gives_the_tokens_of_the_reference(world: World, pair: tuple[Rank, Rank]) -> None:
    """M35: and every pull names the epoch that was located."""
    prefill, decode = pair
    asked: list[KvPull] = []
    world.tamper = lambda message, data: asked.append(message) or data if isinstance(message, KvPull) else data
    start(pair)
    world.run(1.0)
    assert asked[0] == KvPull(5, 1, prefill.epoch, 0, 0, asked=1), "of no block, for none is computed yet"
    assert len(asked) > 1
    assert {pull.epoch for pull in asked} == {prefill.epoch}
    assert decode.tokens["r"] == sim_generate(PROMPT, 6, VOCAB)
    assert decode.finishes["r"].finish == "length"
    assert (prefill.code("r"), decode.code("r")) == ("ok", "ok")
    assert decode.ended["r", 1][0].found_by == "told"
    assert prefill.idle()
    assert decode.idle()
    assert prefill.dropped == [Unregister(5, 1, "ok")]


def test_a_batch_of_mixed_lengths_through_the_pair_equals_the_unified_rank(
    world: World, pair: tuple[Rank, Rank]
) -> None:
    unified = Rank(world, "unified", "u")
    prompts = {f"r{n}": [3 + (n * 31 + i * 7) % 500 for i in range(n * 3 + 1)] for n in range(14)}
    for number, (rid, prompt) in enumerate(prompts.items()):
        start(pair, rid, prompt, bootstrap_room=number, max_tokens=number + 1)
        unified.read(rid)
        unified.dispatch(rid, prompt, max_tokens=number + 1)
    world.run(5.0)
    for number, (rid, prompt) in enumerate(prompts.items()):
        assert pair[1].tokens[rid] == sim_generate(prompt, number + 1, VOCAB)
        assert unified.tokens[rid] == pair[1].tokens[rid]
    assert all(rank.idle() for rank in world.ranks.values())


def test_decode_finds_the_room_through_the_bus(world: World, pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prefill.dispatch("p-side", PROMPT)
    decode.read("d-side")
    decode.dispatch("d-side", PROMPT, attempt=3)  # its controller counts attempts on its own
    decode.streams.attach(b"client", Attach("d-side", 3), world.now)
    world.run(1.0)
    assert decode.tokens["d-side"] == sim_generate(PROMPT, 6, VOCAB)
    assert decode.ended["d-side", 3][0].found_by == "asked"
    assert prefill.code("p-side") == "ok"


def test_one_token_needs_no_kv(world: World, pair: tuple[Rank, Rank]) -> None:
    start(pair, max_tokens=1)
    world.run(1.0)
    prefill, decode = pair
    assert decode.tokens["r"] == sim_generate(PROMPT, 1, VOCAB)
    assert prefill.code("r") == decode.code("r") == "ok"
    assert decode.sent["KvPull"] == 1
    assert prefill.idle()


def test_a_damaged_block_is_fetched_again(world: World, pair: tuple[Rank, Rank]) -> None:
    """M65."""
    damaged = []

    def damage(message: Any, data: bytes) -> bytes:
        if isinstance(message, KvBlock) and message.index == 1 and not damaged:
            damaged.append(message)
            return b"\xff" + data[1:]
        return data

    world.tamper = damage
    start(pair)
    world.run(1.0)
    assert damaged
    assert pair[1].tokens["r"] == sim_generate(PROMPT, 6, VOCAB)
    assert pair[1].core.counts["kv_block_damaged"] == 1


def test_blocks_swapped_on_the_way_are_noticed(world: World, pair: tuple[Rank, Rank]) -> None:
    """M65."""
    held: dict[int, bytes] = {}
    swapped = []

    def swap(message: Any, data: bytes) -> bytes:
        if isinstance(message, KvBlock) and not swapped:
            held[message.index] = data
            if message.index == 1:
                swapped.append(True)
                return held[0]
        return data

    world.tamper = swap
    start(pair)
    world.run(1.0)
    assert pair[1].core.counts["kv_block_damaged"] == 1
    assert pair[1].tokens["r"] == sim_generate(PROMPT, 6, VOCAB)


def test_a_lost_block_is_asked_for_again_after_a_stall(world: World, pair: tuple[Rank, Rank]) -> None:
    lost = []

    def lose(message: Any, data: bytes) -> bytes | None:
        if isinstance(message, KvBlock) and message.index == 2 and not lost:
            lost.append(message)
            return None
        return data

    world.tamper = lose
    start(pair)
    world.run(4.0)
    assert lost
    assert pair[1].tokens["r"] == sim_generate(PROMPT, 6, VOCAB)


def test_kv_that_never_arrives_intact_fails_both_legs(world: World, pair: tuple[Rank, Rank]) -> None:
    """M65: blocks that are short."""
    world.tamper = lambda message, data: data[:-1] if isinstance(message, KvBlock) else data
    start(pair)
    world.run(2.0)
    prefill, decode = pair
    assert decode.code("r") == "kv_failed"
    (note,) = [note for note in decode.notes if note.event == "leg.ended"]
    assert note.fields.items() >= {"rid": "r", "attempt": 1, "leg": "decode", "room": 5, "code": "kv_failed"}.items()
    assert decode.finishes["r"].code == "kv_failed"
    assert prefill.code("r") == "decode_failed"
    assert prefill.idle()
    assert decode.idle()


def test_blocks_that_never_arrive_fail_after_bounded_stalls(world: World, pair: tuple[Rank, Rank]) -> None:
    world.tamper = lambda message, data: None if isinstance(message, KvBlock) else data
    start(pair)
    world.run(15.0)
    assert pair[1].code("r") == "kv_failed"
    assert pair[1].idle()
    assert pair[0].idle()


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.02, 0.03, 0.05])
@pytest.mark.parametrize("side", [0, 1])
def test_a_cancel_at_any_moment_ends_both_legs_and_frees_everything(
    world: World, pair: tuple[Rank, Rank], after_s: float, side: int
) -> None:
    """M48."""
    start(pair, max_tokens=50)
    world.run(after_s)
    rank = pair[side]
    rank.do(rank.core.cancel(0, CancelLeg("r", 1), world.now))
    world.run(20.0)
    assert rank.code("r") in ("cancelled", "ok")
    assert pair[1 - side].code("r")
    assert pair[0].idle()
    assert pair[1].idle()
    wanted = sim_generate(PROMPT, 50, VOCAB)
    assert pair[1].tokens["r"] == wanted[: len(pair[1].tokens["r"])]


def test_a_lost_prefill_rank_ends_the_decode_legs_that_still_fetch_and_no_others(
    world: World, pair: tuple[Rank, Rank]
) -> None:
    prefill, decode = pair
    lost = CancelLeg("r", 1, "prefill_failed", if_unfetched=True)
    world.tamper = lambda message, data: None if isinstance(message, KvBlock) else data
    start(pair, max_tokens=50)
    world.run(0.1)
    assert decode.tokens["r"] == sim_generate(PROMPT, 1, VOCAB)
    prefill.dead = True
    decode.do(decode.core.cancel(0, lost, world.now))
    assert decode.code("r") == "prefill_failed"
    assert decode.idle()

    prefill.dead, world.tamper = False, lambda message, data: data
    start(pair, "s", max_tokens=10, bootstrap_room=6)
    world.run(0.07)
    assert 1 < len(decode.tokens["s"]) < 10
    decode.do(decode.core.cancel(0, CancelLeg("s", 1, "prefill_failed", if_unfetched=True), world.now))
    decode.do(decode.core.cancel(0, CancelLeg("unheard-of", 1, "prefill_failed", if_unfetched=True), world.now))
    world.run(1.0)
    assert decode.code("s") == "ok"
    assert decode.tokens["s"] == sim_generate(PROMPT, 10, VOCAB)


def test_a_higher_attempt_ends_the_lower_and_a_late_lower_one_is_fenced(world: World, pair: tuple[Rank, Rank]) -> None:
    """M22 M23 M48 M49."""
    start(pair, max_tokens=40)
    world.run(0.1)
    start(pair, max_tokens=40, attempt=2)
    start(pair, max_tokens=40)
    world.run(3.0)
    prefill, decode = pair
    assert [end.code for end in decode.ended["r", 1]] == ["fenced", "fenced"]
    assert decode.code("r", 2) == prefill.code("r", 2) == "ok"
    assert decode.tokens["r"] == sim_generate(PROMPT, 40, VOCAB)
    assert decode.core.reports.acks[0].dispatches == 3
    assert decode.core.reports.acks[0].tokens == 3 * len(PROMPT)


def test_a_lower_attempt_that_comes_after_the_higher_one_does_not_take_its_place(world: World) -> None:
    """M49: while that runs, and once it is over."""
    rank = Rank(world, "unified", "u")
    rank.dispatch("r", PROMPT, attempt=3)
    rank.dispatch("r", PROMPT, attempt=1)
    assert rank.code("r", 1) == "fenced"
    world.run(1.0)
    assert rank.code("r", 3) == "ok"
    rank.dispatch("r", PROMPT, attempt=2)
    assert rank.code("r", 2) == "fenced"


def test_a_repeated_attempt_is_acknowledged_and_told_again_but_not_run_again(
    world: World, pair: tuple[Rank, Rank]
) -> None:
    """M22 M49."""
    start(pair)
    world.run(1.0)
    start(pair)
    world.run(1.0)
    prefill, decode = pair
    assert decode.ended["r", 1][0] == decode.ended["r", 1][1]
    assert len(decode.ended["r", 1]) == 2
    assert prefill.scheduler.prompt_tokens_total == len(PROMPT)
    assert decode.core.reports.acks[0].dispatches == 2
    assert decode.idle()
    assert prefill.idle()


def test_what_a_runner_says_of_a_leg_that_is_over_counts_for_nothing(world: World) -> None:
    rank = Rank(world, "unified", "u")
    legs: list[Leg] = []
    rank.runner.start = lambda leg, start=rank.runner.start: (legs.append(leg), start(leg))
    rank.read("r")
    rank.dispatch("r", PROMPT)
    world.run(1.0)
    (leg,) = legs
    ended, tokens = rank.ended["r", 1].copy(), rank.tokens["r"].copy()
    for event in (Output(leg, (9,)), Finished(leg, "stop"), LegFailed(leg, "engine_failed", "late")):
        assert rank.core.handle(event, world.now) == []
    rank.read("r")
    rank.do([])
    assert (rank.ended["r", 1], rank.tokens["r"], rank.finishes["r"].finish) == (ended, tokens, "length")


def test_a_message_delivered_twice_counts_once(world: World, pair: tuple[Rank, Rank]) -> None:
    """M23 M45."""
    decode = pair[1]
    decode.dispatch("r", PROMPT)
    decode.dispatch("r", PROMPT, number=1)
    decode.dispatch("another", PROMPT, number=1)
    assert decode.core.reports.acks[0].dispatches == 1
    assert len(decode.core) == 1


def test_dispatches_that_never_came_are_noted_and_no_others(world: World) -> None:
    rank = Rank(world, "unified", "u")
    for number in (3, 4, 7, 7):
        rank.dispatch(f"r{number}", PROMPT, number=number)
    assert [(note.event, note.fields["number"]) for note in rank.notes] == [
        ("dispatch.gap", 7), ("dispatch.repeated", 7)
    ]  # fmt: skip
    about = {"rid": "r7", "attempt": 1, "leg": "unified", "room": 5}
    assert all(note.fields.items() >= about.items() for note in rank.notes)
    assert (rank.core.counts["dispatch_gap"], rank.core.counts["dispatch_repeated"]) == (1, 1)


def test_a_decode_leg_waits_for_its_cache_with_all_its_prompt(world: World, pair: tuple[Rank, Rank]) -> None:
    decode = pair[1]
    decode.dispatch("r", PROMPT)
    load = decode.core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_tokens) == (0, 1, len(PROMPT), 0)
    decode.do(decode.core.cancel(0, CancelLeg("r", 1), world.now))
    load = decode.core.load()
    assert (load.waiting, load.waiting_tokens) == (0, 0)


def test_prefill_that_dies_is_noticed(world: World, pair: tuple[Rank, Rank]) -> None:
    start(pair)
    pair[0].dead = True
    world.run(8.0)
    assert pair[1].code("r") == "prefill_failed"
    assert pair[1].idle()


def test_prefill_waiting_in_a_queue_is_not_taken_for_dead(world: World, pair: tuple[Rank, Rank]) -> None:
    for number in range(5):  # each a second of computing
        start(pair, f"r{number}", [5 + number] * 240, bootstrap_room=number, max_tokens=2)
    world.run(30.0)
    assert [pair[1].code(f"r{number}") for number in range(5)] == ["ok"] * 5


def test_decode_that_dies_frees_the_prefill_ranks_kv(world: World, pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    world.tamper = lambda message, data: None if isinstance(message, KvBlock) else data
    start(pair)
    world.run(0.1)
    decode.dead = True
    assert prefill.pool.held > 0
    world.run(12.0)
    assert prefill.code("r") == "decode_failed"
    assert prefill.idle()


def test_a_restarted_prefill_rank_is_another_one(world: World, pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.dispatch("r", PROMPT, prefill=prefill.location)
    world.run(0.5)
    decode.do(decode.core.kv_message(KvFail(5, 1, "prefill_failed"), b"", world.now))
    assert decode.code("r") == "prefill_failed"


def test_a_room_nobody_prefills_ends_with_unknown_room(world: World, pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.dispatch("r", PROMPT, prefill=prefill.location)
    world.run(12.0)
    assert decode.code("r") == "unknown_room"


def test_deadlines_end_legs_on_both_sides(world: World, pair: tuple[Rank, Rank]) -> None:
    start(pair, max_tokens=200, deadline_s=0.5)
    world.run(2.0)
    assert pair[1].code("r") == "deadline"
    assert pair[1].finishes["r"].finish == "failed"
    assert all(rank.idle() for rank in pair)


def test_a_full_decode_rank_does_not_deadlock_with_a_full_prefill_rank(world: World) -> None:
    pair = (Rank(world, "prefill", "p", blocks=8), Rank(world, "decode", "d", blocks=8))
    for number in range(12):
        start(pair, f"r{number}", [9 + number] * 16, bootstrap_room=number, max_tokens=5)
    world.run(10.0)
    assert [pair[1].code(f"r{number}") for number in range(12)] == ["ok"] * 12
    assert all(rank.idle() for rank in pair)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_tokens": 300}, "too_long"),  # KV capacity is 256
        ({"max_tokens": 1 << 40}, "too_long"),
        ({"bootstrap_room": None}, "bad_room"),
        ({"prompt_tokens": 0}, "empty_prompt"),
        ({"max_tokens": 0}, "bad_request"),
        ({"leg": "unified"}, "bad_request"),
        ({"dp_rank": 1}, "bad_rank"),
    ],
)
def test_what_a_rank_turns_down(world: World, pair: tuple[Rank, Rank], changes: dict[str, Any], code: str) -> None:
    """M22 M48."""
    pair[1].dispatch("r", PROMPT, **changes)
    assert pair[1].code("r") == code
    assert pair[1].core.reports.acks[0].dispatches == 1
    assert pair[1].idle()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "frames"),
        ([b"\0" * 4, encode(Params())], "prompt bytes"),
        ([token_bytes([1, 2, VOCAB]), encode(Params())], "token id"),
        ([token_bytes([1, 2, -1]), encode(Params())], "token id"),
        ([token_bytes([1, 2, 3]), b"\x01junk"], "sampling"),
        ([token_bytes([1, 2, 3]), encode(Params()), b""], "frames"),
    ],
)
def test_a_bad_payload_is_rejected_and_acknowledged(world: World, frames: list[bytes], why: str) -> None:
    """M22 M48."""
    rank = Rank(world, "prefill", "p")
    rank.do(rank.core.ingest(0, Dispatch("r", 1, "prefill", 0, 7, 1, 3, 3, 6, bootstrap_room=1), frames, world.now))
    assert rank.code("r") == "bad_message"
    assert why in rank.ended["r", 1][0].message
    assert rank.core.reports.acks[0].tokens == 3


@pytest.mark.parametrize("vocab_size", [1, 2, 49_152, 65_536, 128_256, (1 << 31) - 1, 0])
@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 2499])
def test_each_token_id_of_a_prompt_is_checked(vocab_size: int, place: int) -> None:
    most = (vocab_size or 1 << 31) - 1
    facts = RankFacts(model="m", max_context=4096, vocab_size=vocab_size)
    dispatch = Dispatch("r", 1, "unified", 0, 7, 1, 2500, 2500, 6, bootstrap_room=1)

    def take(token: int) -> Leg:
        prompt = array("I", [most] * 2500)
        prompt[place] = token & 0xFFFFFFFF
        frames = [prompt.tobytes(), encode(Params())]
        return leg_of(dispatch, frames, role="unified", dp_rank=0, facts=facts, now=0.0)

    assert list(take(most).prompt) == [most] * 2500
    assert take(0).prompt[place] == 0
    for wrong in (most + 1, -1, -(1 << 31), (1 << 31) - 1):
        if wrong != most:
            with pytest.raises(Refusal, match=f"outside 0..{most}"):
                take(wrong)


@pytest.mark.parametrize(
    ("role", "tokens", "why"),
    [("prefill", 3, "unified ranks alone"), ("unified", 2050, "more than 2049 tokens"), ("unified", 2049, "")],
)
def test_log_probabilities_of_the_prompt_are_refused_where_they_cannot_be(role: Role, tokens: int, why: str) -> None:
    facts = RankFacts(model="m", max_context=4096, params=("prompt_logprobs",))
    dispatch = Dispatch("r", 1, role, 0, 7, 1, tokens, tokens, 6, bootstrap_room=1)
    frames = [token_bytes([1] * tokens), encode(Params(prompt_logprobs=1))]
    with pytest.raises(Refusal, match=why) if why else nullcontext():
        leg_of(dispatch, frames, role=role, dp_rank=0, facts=facts, now=0.0)


def test_overload_and_drain_are_refused_early(world: World) -> None:
    """M46 M47."""
    rank = Rank(world, "unified", "u", limits=Limits(max_waiting=2))
    for number in range(9):
        rank.dispatch(f"r{number}", PROMPT)
    assert [rank.code(f"r{number}") for number in (6, 7, 8)] == ["overloaded"] * 3  # four run, two wait
    assert len(rank.ended) == 3
    rank.core.drain()
    rank.dispatch("late", PROMPT)
    assert rank.code("late") == "draining"
    world.run(3.0)
    assert rank.code("r0") == "ok", "what it had is finished"
    assert rank.idle()
    assert rank.core.reports.acks[0].dispatches == 10


def test_a_room_that_two_requests_claim_is_refused(world: World, pair: tuple[Rank, Rank]) -> None:
    pair[0].dispatch("a", PROMPT)
    pair[0].dispatch("b", PROMPT)
    assert pair[0].code("b") == "duplicate_room"
    assert ("a", 1) not in pair[0].ended


def test_resumed_output_starts_at_its_offset(world: World) -> None:
    """M57."""
    rank = Rank(world, "unified", "u")
    whole = sim_generate(PROMPT, 10, VOCAB)
    rank.tokens["r"] = whole[:4]
    rank.dispatch("r", PROMPT + whole[:4], max_tokens=6, offset=4, attempt=2)
    rank.streams.attach(b"client", Attach("r", 2, 4), world.now)
    world.run(1.0)
    assert rank.tokens["r"] == whole


@pytest.mark.parametrize("max_tokens", [6, 1])
def test_a_cached_prefix_is_reused_and_reported(world: World, max_tokens: int) -> None:
    rank = Rank(world, "unified", "u")
    rank.dispatch("a", PROMPT)
    world.run(1.0)
    rank.read("b")
    rank.dispatch("b", PROMPT, max_tokens=max_tokens)
    world.run(1.0)
    assert rank.tokens["b"] == sim_generate(PROMPT, max_tokens, VOCAB)
    assert rank.ended["b", 1][0].cached_tokens == 8  # two full blocks of 4; the last token is always computed
    assert rank.core.load().cached_tokens_total == 8
    assert rank.finishes["b"].written_tokens == 0


def test_decode_says_what_its_prefill_rank_cached_and_wrote(world: World, pair: tuple[Rank, Rank]) -> None:
    said = []
    for rid, prompt in (("a", PROMPT), ("b", PROMPT[:8] + [1] * 8)):
        start(pair, rid, prompt, bootstrap_room=ord(rid))
        world.run(1.0)
        said.append((pair[1].finishes[rid].cached_tokens, pair[1].finishes[rid].written_tokens))
    assert said == [(0, 8), (8, 8)]


def test_the_next_turn_of_a_conversation_reuses_the_answers_blocks(world: World) -> None:
    rank = Rank(world, "unified", "u")
    rank.dispatch("a", PROMPT, max_tokens=9)
    world.run(1.0)
    longer = PROMPT + sim_generate(PROMPT, 9, VOCAB) + [99, 98]
    rank.read("b")
    rank.dispatch("b", longer)
    world.run(1.0)
    assert rank.tokens["b"] == sim_generate(longer, 6, VOCAB)
    assert rank.ended["b", 1][0].cached_tokens == 16


def test_load_counts_each_prompt_token_once_from_ingest_to_kv(world: World, pair: tuple[Rank, Rank]) -> None:
    prefill = pair[0]
    prefill.dispatch("r", PROMPT)
    load = prefill.core.load()
    assert load.waiting_tokens + load.kv_tokens == len(PROMPT)
    assert load.acks[0].dispatches == 1
    world.run(0.5)
    load = prefill.core.load()
    assert (load.waiting_tokens, load.kv_tokens, load.running, load.waiting) == (0, len(PROMPT), 0, 0)


def test_load_and_acknowledgement_are_of_one_moment(world: World) -> None:
    """M21: a dispatch is in both or in neither."""
    rank = Rank(world, "unified", "u")
    for sent in range(1, 10):
        rank.dispatch(f"r{sent}", PROMPT)
        load = rank.core.load()
        assert load.running + load.waiting == load.acks[0].dispatches == sent


def test_acknowledgements_are_kept_for_each_controller(world: World) -> None:
    """M23 M26: by its epoch, so that none takes another's for its own."""
    rank = Rank(world, "unified", "u")
    rank.dispatch("a", PROMPT, controller_epoch=7)
    rank.dispatch("b", PROMPT, controller_epoch=8, number=1, charge=5)
    rank.dispatch("c", PROMPT, controller_epoch=8, number=2, charge=3)
    acks = {ack.controller_epoch: (ack.dispatches, ack.tokens) for ack in rank.core.load().acks}
    assert acks == {7: (1, len(PROMPT)), 8: (2, 8)}


@pytest.mark.parametrize("have", [0, 2, 6])
def test_a_repeated_attach_is_served_again_until_the_reader_detaches(world: World, have: int) -> None:
    """M57 M58 M61: from its own `have`; the last one to attach is the reader."""
    rank = Rank(world, "unified", "u")
    rank.read("r")
    rank.dispatch("r", PROMPT)
    world.run(1.0)
    assert rank.tokens["r"] == sim_generate(PROMPT, 6, VOCAB)
    rank.streams.attach(b"again", Attach("r", 1, have), world.now)
    (send,) = rank.streams.flush(world.now)
    assert isinstance(send.message, Tokens)
    assert (send.peer, send.message.start, send.message.finish) == (b"again", have, "length")
    assert list(send.message.ids) == rank.tokens["r"][have:]
    rank.streams.detach(b"client", Detach("r", 1))
    assert len(rank.streams) == 1
    rank.streams.detach(b"again", Detach("r", 1))
    assert len(rank.streams) == 0


def test_blocks_are_sent_when_pulled_and_only_those(world: World) -> None:
    """M63 M64: a pull from the first block on is answered with `kv_meta` as well."""
    rank = Rank(world, "prefill", "p")
    rank.dispatch("r", PROMPT)
    world.run(1.0)

    def sent(first: int, count: int) -> list[Any]:
        actions = rank.core.pulled(b"d", KvPull(5, 1, rank.epoch, first, count), world.now)
        return [(a.index, a.tokens) if isinstance(a, SendBlock) else type(a.message) for a in actions]  # type: ignore[union-attr]

    assert sent(0, 0) == [KvMeta]
    assert sent(0, 2) == [KvMeta, (0, 4), (1, 4)]
    assert sent(1, 100) == [(1, 4), (2, 3)]
    assert sent(3, 5) == []


def test_done_frees_the_cache_and_may_be_repeated(world: World) -> None:
    """M68."""
    rank = Rank(world, "prefill", "p")
    rank.dispatch("r", PROMPT)
    world.tamper = lambda message, data: None  # there is no decode rank to hear
    rank.do(rank.core.pulled(b"d", KvPull(5, 1, rank.epoch, 0, 0), world.now))
    world.run(1.0)
    assert rank.core.load().kv_tokens == len(PROMPT)
    for _ in range(3):
        rank.do(rank.core.pulled(b"d", KvDone(5, 1), world.now))
        assert rank.idle()
        assert [end.code for end in rank.ended["r", 1]] == ["ok"]


def test_meta_of_another_layout_is_refused(world: World, pair: tuple[Rank, Rank]) -> None:
    """M67."""
    prefill, decode = pair
    decode.dispatch("r", PROMPT, prefill=prefill.location)
    meta = KvMeta(5, 1, len(PROMPT), 3, 3, 4, "another/layout")
    decode.do(decode.core.kv_message(meta, b"", world.now))
    assert decode.code("r") == "kv_failed"


def test_a_returning_controller_hears_again_what_it_may_have_missed(world: World, pair: tuple[Rank, Rank]) -> None:
    decode = pair[1]
    start(pair, "done")
    world.run(1.0)
    start(pair, "running", bootstrap_room=6, max_tokens=100)
    world.run(0.3)
    decode.core.restate(0)
    decode.do([])
    assert decode.started.count(("running", 1)) == 2
    assert len(decode.ended["done", 1]) == 2


def test_a_refused_leg_has_no_stream_and_a_failed_one_ends_its_own(world: World) -> None:
    """What a client sees of an attempt that its controller may dispatch anew elsewhere (protocol, section 11)."""
    rank = Rank(world, "unified", "u")
    for rid in ("refused", "failed"):
        rank.read(rid)
    rank.dispatch("refused", [], prompt_tokens=0)
    rank.dispatch("failed", PROMPT)
    assert rank.code("refused") == "empty_prompt"
    assert len(rank.streams) == 1
    rank.do(rank.core.cancel(0, CancelLeg("failed", 1, "prefill_failed"), world.now))
    assert (rank.finishes["failed"].finish, rank.finishes["failed"].code) == ("failed", "prefill_failed")
    assert "refused" not in rank.finishes
    world.run(6.0)
    rank.do([])
    assert rank.finishes["refused"].code == "peer_lost", "as if the rank had never heard of it (M59)"


def test_a_controller_that_starts_again_and_again_pushes_out_none_that_lives() -> None:
    """M23"""
    reports = Reports()
    reports.welcomed(0, 5)
    for number in range(1, 4):
        reports.acknowledge(Dispatch(f"q{number}", 1, "unified", 0, 5, number, 10, 10, 5))
    for epoch in range(100, 100 + 2 * MAX_ACKS):
        reports.welcomed(1, epoch)
    assert len(reports.acks) == MAX_ACKS
    assert Ack(5, 3, 30) in reports.acks
