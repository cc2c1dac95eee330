"""Read back where an engine's own connector reads: the answer to the question has a handle, and says its time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs_world import Rank, World, start
from vllm_like import VOCAB, VllmLike

from bus.wire.messages import KvDone, KvMeta
from nodes.link.leg import Leg
from nodes.link.puller import MAX_HANDLE_BYTES
from nodes.link.read_back import ASK_S, LEND_S, READ_WAIT_S
from nodes.link.runner import HasRead, Lent, Reads
from nodes.own.engines.sim import sim_generate

PROMPT = list(range(20, 20 + 40))  # two blocks, and a half


class Connected(VllmLike):
    """An engine that reads back by a connector of its own, after `takes_s`: it notes what it is told, and lends
    `lends`."""

    def __init__(self, world: World, folder: Path, name: str) -> None:
        super().__init__(world, folder, name)
        self.facts = replace(self.facts, reads_back=True)
        self.takes_s = 0.0
        self.lends: tuple[int, bytes, float] = (2, b"handle", 12.0)
        self.lent: list[str] = []
        self.reclaimed: list[str] = []
        self.read: list[tuple[int, bytes, float]] = []  # blocks, by which handle, until when

    def start(self, leg: Leg) -> None:
        if leg.role == "prefill" and leg.read_tokens:
            self._emit(Reads(leg))
        else:
            super().start(leg)

    def readable(self, leg: Leg, blocks: int, now: float) -> None:
        handle = leg.handle
        self.read.append((blocks, handle.data, handle.valid_until) if handle is not None else (blocks, b"", 0.0))

        def begin() -> None:
            self._emit(HasRead(leg, blocks * self.facts.block_tokens))
            VllmLike.start(self, leg)

        if len(self.read) == 1:
            self._timers.call_later(self.takes_s, begin)

    def lend(self, leg: Leg) -> None:
        self.lent.append(leg.rid)
        self._emit(Lent(leg, *self.lends))

    def reclaim(self, leg: Leg) -> None:
        self.reclaimed.append(leg.rid)


class Pair:
    def __init__(self, folder: Path) -> None:
        self.world = World()
        self.engines = [Connected(self.world, folder, name) for name in ("p", "d")]
        self.prefill = Rank(self.world, "prefill", "p", runner=self.engines[0])
        self.decode = Rank(self.world, "decode", "d", runner=self.engines[1])

    def start(self, rid: str = "r") -> None:
        start((self.prefill, self.decode), rid, PROMPT, read_tokens=32)

    def right(self, rid: str = "r") -> None:
        assert self.decode.tokens[rid] == sim_generate(PROMPT, 6, VOCAB)
        assert self.decode.code(rid) == "ok"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_handle_comes_with_its_time_counted_from_the_question(pair: Pair) -> None:
    """However long the answer lay somewhere: the lender's engine may have used the memory again."""
    slow: list[Any] = []
    asked_at = pair.world.now

    def answer(message: Any, data: bytes) -> bytes | None:
        if isinstance(message, KvMeta) and message.blocks and not slow:
            slow.append((message, data))
            return None
        return data

    pair.world.tamper = answer
    pair.start()
    pair.world.run(ASK_S / 2)
    assert not pair.engines[0].read
    ((message, data),) = slow
    assert (message.blocks, message.valid_s, message.asked, data) == (2, 12.0, 1, b"handle")
    pair.prefill.do(pair.prefill.core.kv_message(message, data, pair.world.now))
    assert pair.engines[0].read == [(2, b"handle", asked_at + 12.0)]
    pair.world.run(1.0)
    pair.right()
    assert pair.engines[1].lent == pair.engines[1].reclaimed == ["r"]


def test_an_answer_that_is_lost_is_asked_for_again_and_its_time_goes_on(pair: Pair) -> None:
    lost: list[Any] = []
    pair.world.tamper = lambda message, data: (
        None if isinstance(message, KvMeta) and message.blocks and not lost and not lost.append(message) else data  # type: ignore[func-returns-value]
    )
    began = pair.world.now
    pair.start()
    pair.world.run(READ_WAIT_S)
    assert len(lost) == 1
    ((blocks, handle, until),) = pair.engines[0].read
    assert (blocks, handle) == (2, b"handle"), "the same again: it is this leg's"
    assert until == pytest.approx(began + 12.0, abs=0.01)
    pair.right()
    assert pair.engines[1].lent == ["r"]


def test_a_read_that_takes_long_is_not_taken_back_and_its_end_is_told(pair: Pair) -> None:
    """The engines see to its time themselves; the lender only counts what is pinned until then."""
    pair.engines[0].takes_s = LEND_S + 2.0
    done: list[Any] = []
    pair.world.tamper = lambda message, data: (done.append(message) if isinstance(message, KvDone) else None, data)[1]
    pair.start()
    pair.world.run(LEND_S + 1.0)
    assert not pair.engines[1].reclaimed
    assert not done
    pair.world.run(2.0)
    assert pair.engines[1].reclaimed == ["r"]
    assert len(pair.engines[0].read) == 1
    pair.right()


@pytest.mark.parametrize("lends", [(2, b""), (0, b"handle"), (1, b"h" * (MAX_HANDLE_BYTES + 1)), (0, b"")])
def test_an_answer_without_its_handle_is_none(pair: Pair, lends: tuple[int, bytes]) -> None:
    pair.engines[1].lends = (*lends, 12.0)
    pair.start()
    pair.world.run(1.0)
    assert pair.engines[0].read == [(0, b"", 0.0)]
    pair.right()


def test_a_lender_that_dies_before_it_answers_is_waited_for_in_bounds(pair: Pair) -> None:
    pair.world.tamper = lambda message, data: None if isinstance(message, KvMeta) and not message.first_token else data
    pair.start()
    pair.world.run(READ_WAIT_S + 0.2)
    assert pair.engines[0].read == [(0, b"", 0.0)]
    pair.world.run(1.0)
    pair.right()
