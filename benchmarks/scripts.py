"""Fixed scripts over the hot paths, so that the instructions they take can be counted (`opcount`). Each function
returns a script; each call of the script makes the same work again.

A script is a function of no arguments that does its work TIMES times over; its inputs are made beforehand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, cast

from benchmarks.controller_parts import core_of, join, publication_handler
from benchmarks.pick import BLOCK_TOKENS, INSTANCE, Hits, cached, requests, table_of
from benchmarks.report import frames_of
from bus.wire import codec
from bus.wire.hashing import pack_hashes, token_bytes
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    NODE_TO_CONTROLLER,
    PUBLICATIONS,
    Accepted,
    Ack,
    Attach,
    Dispatch,
    Ended,
    Load,
    LoadReport,
    Location,
    Message,
    MoreTokens,
    Params,
    Progress,
    RecordQuery,
    Submit,
    Tokens,
)
from controller.events import FromClient, FromNode, Tick, ToNode
from controller.load.table import LoadTable
from controller.policies import Policy, make_policy
from controller.policies.prefix_index import PrefixIndex
from nodes.link.core import RankCore
from nodes.link.driver import RankDriver
from nodes.link.streams import Streams
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import Engine, EngineSpec, StepPlan, StepResult
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler
from pdbus.client import Piece
from pdbus.client.core import ClientCore, Patience
from pdbus.client.options import controllers_of, make_request
from pdbus.client.request import Request
from pdbus.edge.answers import Answer, ChatWriter, Head
from pdbus.edge.generation import Choice
from pdbus.text.models import BytesText
from pdbus.text.stops import StopFinder

TIMES = 100
RANKS = 64
ROWS = 32  # sequences that decode together
NOW = 1.0  # settled, and the reports are fresh
Script = Callable[[], None]


def pick(method: str, ranks: int = RANKS) -> Script:
    """A pick by `method` among `ranks` ranks, and its charge."""
    table = table_of(ranks)
    return _picks(table, make_policy(method), requests(TIMES, seed=1))


def pick_hits(ranks: int, blocks: int, holders: int) -> Script:
    """The same by `cache_aware`, where `holders` ranks hold all blocks of a prompt."""
    table = table_of(ranks)
    return _picks(table, *cached(table, Hits(blocks, holders), TIMES, seed=1))


def _picks(table: LoadTable, policy: Policy, submits: list[Submit]) -> Script:
    group = table.group("unified", "m")

    def script() -> None:
        for submit in submits:
            rank = policy.pick(group, submit, submit.prompt_tokens)
            assert rank is not None
            table.charge(rank, submit.prompt_tokens)

    return script


def kv_events() -> Script:
    """The prefix index alone: of a prompt of 16 blocks that others hold, a rank stores two times eight and removes one
    after the other, from the end."""
    index = PrefixIndex()
    prompt = list(range(1, 17))
    for slot in range(1, 8):
        index.stored(slot, prompt)

    def script() -> None:
        for _ in range(TIMES):
            index.stored(0, prompt[:8])
            index.stored(0, prompt[8:])
            for block in reversed(prompt):
                index.removed(0, (block,))

    return script


def report() -> Script:
    """A load report at the controller. The script can be called 8 times."""
    handle = publication_handler(TIMES)
    rounds = (frames_of(TIMES, seq, 1) for seq in itertools.count(2))
    batches = [next(rounds) for _ in range(8)]  # a report counts only once, so every call takes the next
    turns = iter(batches)

    def script() -> None:
        for frames in next(turns):
            handle(frames)

    return script


def encode() -> Script:
    """The encoding of a Dispatch and an Accepted."""
    location = Location(INSTANCE, 3, 1 << 60, "ipc:///run/user/1000/pdbus/node-3")
    messages: list[Message] = [
        Dispatch("r" * 32, 1, "unified", 3, 1 << 60, 12_345, 128, 128, 16),
        Accepted("r" * 32, 1, None, None, location),
    ]

    def script() -> None:
        for _ in range(TIMES // 2):
            for message in messages:
                codec.encode(message)

    return script


def decode() -> Script:
    """The decoding of a Submit, a Progress and a LoadReport."""
    ended = Ended("r" * 32, 1, "unified", "ok", "", 16)
    load = Load(
        seq=9, step=9, running=3, waiting=1, waiting_tokens=500, kv_tokens=1_000, kv_capacity=1 << 20,
        max_running=256, acks=(Ack(1 << 60, 100, 9_000),),
    )  # fmt: skip
    frames = [
        (codec.encode(Submit("r" * 32, "unified", 128, 16)), CLIENT_TO_CONTROLLER),
        (codec.encode(Progress(INSTANCE, 3, 1 << 60, (("r" * 32, 1),), (ended,))), NODE_TO_CONTROLLER),
        (codec.encode(LoadReport(INSTANCE, 3, 1 << 60, 9, load)), PUBLICATIONS),
    ]

    def script() -> None:
        for _ in range(TIMES // 3):
            for frame, table in frames:
                codec.decode(frame, table)

    return script


def dispatch(method: str = "total_tokens", blocks: int = 0) -> Script:
    """The controller's core alone: a submit (of a prompt of so many blocks that it hashes, cached after the first),
    its dispatch, its end."""
    core = core_of(RANKS, method)
    core.handle(Tick(), NOW)
    numbers = itertools.count()
    hashes = pack_hashes(range(1, blocks + 1))
    tokens = max(128, blocks * BLOCK_TOKENS)
    payload = (bytes(4 * tokens), b"params")

    def script() -> None:
        for _ in range(TIMES):
            rid = f"r{next(numbers):09d}"
            submit = Submit(rid, "unified", tokens, 16, block_tokens=BLOCK_TOKENS, block_hashes=hashes)
            sent = core.handle(FromClient(b"client", submit, payload), NOW)[0]
            assert isinstance(sent, ToNode)
            ended = (Ended(rid, 1, "unified", "ok", "", 16),)
            core.handle(FromNode(sent.peer, Progress(INSTANCE, sent.peer, 1, ((rid, 1),), ended)), NOW)

    return script


def dispatch_pair() -> Script:
    """The same for a pair: a submit, its two dispatches, the ends of both legs."""
    core = core_of(RANKS, role="prefill")
    join(core, RANKS, "decode", "decode")
    core.handle(Tick(), NOW)
    numbers = itertools.count()
    payload = (bytes(4 * 128), b"params")

    def script() -> None:
        for _ in range(TIMES):
            number = next(numbers)
            rid = f"r{number:09d}"
            submit = Submit(rid, "pair", 128, 16, bootstrap_room=number)
            for sent in core.handle(FromClient(b"client", submit, payload), NOW)[:2]:
                assert isinstance(sent, ToNode)
                assert isinstance(sent.message, Dispatch)
                leg, dp_rank = sent.message.leg, sent.message.dp_rank
                ended = (Ended(rid, 1, leg, "ok", "", 16),)
                instance = INSTANCE if leg == "prefill" else "decode"
                core.handle(FromNode(sent.peer, Progress(instance, dp_rank, 1, ((rid, 1),), ended)), NOW)

    return script


class _NoEngine:
    """Computes nothing: a script gives the result of the step that was submitted."""

    spec = EngineSpec("m", "layout", 1 << 20, BLOCK_TOKENS, 1 << 14, 64, 512, ())

    def submit(self, plan: StepPlan, done: Callable[[StepResult], None]) -> None:
        self.plan, self.done = plan, done


def decode_step(*, recorded: bool = False) -> Script:
    """A rank's decode step of `ROWS` rows without its engine: from the engine's answer over scheduler, runner and core
    to the messages for their readers, the load, and the next plan. `TIMES` steps. `recorded`: while a
    recording runs."""
    engine = _NoEngine()
    streams = Streams()
    scheduler = Scheduler(BlockPool(engine.spec.blocks, BLOCK_TOKENS), max_running=ROWS, chunk_tokens=1 << 14)
    runner = OwnRunner(cast(Engine, engine), scheduler)
    core = RankCore("unified", 0, runner.facts, streams, runner.load)
    driver = RankDriver(core, runner, lambda action: None, lambda: NOW)
    if recorded:
        runner.record_steps(core.recorder)
        core.recorder.asked(RecordQuery(1, "unified-0", 0, 60.0), NOW, 0.0)
    for number in range(1, ROWS + 1):
        streams.attach(b"client", Attach(f"r{number}", 1), NOW)
        dispatch = Dispatch(f"r{number}", 1, "unified", 0, 1, number, 32, 32, 1000)
        driver.apply(core.ingest(0, dispatch, [token_bytes([number] * 32), codec.encode(Params())], NOW))

    def step() -> None:
        answer = tuple([(row.seq, 7) for row in engine.plan.rows])
        engine.done(StepResult(engine.plan.number, answer, 0.01))
        runner.turn(NOW)
        core.load()
        assert len(streams.flush(NOW)) == ROWS

    runner.turn(NOW)
    streams.flush(NOW)

    def script() -> None:
        for _ in range(TIMES):
            step()

    return script


AT = controllers_of(None, None, None)
DECODE = Location(INSTANCE, 3, 1 << 60, "ipc:///run/user/1000/pdbus/node-3")


def _begun(core: ClientCore, rng: random.Random, max_tokens: int) -> Request:
    """A request of 128 tokens that was submitted and accepted."""
    request = make_request(
        range(128), {"max_tokens": max_tokens}, AT, rng, leg="unified", block_tokens=BLOCK_TOKENS
    )  # fmt: skip
    core.begin(request, NOW)
    core.received(AT.decode, Accepted(request.rid, 1, None, None, DECODE), NOW)
    return request


def client_request() -> Script:
    """The client's core alone: options become a request, which is submitted, accepted, attached to, and ends with its
    only token."""
    rng = random.Random(1)
    core = ClientCore(Patience(), rng)

    def script() -> None:
        for _ in range(TIMES):
            rid = _begun(core, rng, 1).rid
            core.received(DECODE.endpoint, Tokens(rid, 1, 0, (5,), "length"), NOW)

    return script


def client_token() -> Script:
    """The client's core alone: a token of each of ten requests in one message."""
    rng = random.Random(1)
    core = ClientCore(Patience(), rng)
    first, *others = [_begun(core, rng, 1_000_000).rid for _ in range(10)]
    starts = itertools.count()

    def script() -> None:
        for start in itertools.islice(starts, TIMES // 10):
            more = tuple([MoreTokens(rid, 1, start, (5,)) for rid in others])
            actions = core.received(DECODE.endpoint, Tokens(first, 1, start, (5,), others=more), NOW)
            assert len(actions) == 10

    return script


def edge_token() -> Script:
    """A streamed token at the edge: its text, looked through for a stop string, and its event of a chat."""
    text = BytesText()
    answer = Answer(0, 128)
    choice = Choice(answer, cast(Any, None), text.decoder(), StopFinder(["\n\n"]), frozenset(), frozenset({2}))
    writer = ChatWriter(Head("r" * 32, "sim", 128, created=1), 1)
    piece = Piece((100,))

    def script() -> None:
        answer.text = ""
        for _ in range(TIMES):
            writer.more(answer, choice.take(piece))

    return script
