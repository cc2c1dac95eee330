"""Prefill engines of vLLM read back what the decode engine has left of the turns before, by a finished leg's handle:
over clients that behave as vLLM's (tests/support/fake_vllm.py), and what goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import BLOCK, SLOTS, VOCAB
from test_vllm_runner import LEASE_S, Node, handle_of

from bus.wire import codec
from bus.wire.messages import Location, Params, ReadBack
from nodes.link.leg import Leg
from nodes.link.runner import FOR_EVER, Began, Finished, HasRead, Held, KvHandle, Lent, Reads
from nodes.own.engines.sim import sim_generate
from nodes.vllm.pins import EXPIRY, LEAST_S, Pins
from nodes.vllm.runner import READ_MARGIN_S
from nodes.vllm.sampling import READ_UNTIL

AT = Location("d", 0, 1, "d")
PROMPT = list(range(7, 7 + 2 * BLOCK + 3))
OUTPUT = BLOCK  # tokens of each answer


class Pair:
    """A prefill and a decode engine, and the link between them as far as a read back is concerned."""

    def __init__(self, folder: Path) -> None:
        self.prefill = Node("prefill", folder, reads_back=True)
        self.decode = Node("decode", folder, keeps=True, reads_back=True)
        self.prompt = PROMPT
        self.turns = 0

    async def at_decode(self, **changes: Any) -> None:
        """A turn that decode computes alone; the prompt is that of the next one afterwards."""
        self.turns += 1
        leg = self.decode.start(self.prompt, leg="unified", max_tokens=OUTPUT, **changes)
        await self.decode.until(Finished, self.turns)
        self.prompt = [*self.prompt, *sim_generate(self.prompt, OUTPUT, VOCAB), 3, 4, 5]
        assert self.decode.tokens()[-OUTPUT:] == self.prompt[-3 - OUTPUT : -3]
        assert leg.read_tokens == 0

    def asks(self, prompt: list[int] | None = None, **changes: Any) -> Leg:
        """A prefill leg that has asked its decode rank."""
        prompt = self.prompt if prompt is None else prompt
        before = len([event for event in self.prefill.events if isinstance(event, Reads)])
        leg = self.prefill.start(prompt, read_back=ReadBack(AT, len(prompt)), **changes)
        asked = [event.leg for event in self.prefill.events if isinstance(event, Reads)]
        assert asked[before:] == [leg]
        return leg

    def lent(self, prompt: list[int] | None = None, **changes: Any) -> tuple[Leg, Lent]:
        """A decode leg that waits for its prompt, and what the rank answers for it."""
        leg = self.decode.leg(self.prompt if prompt is None else prompt, **changes)
        self.decode.runner.lend(leg)
        event = self.decode.events[-1]
        assert isinstance(event, Lent)
        assert event.leg is leg
        return leg, event

    def answered(self, leg: Leg, lent: Lent, left_s: float | None = None) -> None:
        """The answer reaches the prefill leg."""
        now = time.monotonic() + self.prefill.late_s
        if lent.blocks:
            valid_s = lent.valid_s if left_s is None else left_s
            leg.handle = KvHandle(AT, 1, 0, lent.blocks, lent.handle, now + valid_s)
        self.prefill.runner.readable(leg, lent.blocks, now)

    async def right(self, number: int, prompt: list[int] | None = None) -> None:
        """The `number`-th prompt that prefill held is what decode goes on from, and the answer is right."""
        prompt = self.prompt if prompt is None else prompt
        held = await self.prefill.until(Held, number)
        leg = self.decode.start(prompt, handle=handle_of(held, time.monotonic() + 20.0))
        async with asyncio.timeout(60):
            while not any(isinstance(event, Finished) and event.leg is leg for event in self.decode.events):
                await asyncio.sleep(0.001)
        assert self.decode.tokens()[-6:] == sim_generate(prompt, 6, VOCAB)


Scenario = Callable[[Pair], Coroutine[Any, Any, None]]


def played(scenario: Scenario, folder: Path) -> None:
    async def run() -> None:
        await scenario(Pair(folder))

    asyncio.run(run())


def test_prefill_computes_what_neither_has(tmp_path: Path) -> None:
    """It has seen none of three turns, whoever computed them, and computes the new tokens and the rest of a block."""

    async def scenario(pair: Pair) -> None:
        await pair.at_decode()
        pair.prefill.start(pair.prompt)
        await pair.right(1)  # a pair's leg leaves as much as one that decode computed
        pair.prompt = [*pair.prompt, *sim_generate(pair.prompt, 6, VOCAB), 8, 9]
        pair.turns += 1
        await pair.at_decode()
        before = pair.prefill.client.computed
        known = len(pair.prompt) - 3 - 1  # what decode was given and made, but for the last token
        leg = pair.asks()
        assert pair.prefill.runner.load().waiting_tokens == len(pair.prompt) % BLOCK, "what is read is no work"
        assert not pair.prefill.client.live, "nothing runs before the answer"
        _, lent = pair.lent()
        assert lent.blocks == known // BLOCK
        assert 0 < lent.valid_s <= pair.decode.client.pin_s
        pair.answered(leg, lent)
        await pair.right(2)
        assert pair.prefill.client.computed - before == len(pair.prompt) - known // BLOCK * BLOCK
        assert (await pair.prefill.until(Began, 2)).cached_tokens == known // BLOCK * BLOCK
        assert (await pair.prefill.until(HasRead)).tokens == known // BLOCK * BLOCK
        said = [event for event in pair.prefill.said() if event != "Began"]
        assert said == ["Held", "Reads", "HasRead", "Held"]

    played(scenario, tmp_path)


def test_a_read_asks_the_engine_for_those_blocks_until_then(tmp_path: Path) -> None:
    """By the clock of the engine's processes, whatever the node's own shows."""

    async def scenario(pair: Pair) -> None:
        await pair.at_decode()
        pair.prefill.late_s = 1000.0
        leg = pair.asks()
        pair.answered(leg, pair.lent()[1], left_s=20.0)
        given = await pair.prefill.asked(1)
        assert (given["do_remote_decode"], given["do_remote_prefill"]) == (True, False)
        assert (len(given["remote_block_ids"][0]), given["remote_num_tokens"]) == (3, 3 * BLOCK)
        assert 19.0 < given[READ_UNTIL] - time.perf_counter() <= 20.0
        assert EXPIRY not in given, "it is by another clock"
        assert pair.decode.client.asked[0][0]["extra_args"]["kv_transfer_params"] == {
            "do_remote_decode": False, "do_remote_prefill": False,
        }  # fmt: skip

    played(scenario, tmp_path)


def test_a_read_that_ends_late_is_computed_and_no_token_is_wrong(tmp_path: Path) -> None:
    """M98. The control shows what it would give: decode has used the memory for another prompt, with no error."""

    async def late(pair: Pair, *, knows: bool) -> None:
        await pair.at_decode()
        leg, (_, lent) = pair.asks(), pair.lent()
        left_s = READ_MARGIN_S + 0.1
        pair.prefill.client._slow_s = left_s + 0.1
        pair.decode.client.clock = lambda: time.monotonic() + LEASE_S  # its slots are free
        pair.answered(leg, lent, left_s if knows else FOR_EVER)
        for number in range(SLOTS):
            pair.decode.start([number + 100] * len(PROMPT), leg="unified", max_tokens=OUTPUT)
        await pair.decode.until(Finished, 1 + SLOTS)
        held = await pair.prefill.until(Held)
        assert (held.first_token == sim_generate(pair.prompt, 1, VOCAB)[0]) == knows
        assert (await pair.prefill.until(HasRead)).tokens == (0 if knows else 3 * BLOCK)
        assert pair.prefill.client.computed == len(pair.prompt) - (0 if knows else 3 * BLOCK)

    played(lambda pair: late(pair, knows=True), tmp_path / "knows")
    played(lambda pair: late(pair, knows=False), tmp_path / "control")


def test_a_lender_that_dies_in_mid_read_costs_what_it_had(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        alive = tmp_path / "alive"
        alive.touch()  # nobody has locked it: the engine's process is gone
        pair.decode.client.alive = str(alive)
        await pair.at_decode()
        leg = pair.asks()
        pair.answered(leg, pair.lent()[1])
        pair.decode.client.alive = ""
        await pair.right(1)
        assert (await pair.prefill.until(HasRead)).tokens == 0
        assert pair.prefill.client.computed == len(pair.prompt)

    played(scenario, tmp_path)


@pytest.mark.parametrize("what", ["pinned no longer", "another prompt", "another client's", "another salt", "about to"])
def test_what_is_not_pinned_for_this_prompt_is_not_lent_and_prefill_computes_it(tmp_path: Path, what: str) -> None:
    async def scenario(pair: Pair) -> None:
        pair.decode.client.pin_s = {"pinned no longer": 0.0, "about to": LEAST_S}.get(what, 5.0)
        params = Params(cache_salt="own") if what == "another salt" else None
        await pair.at_decode(client="alice", params=params)
        prompt = [1, *pair.prompt] if what == "another prompt" else pair.prompt
        leg = pair.asks(prompt, client="bob" if what == "another client's" else "alice")
        _, lent = pair.lent(prompt, client=leg.client)
        assert (lent.blocks, lent.handle) == (0, b"")
        assert pair.prefill.runner.load().waiting_tokens == len(prompt) % BLOCK
        pair.answered(leg, lent)
        assert pair.prefill.runner.load().waiting_tokens == len(prompt), "now it is work"
        assert (await pair.prefill.until(HasRead)).tokens == 0
        await pair.right(1, prompt)
        assert pair.prefill.client.computed == len(prompt)

    played(scenario, tmp_path)


def test_a_handle_is_good_for_one_leg_and_for_the_part_that_it_has_of_the_prompt(tmp_path: Path) -> None:
    """Whether the first has read it, and so freed the memory, is known late or never."""

    async def scenario(pair: Pair) -> None:
        await pair.at_decode()
        fork = [*pair.prompt[: 2 * BLOCK], *range(100, 100 + BLOCK)]
        first, lent = pair.lent(fork)
        assert lent.blocks == 2
        assert len(codec.unpack(lent.handle)["remote_block_ids"][0]) == 2
        assert pair.lent(fork)[1].blocks == pair.lent()[1].blocks == 0
        assert pair.decode.runner.load().kv_pinned == 3 * BLOCK
        pair.decode.runner.reclaim(first)
        assert pair.decode.runner.load().kv_pinned == 0
        leg = pair.asks(fork)
        pair.answered(leg, lent)
        await pair.right(1, fork)
        assert pair.prefill.client.computed == len(fork) - 2 * BLOCK

    played(scenario, tmp_path)


def test_an_answer_that_is_not_what_it_says_is_not_used(tmp_path: Path) -> None:
    """A peer may say anything; and an answer may come when the leg computes, or is over."""

    async def scenario(pair: Pair) -> None:
        await pair.at_decode()
        _, good = pair.lent()
        handle = codec.unpack(good.handle)
        blocks = handle["remote_block_ids"][0]
        for number, (count, changes) in enumerate(
            ((3, {"remote_block_ids": [blocks, blocks]}), (3, {"remote_block_ids": [blocks[:2]]}),
             (3, {"remote_block_ids": 7}), (3, {"remote_num_tokens": 9}), (2, {}),
             (9, {"remote_block_ids": [[1] * 9], "remote_num_tokens": 9 * BLOCK})), 1
        ):  # fmt: skip
            leg = pair.asks()
            pair.answered(leg, Lent(leg, count, codec.pack(handle | changes), 5.0))
            await pair.right(number)
        leg = pair.asks()
        pair.answered(leg, Lent(leg, 3, b"\xc1", 5.0))
        await pair.right(7)
        leg = pair.asks()
        pair.answered(leg, good, left_s=READ_MARGIN_S / 2)
        await pair.right(8)
        assert pair.prefill.client.computed == 8 * len(pair.prompt)
        pair.answered(leg, good)  # again
        gone = pair.asks()
        pair.prefill.runner.cancel(gone)
        pair.answered(gone, good)
        await asyncio.sleep(0.02)
        assert not pair.prefill.client.live
        assert len(pair.prefill.client.asked) == 8
        load = pair.prefill.runner.load()
        assert (load.waiting, load.waiting_tokens) == (0, 0)

    played(scenario, tmp_path)


def test_what_is_pinned_stands_in_the_load_until_its_time_is_over(tmp_path: Path) -> None:
    """Also of a rank that idles: its memory is not free. Blocks that two turns share count once."""

    async def scenario(pair: Pair) -> None:
        pair.decode.client.pin_s = 0.5
        await pair.at_decode()
        await pair.at_decode()
        whole = (len(pair.prompt) - 4) // BLOCK * BLOCK
        load = pair.decode.runner.load()
        assert load.kv_pinned == load.kv_tokens == whole
        await asyncio.sleep(0.6)
        pair.decode.runner.tick(0.0)
        load = pair.decode.runner.load()
        assert (load.kv_pinned, load.kv_tokens) == (0, 0)
        assert pair.lent()[1].blocks == 0

    played(scenario, tmp_path)


def test_only_whole_blocks_of_one_kind_of_layers_are_lent() -> None:
    """A model with windows has a list of blocks for each kind, cut at its window."""
    pins, tokens = Pins(4), list(range(1, 14))
    handle: dict[str, Any] = {
        "remote_num_tokens": 12,
        "remote_block_ids": [[5, 6, 7]],
        EXPIRY: 9.0,
    }
    bad: list[dict[str, Any]] = [
        {"remote_block_ids": [[5, 6, 7], [1]]}, {"remote_block_ids": [[5, 6]]}, {"remote_block_ids": []},
        {"remote_block_ids": None}, {EXPIRY: None}, {"remote_num_tokens": 3},
        {"remote_num_tokens": 0, "remote_block_ids": [[]]},
    ]  # fmt: skip
    for change in bad:
        pins.add("", tokens, "", handle | change, 0.0)
        assert pins.tokens == 0
    pins.add("fed", tokens[:12], "", handle, 0.0)
    assert pins.tokens == 8, "the last token was never fed, whatever a step was planned for"
    pins.expire(10.0)
    pins.add("", tokens, "", handle, 0.0)
    assert pins.tokens == 12
    lending = pins.lend(1, "", [*tokens[:8], 99, 99, 99, 99], "", 1.0)
    assert lending is not None
    assert codec.unpack(lending.handle) == {"remote_num_tokens": 8, "remote_block_ids": [[5, 6]]}
    pins.add("", tokens, "", handle | {EXPIRY: 11.0}, 2.0)
    again = pins.lend(2, "", tokens[:12], "", 2.0)
    assert again is not None
    assert (again.blocks, again.until) == (2, 11.0), "the last token is computed in any case"
    pins.expire(20.0)
    assert pins.tokens == 0
    assert not pins._at
