"""A runner with an engine, a scheduler and a KV connector of its own (tests/support/vllm_like.py), in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from legs_world import PROMPT, Rank, World, start
from vllm_like import DEADLY, SLOTS, VOCAB, VllmLike

from bus.wire.messages import CancelLeg, KvMeta
from nodes.own.engines.sim import sim_generate


class Pair:
    def __init__(self, folder: Path, *, lease_s: float = 30.0, margin_s: float = 0.5) -> None:
        self.world = World()
        self.engines = [VllmLike(self.world, folder, name, lease_s, margin_s) for name in ("p", "d")]
        self.prefill = Rank(self.world, "prefill", "p", runner=self.engines[0])
        self.decode = Rank(self.world, "decode", "d", runner=self.engines[1])

    def start(self, rid: str, prompt: list[int] = PROMPT, room: int = 5, **changes: Any) -> None:
        start((self.prefill, self.decode), rid, prompt, bootstrap_room=room, **changes)

    def idle(self) -> bool:
        return all(not len(rank.core) and not len(rank.core.sender) for rank in (self.prefill, self.decode)) and all(
            len(engine.free) == SLOTS and engine.load().running == engine.load().waiting == 0 for engine in self.engines
        )


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 31 + i * 7) % 500 for i in range(number % 7 + 1)]


def test_decode_fetches_by_the_handle_and_samples_every_token(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for number in range(20):  # five times as many as there are slots
        pair.start(f"r{number}", prompt_of(number), number, max_tokens=number % 5 + 1)
    pair.world.run(3.0)
    for number in range(20):
        assert pair.decode.tokens[f"r{number}"] == sim_generate(prompt_of(number), number % 5 + 1, VOCAB)
        assert pair.prefill.code(f"r{number}") == pair.decode.code(f"r{number}") == "ok"
    assert pair.engines[1].prompt_tokens_computed == 0
    assert pair.idle()


def test_a_handle_that_is_about_to_lapse_is_refused_and_no_token_is_wrong(tmp_path: Path) -> None:
    """M79: the control below shows what it would give: another prompt's KV, and no error."""
    pair = late_pull(tmp_path, margin_s=0.5)
    assert pair.decode.code("late") == "kv_failed"
    assert "lapses" in pair.decode.ended["late", 1][0].message
    assert pair.decode.tokens["late"] == []
    assert pair.prefill.code("late") == "decode_failed"
    pair.world.run(5.0)
    assert pair.idle()


def test_without_the_margin_a_late_pull_takes_another_prompts_kv(tmp_path: Path) -> None:
    """So that the test above can fail."""
    pair = late_pull(tmp_path, margin_s=-9.0)
    assert pair.decode.code("late") == "ok"
    assert pair.decode.tokens["late"] != sim_generate(PROMPT, 6, VOCAB)


@pytest.mark.parametrize("margin_s", [0.0, -9.0])
def test_a_meta_that_was_long_on_its_way_is_as_old_as_the_pull_that_it_names(tmp_path: Path, margin_s: float) -> None:
    """M79: it says that a second is left, and that was so when it was sent. With no margin to speak of (the control)
    the tokens are another prompt's."""
    pair = Pair(tmp_path, lease_s=1.0, margin_s=margin_s)
    world, late = pair.world, [2.5]

    def tamper(message: Any, data: bytes) -> bytes | None:
        if not isinstance(message, KvMeta) or not message.ready or message.room != 5:
            world.jitter = lambda: 0.0
        elif late:
            world.jitter = late.pop
        else:
            return None  # as if this process had stood still: what was said later waits behind the first
        return data

    def others() -> None:
        for n in range(SLOTS):
            pair.prefill.dispatch(f"o{n}", prompt_of(n + 3), bootstrap_room=n + 50)

    world.tamper = tamper
    world.call_later(1.5, others)
    pair.start("late", max_tokens=6)
    world.run(4.0)
    assert not late
    if margin_s == 0.0:
        assert pair.decode.code("late") == "kv_failed"
        assert pair.decode.tokens["late"] == []
    else:
        assert pair.decode.tokens["late"] != sim_generate(PROMPT, 6, VOCAB)


def late_pull(folder: Path, margin_s: float) -> Pair:
    """A meta is a second on its way where the lease is one and a bit, and the slots are used again meanwhile."""
    pair = Pair(folder, lease_s=1.2, margin_s=margin_s)
    world, asked = pair.world, []

    def delay(message: Any, data: bytes) -> bytes:
        if isinstance(message, KvMeta) and message.ready and message.room == 5 and not asked:
            asked.append(message)
            return b"lost"
        return data

    world.tamper = lambda message, data: None if delay(message, data) == b"lost" else data
    pair.start("late")  # the first meta is lost; the next comes with the poke a second later
    world.run(1.0)

    def others() -> None:
        for n in range(SLOTS):
            pair.prefill.dispatch(f"o{n}", prompt_of(n + 3), bootstrap_room=n + 50)

    world.call_later(0.2015, others)
    slow = iter([0.21])
    world.jitter = lambda: next(slow, 0.0)
    world.run(1.0)
    assert asked
    return pair


def test_cancel_frees_the_slot_at_every_moment(tmp_path: Path) -> None:
    for number in range(12):
        pair = Pair(tmp_path / str(number))
        pair.start("r", max_tokens=20)
        pair.world.run(number * 0.003)
        for rank in (pair.prefill, pair.decode):
            rank.do(rank.core.cancel(0, CancelLeg("r", 1), pair.world.now))
        pair.world.run(1.0)
        assert pair.idle(), number
        assert sim_generate(PROMPT, 20, VOCAB)[: len(pair.decode.tokens["r"])] == pair.decode.tokens["r"]


@pytest.mark.parametrize("side", [0, 1])
def test_a_dead_engine_ends_its_legs_and_says_so(tmp_path: Path, side: int) -> None:
    pair = Pair(tmp_path)
    rank = (pair.prefill, pair.decode)[side]
    pair.start("bystander", max_tokens=50)
    pair.world.run(0.05)
    if side:
        pair.start("deadly", [9, 9], 6)
        pair.world.call_later(0.0, rank.runner.die)
    else:
        pair.start("deadly", [9, DEADLY], 6)
    pair.world.run(8.0)
    assert rank.left == ["EngineDeadError"]
    assert rank.code("deadly") == "peer_lost"
    assert "the engine died: EngineDeadError" in rank.ended["deadly", 1][0].message
    other = (pair.decode, pair.prefill)[side]
    assert other.code("deadly") in ("prefill_failed", "decode_failed")
    if not side:
        assert pair.decode.code("bystander") == "ok", "it had its KV cache already"
        assert pair.decode.tokens["bystander"] == sim_generate(PROMPT, 50, VOCAB)
