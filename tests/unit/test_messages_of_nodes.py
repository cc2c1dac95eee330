"""The rules of docs/protocol.md for nodes, held against their cores: legs, token streams, KV offers and fetches."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from bus.actions import Send
from bus.wire.codec import encode
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    Attach,
    CancelLeg,
    Detach,
    Dispatch,
    Ended,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Location,
    Params,
    Role,
    Tokens,
)
from nodes.link.actions import Action, SendBlock
from nodes.link.checksum import block_crc32
from nodes.link.core import Limits, RankCore
from nodes.link.join import Joint
from nodes.link.streams import SendFailure, Streams
from nodes.own.blocks import BlockPool
from nodes.own.engines.sim import SimEngine, sim_generate
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler

PROMPT = list(range(5, 25))  # a full block of 16 and a part of one
PARAMS = encode(Params())


class Timers:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Any:
        heapq.heappush(self.events, (self.now + delay_s, len(self.events), function))
        return self

    def cancel(self) -> None: ...


class Node:
    """One rank's cores and sim engine; collects what they want sent."""

    def __init__(self, role: Role, **limits: Any) -> None:
        self.timers = Timers()
        self.engine = SimEngine(self.timers, blocks=64)
        pool = BlockPool(64, self.engine.spec.block_tokens)
        self.streams = Streams()
        self.scheduler = Scheduler(pool, max_running=4, chunk_tokens=64)
        self.runner = OwnRunner(self.engine, self.scheduler)
        self.core = RankCore(role, 0, self.runner.facts, self.streams, self.runner.load, Limits(**limits))
        self.role: Role = role
        self.number = 0
        self.actions: list[Any] = []
        self.joint = Joint(self.core, self.runner, self.actions.append, self.timers.clock)
        self.started: list[tuple[str, int]] = []
        self.ended: list[Ended] = []

    def dispatch(self, rid: str = "r", attempt: int = 1, *, number: int | None = None, **fields: Any) -> None:
        self.number = self.number + 1 if number is None else number
        header = {"leg": self.role, "max_tokens": 4, "prompt_tokens": len(PROMPT), "charge": 10}
        if self.role != "unified":
            header["bootstrap_room"] = 7
        if self.role == "decode":
            header["prefill"] = Location("p", 0, 22, "ipc:///p0")
        header |= fields
        message = Dispatch(rid=rid, attempt=attempt, dp_rank=0, controller_epoch=77, number=self.number, **header)
        frames = [PARAMS] if self.role == "decode" else [token_bytes(PROMPT), PARAMS]
        self.say(self.core.ingest(0, message, frames, self.timers.now))
        self.collect()

    def say(self, actions: list[Action]) -> list[Any]:
        """Do them; what of it, and of what comes of it, is not for the runner."""
        before = len(self.actions)
        self.joint.carry_out(actions)
        return self.actions[before:]

    def run(self) -> None:
        """Compute until there is nothing left to compute."""
        self.runner.turn(self.timers.now)
        while self.timers.events:
            self.timers.now, _, function = heapq.heappop(self.timers.events)
            function()
            self.runner.turn(self.timers.now)
        self.collect()

    def collect(self) -> None:
        for started, ended in ((report.started, report.ended) for report in self.core.reports.take().values()):
            self.started += started
            self.ended += ended

    def pull(self, first: int, count: int, *, room: int = 7, attempt: int = 1, peer: bytes = b"d") -> list[Any]:
        return self.say(self.core.pulled(peer, KvPull(room, attempt, 11, first, count), self.timers.now))

    def tokens(self) -> list[Tokens]:
        return [send.message for send in self.streams.flush(self.timers.now) if isinstance(send.message, Tokens)]


# --- dispatches, acknowledgements, ends -------------------------------------------------------------------------------


def test_every_dispatch_is_acknowledged_whatever_becomes_of_it() -> None:
    """M22 M23 M46 M48: taken, refused, fenced or cancelled, in order; and each is reported."""
    node = Node("unified")
    node.dispatch("good", 2)
    node.dispatch("bad", prompt_tokens=0)
    node.dispatch("good", 1)
    node.dispatch("cancelled")
    node.say(node.core.cancel(0, CancelLeg("cancelled", 1), node.timers.now))
    (ack,) = node.core.load().acks
    assert (ack.controller_epoch, ack.dispatches, ack.tokens) == (77, 4, 40)
    node.run()
    assert {(e.rid, e.attempt): e.code for e in node.ended} == {
        ("good", 2): "ok",
        ("bad", 1): "empty_prompt",
        ("good", 1): "fenced",
        ("cancelled", 1): "cancelled",
    }
    assert len(node.ended) == 4


def test_load_and_acknowledgement_are_of_one_moment() -> None:
    """M21: a dispatch is in both or in neither."""
    node = Node("unified")
    for sent in range(1, 10):
        node.dispatch(f"r{sent}")
        load = node.core.load()
        assert load.running + load.waiting == load.acks[0].dispatches == sent


def test_a_repeated_number_is_not_counted_again() -> None:
    """M23 M45."""
    node = Node("unified")
    node.dispatch("a", number=1)
    node.dispatch("b", number=2)
    node.dispatch("c", number=2)
    assert node.core.load().acks[0].dispatches == 2
    assert len(node.core) == 2


def test_acknowledgements_are_kept_for_each_controller() -> None:
    """M23 M26: by controller epoch, so that none takes another's for its own."""
    node = Node("unified")
    node.dispatch("a")
    other = Dispatch("b", 1, "unified", 0, 88, 1, 5, len(PROMPT), 4)
    node.say(node.core.ingest(1, other, [token_bytes(PROMPT), PARAMS], node.timers.now))
    acks = {ack.controller_epoch: (ack.dispatches, ack.tokens) for ack in node.core.load().acks}
    assert acks == {77: (1, 10), 88: (1, 5)}


def test_a_draining_rank_takes_nothing_new_and_finishes_what_it_has() -> None:
    """M47."""
    node = Node("unified")
    node.dispatch("before")
    node.core.drain()
    node.dispatch("after")
    node.run()
    assert {e.rid: e.code for e in node.ended} == {"before": "ok", "after": "draining"}


def test_attempts_are_fenced_and_none_runs_twice() -> None:
    """M49: a higher one ends the lower; a lower one is refused; the same one again is not run again."""
    node = Node("unified")
    node.dispatch("r", 1)
    node.dispatch("r", 2)
    node.dispatch("r", 1)
    node.dispatch("r", 2)
    assert len(node.core) == 1
    node.run()
    node.dispatch("r", 2)
    node.run()
    ends = [(e.attempt, e.code, e.output_tokens) for e in node.ended]
    assert ends.count((2, "ok", 4)) == len([e for e in ends if e[0] == 2])
    assert {e[:2] for e in ends} == {(1, "fenced"), (2, "ok")}
    assert node.scheduler.prompt_tokens_total == 2 * len(PROMPT)  # attempts 1 and 2, once each


# --- token streams ----------------------------------------------------------------------------------------------------


def attach(node: Node, have: int = 0, attempt: int = 1, peer: bytes = b"client") -> None:
    node.streams.attach(peer, Attach("r", attempt, have), node.timers.now)


@pytest.mark.parametrize("have", [0, 2, 4])
def test_tokens_are_contiguous_from_where_the_reader_stands(have: int) -> None:
    """M57 M58."""
    node = Node("unified")
    node.dispatch()
    attach(node, have)
    node.run()
    heard = node.tokens()
    ids: list[int] = []
    at = heard[0].start
    assert at <= have
    for message in heard:
        assert message.start == at + len(ids)
        ids += message.ids
    assert ids == sim_generate(PROMPT, 4)[at:]
    assert [message.finish for message in heard if message.finish] == ["length"]
    assert heard[-1].finish


def test_a_resumed_request_counts_on_from_its_offset() -> None:
    """M57."""
    node = Node("unified")
    node.dispatch(attempt=3, offset=10)
    attach(node, 10, 3)
    node.run()
    assert [(m.start, m.ids) for m in node.tokens() if m.ids] == [(10, tuple(sim_generate(PROMPT, 4)))]


def test_an_attach_before_the_dispatch_waits_for_it() -> None:
    """M59."""
    node = Node("unified")
    attach(node)
    assert node.tokens() == []
    node.timers.now += 4.0
    node.streams.tick(node.timers.now)
    node.dispatch()
    node.run()
    assert sum(len(m.ids) for m in node.tokens()) == 4


def test_an_attach_to_nothing_fails_after_five_seconds() -> None:
    """M59."""
    node = Node("unified")
    attach(node)
    node.timers.now += 4.9
    node.streams.tick(node.timers.now)
    assert node.tokens() == []
    node.timers.now += 0.2
    node.streams.tick(node.timers.now)
    assert [(m.finish, m.code) for m in node.tokens()] == [("failed", "peer_lost")]


def test_a_reader_of_an_older_attempt_is_fenced() -> None:
    """M60: whether it attaches late or was reading when the newer attempt came."""
    node = Node("unified")
    node.dispatch(attempt=1)
    attach(node)
    node.tokens()
    node.dispatch(attempt=2)
    assert [(m.attempt, m.finish, m.code) for m in node.tokens()] == [(1, "failed", "fenced")]
    attach(node, attempt=1)
    assert [(m.attempt, m.finish, m.code) for m in node.tokens()] == [(1, "failed", "fenced")]


def test_a_repeated_attach_is_served_again() -> None:
    """M61 M58: until the reader detaches; only then is the output forgotten."""
    node = Node("unified")
    node.dispatch()
    attach(node)
    node.run()
    first = node.tokens()
    attach(node, 1, peer=b"again")
    second = node.streams.flush(node.timers.now)
    assert {send.peer for send in second} == {b"again"}
    assert [m.ids for send in second if isinstance(m := send.message, Tokens)] == [
        tuple(token for m in first for token in m.ids)[1:]
    ]
    node.streams.detach(b"again", Detach("r", 1))
    assert len(node.streams) == 0


def test_tokens_that_could_not_be_sent_are_sent_again() -> None:
    """M57: nothing is skipped when a reader's queue is full."""
    node = Node("unified")
    node.dispatch()
    attach(node)
    node.run()
    lost = node.streams.flush(node.timers.now)
    for send in lost:
        node.streams.unsent(send, SendFailure.FULL, node.timers.now)
    node.timers.now += 1.0
    assert [m.start for m in node.tokens()] == [0]


# --- KV blocks --------------------------------------------------------------------------------------------------------


def test_a_pull_is_answered_at_once_and_again_when_the_prompt_is_computed() -> None:
    """M63."""
    node = Node("prefill")
    node.dispatch()
    (send,) = node.pull(0, 0)
    assert isinstance(send.message, KvMeta)
    assert not send.message.ready
    node.run()
    early, meta = [a.message for a in node.actions if isinstance(a, Send) and isinstance(a.message, KvMeta)]
    assert early == send.message
    assert (meta.ready, meta.prompt_tokens, meta.blocks, meta.block_tokens) == (True, 20, 2, 16)
    assert meta.first_token == sim_generate(PROMPT, 1)[0]


def test_blocks_are_sent_when_pulled_and_only_those() -> None:
    """M63 M64."""
    node = Node("prefill")
    node.dispatch()
    node.pull(0, 0)
    node.run()
    assert not [action for action in node.actions if isinstance(action, SendBlock)]
    assert [a.index for a in node.pull(0, 1) if isinstance(a, SendBlock)] == [0]
    assert [(a.index, a.tokens) for a in node.pull(1, 100) if isinstance(a, SendBlock)] == [(1, 4)]
    assert node.pull(2, 5) == []
    kinds = [type(a.message) if isinstance(a, Send) else SendBlock for a in node.pull(0, 2)]
    assert kinds == [KvMeta, SendBlock, SendBlock]


def test_the_checksum_covers_the_place_and_the_bytes() -> None:
    """M65: computed here by the document's words."""
    place = (1234).to_bytes(8, "little") + (3).to_bytes(4, "little") + (9).to_bytes(4, "little")
    data = bytes(range(64))
    assert block_crc32(1234, 3, 9, data) == crc32(place + data)
    assert len({block_crc32(*where, data) for where in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]}) == 4


class Fetching:
    """A decode node that has begun to fetch its two blocks from a prefill node."""

    def __init__(self) -> None:
        self.prefill, self.decode = Node("prefill"), Node("decode")
        self.prefill.dispatch()
        self.prefill.run()
        self.decode.dispatch()
        self.meta = next(a.message for a in self.prefill.pull(0, 0))

    def answer(self, meta: KvMeta) -> None:
        node = self.decode
        node.say(node.core.kv_message(meta, b"", node.timers.now))
        node.run()

    def block(self, index: int) -> bytes:
        action = next(a for a in self.prefill.pull(index, 1) if isinstance(a, SendBlock))
        return bytes(self.prefill.runner.export(action.leg, index))

    def give(self, index: int, data: bytes, check: int) -> list[Any]:
        node = self.decode
        return node.say(node.core.kv_message(KvBlock(7, 1, index, 16, check), data, node.timers.now))


def test_a_decode_rank_fetches_from_the_epoch_it_located() -> None:
    """M35."""
    pair = Fetching()
    pair.answer(pair.meta)
    pulls = [a for a in pair.decode.actions if isinstance(a, Send) and isinstance(a.message, KvPull)]
    assert len(pulls) >= 2
    assert {(pull.peer, pull.message.epoch) for pull in pulls} == {("ipc:///p0", 22)}


@pytest.mark.parametrize("damage", ["flipped", "short", "misplaced"])
def test_a_damaged_block_is_not_used_and_asked_for_again(damage: str) -> None:
    """M65."""
    pair = Fetching()
    pair.answer(pair.meta)
    good = pair.block(0)
    check = block_crc32(7, 1, 0, good)
    data = {"flipped": bytes([good[0] ^ 1]) + good[1:], "short": good[:-1], "misplaced": pair.block(1)}[damage]
    actions = pair.give(0, data, check)
    assert [a.message for a in actions if isinstance(a, Send)] == [KvPull(7, 1, 22, 0, 1)]
    pair.give(0, good, check)
    last = pair.block(1)
    pair.give(1, last, block_crc32(7, 1, 1, last))
    pair.decode.run()
    attach(pair.decode)
    assert [token for m in pair.decode.tokens() for token in m.ids] == sim_generate(PROMPT, 4)


def test_blocks_of_another_layout_are_refused() -> None:
    """M67."""
    pair = Fetching()
    fields = {name: getattr(pair.meta, name) for name in pair.meta.__struct_fields__}
    pair.answer(KvMeta(**(fields | {"layout": "other/16x4"})))
    assert [(e.code, e.output_tokens) for e in pair.decode.ended] == [("kv_failed", 0)]


def test_a_failed_room_answers_a_pull() -> None:
    """M66."""
    node = Node("prefill")
    node.dispatch()
    node.say(node.core.cancel(0, CancelLeg("r", 1), node.timers.now))
    (send,) = node.pull(0, 0)
    assert send.message == KvFail(7, 1, "cancelled", send.message.message)


def test_a_pull_of_another_attempt_learns_which_one_there_is() -> None:
    """M63."""
    node = Node("prefill")
    node.dispatch(attempt=2)
    node.run()
    (send,) = node.pull(0, 5, attempt=1)
    assert isinstance(send.message, KvMeta)
    assert (send.message.attempt, send.message.ready) == (2, False)


def test_done_frees_the_cache_and_may_be_repeated() -> None:
    """M68 M48."""
    node = Node("prefill")
    node.dispatch()
    node.pull(0, 2)
    node.run()
    assert node.core.load().kv_tokens == len(PROMPT)
    for _ in range(3):
        node.say(node.core.pulled(b"d", KvDone(7, 1), node.timers.now))
        node.collect()
        assert node.core.load().kv_tokens == 0
        assert [(e.rid, e.code) for e in node.ended] == [("r", "ok")]


def test_block_bytes_of_the_sim_layout_are_what_the_example_makes() -> None:
    """The layout that examples/foreign_scheduler.py serves: the state after each token, uint32 little-endian."""
    node = Node("prefill")
    node.dispatch()
    node.run()
    (action,) = [a for a in node.pull(1, 1) if isinstance(a, SendBlock)]
    state, states = 0, []
    for token in PROMPT:
        state = crc32(struct.pack("<i", token), state)
        states.append(state)
    assert bytes(node.runner.export(action.leg, 1)) == struct.pack("<4I", *states[16:]).ljust(64, b"\0")
