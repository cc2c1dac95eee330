"""Every core fed with whatever the wire lets through, in any order. Nothing may raise, break a core's own invariants,
or make it say something that its peer's table would refuse.

    PYTHONPATH=tests/support python -m fuzz_cores --messages 1000000 --seconds 600 [--seed 1] [--core broker]

A failure names the core, the seed and the count; with these the same events come again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import fuzz_messages
from fuzz_messages import of

from bus.actions import Note, Publish, Send
from bus.broker.core import BrokerCore, BrokerLimits
from bus.broker.events import Asked
from bus.broker.events import Published as BrokerPublished
from bus.broker.events import Tick as BrokerTick
from bus.broker.events import Unreachable as BrokerUnreachable
from bus.embed.publications import PublisherCore
from bus.embed.resolution import Resolved, ResolverCore
from bus.wire import codec, topics
from bus.wire.hashing import block_crc32
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    CONTROLLER_TO_CLIENT,
    CONTROLLER_TO_NODE,
    FROM_BROKER,
    FROM_NODE_DATA,
    NODE_TO_CONTROLLER,
    PARAMS,
    PUBLICATIONS,
    TO_BROKER,
    TO_NODE_DATA,
    Attach,
    CancelLeg,
    Detach,
    Dispatch,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Location,
    Message,
    Params,
    Progress,
    ReadBack,
    Submit,
)
from bus.wire.messages import Ended as EndedLeg
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import FromClient, FromNode, Published, Tick, ToClient, ToNode, Undelivered, Unreachable
from nodes.link.actions import SendBlock
from nodes.link.core import RankCore
from nodes.link.driver import RankDriver
from nodes.link.streams import SendFailure, Streams
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import StepPlan, StepResult
from nodes.own.engines.sim import SimEngine
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler
from pdbus.client.core import ClientCore, Patience
from pdbus.client.options import Controllers, Options, make_request
from pdbus.client.output import Deliver, Ended

PEERS = ("a", "b", "c")
VALIDATE_EVERY = 16
RUN = 400  # messages to one core before a fresh one


class Core:
    """One core and its time. `step` feeds one event; `handled` counts those that got past `decode`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.handled = 0

    def draw(self, table: fuzz_messages.Table) -> Message | None:
        return fuzz_messages.message(self.rng, table)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.0, 0.0, 0.0, 0.01, 0.3, 4.0))

    def step(self) -> None:
        raise AssertionError("each core has its own")

    def validate(self) -> None:
        """The core's own invariants."""


def fits(message: Message, table: fuzz_messages.Table) -> None:
    """What a core says must be something that its receiver takes."""
    assert codec.decode(codec.encode(message), table) == message, message


class BrokerFuzz(Core):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.core = BrokerCore(
            BrokerLimits(
                max_rooms=50, max_rooms_per_publisher=20, max_watches=40, max_watches_per_peer=20, room_ttl_s=5.0
            ),
            7,
            0.0,
        )

    def step(self) -> None:
        rng, dice = self.rng, self.rng.random()
        event: Any
        if dice < 0.1:
            event = BrokerTick()
        elif dice < 0.13:
            event = BrokerUnreachable(rng.choice(PEERS).encode())
        elif dice < 0.6:
            message = self.draw(PUBLICATIONS)
            if message is None:
                return
            event = BrokerPublished(topics.of(message) if rng.random() < 0.95 else b"rooms/x/1/", message)
        else:
            message = self.draw(TO_BROKER)
            if message is None:
                return
            event = Asked(rng.choice(PEERS).encode(), message)
        for action in self.core.handle(event, self.now):
            if isinstance(action, Send):
                fits(action.message, FROM_BROKER)
            elif isinstance(action, Publish):
                fits(action.message, PUBLICATIONS)
        assert self.core.watches.size <= 40
        assert self.core.rooms.size <= 50


class PublisherFuzz(Core):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.core = PublisherCore(
            instance="p",
            dp_rank=0,
            epoch=1,
            role="prefill",
            model="m",
            dp_size=2,
            endpoint="ipc:///p",
            max_rooms=20,
            room_ttl_s=5.0,
        )

    def step(self) -> None:
        rng, core = self.rng, self.core
        dice = rng.random()
        if dice < 0.7:
            message = self.draw(PUBLICATIONS)
            out = core.on_message(message, self.now) if message is not None else []
        elif dice < 0.8:
            out = core.register(rng.choice((0, 1, 2, 3, -1, 2**63)), rng.choice((1, 2, 0)), self.now)
        elif dice < 0.88:
            out = core.drop(rng.randrange(4), 1, "ok", self.now)
        else:
            out = core.tick(self.now)
        for publish in out:
            fits(publish.message, PUBLICATIONS)
        assert core.live_rooms <= 20


class ResolverFuzz(Core):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.core = ResolverCore(max_wants=10)
        self.wanted: set[int] = set()

    def step(self) -> None:
        rng, core = self.rng, self.core
        dice = rng.random()
        if dice < 0.6:
            message = self.draw(FROM_BROKER | {"beacon": PUBLICATIONS["beacon"]})
            out = core.on_message(message, self.now) if message is not None else []
        elif dice < 0.85:
            room = rng.randrange(12)
            out = core.want(
                room,
                self.now,
                deadline_s=rng.choice((0.0, 1.0, 30.0, 1e12)),
                attempt=rng.randrange(3),
                prefill_instance=rng.choice(("", "p", "d")),
                dp_rank=rng.choice((None, None, 0, 3)),
                asker=rng.randrange(2),
            )
        elif dice < 0.9:
            core.cancel(rng.randrange(12), rng.randrange(2))
            out = []
        else:
            out = core.tick(self.now)
        for action in out:
            if isinstance(action, Send):
                fits(action.message, TO_BROKER)
            else:
                assert isinstance(action, Resolved)
        assert core.pending <= 10


class ControllerFuzz(Core):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        method = rng.choice(("auto", "total_tokens", "cache_aware", "follow_bootstrap_room", "odd_policies:Erratic"))
        config = ControllerConfig(
            bus="ipc:///b",
            controller="ipc:///c",
            settle_s=0.0,
            queue_requests=5,
            max_requests=40,
            client_requests=20,
            max_ranks=8,
            payload_bytes=4000,
            prefill_method=method,
            decode_method=rng.choice(("auto", "total_requests")),
            unified_method=rng.choice(("auto", "odd_policies:Erratic")),
        )
        self.core = ControllerCore(config, 7, 0.0)
        self.sent: list[ToNode] = []

    def step(self) -> None:
        rng, dice = self.rng, self.rng.random()
        event: Any
        if dice < 0.08:
            event = Tick()
        elif dice < 0.1:
            event = Unreachable(rng.choice(PEERS))
        elif dice < 0.13 and self.sent:
            unsent = self.sent.pop()
            event = Undelivered(unsent.peer, unsent.message)
        elif dice < 0.25 and self.sent:
            event = self.answer(rng.choice(self.sent))
        elif dice < 0.45:
            message = self.draw(PUBLICATIONS)
            if message is None:
                return
            event = Published(message)
        elif dice < 0.65:
            message = self.draw(NODE_TO_CONTROLLER)
            if message is None:
                return
            event = FromNode(rng.choice(PEERS), message)
        else:
            message = self.draw(CLIENT_TO_CONTROLLER)
            if message is None:
                return
            frames: tuple[bytes, ...] = ()
            if isinstance(message, Submit):
                frames = (bytes(4 * message.prompt_tokens) if 0 < message.prompt_tokens < 99 else b"", b"p")
                frames = frames if rng.random() < 0.95 else frames[: rng.randrange(2)]
            event = FromClient(rng.choice(PEERS), message, frames)
        for action in self.core.handle(event, self.now):
            self.check(action)
        del self.sent[:-20]

    def answer(self, sent: ToNode) -> FromNode:
        """What the node might say of a dispatch it was sent."""
        rng, dispatch = self.rng, sent.message
        assert isinstance(dispatch, Dispatch)
        rank = self.core.members.peers.get(sent.peer)
        instance, dp_rank = rank.key if rank is not None else ("p", 0)
        epoch = rank.epoch if rank is not None else 1
        end = of(EndedLeg)(rng)
        end = type(end)(dispatch.rid, dispatch.attempt, dispatch.leg, end.code)
        return FromNode(
            sent.peer,
            Progress(
                instance,
                dp_rank,
                epoch,
                ((dispatch.rid, dispatch.attempt),) * rng.randrange(2),
                (end,) * rng.randrange(3),
            ),
        )

    def check(self, action: object) -> None:
        if isinstance(action, ToClient):
            fits(action.message, CONTROLLER_TO_CLIENT)
        elif isinstance(action, ToNode):
            fits(action.message, CONTROLLER_TO_NODE)
            if isinstance(action.message, Dispatch):
                self.sent.append(action)
        elif isinstance(action, Publish):
            fits(action.message, PUBLICATIONS)

    def validate(self) -> None:
        self.core.validate()


class NodeFuzz(Core):
    """Core, runner and streams of one rank, with the sim engine's memory."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        role = rng.choice(("prefill", "decode", "unified"))
        self.engine = SimEngine(self, blocks=12, block_tokens=4, vocab_size=64)  # type: ignore[arg-type]
        self.scheduler = Scheduler(BlockPool(12, 4), max_running=3, chunk_tokens=8)
        self.streams = Streams()
        self.steps: list[tuple[StepPlan, Callable[[StepResult], None]]] = []
        self.pulls: list[KvPull] = []  # its last ones, not answered yet
        self.engine.submit = lambda plan, done: self.steps.append((plan, done))  # type: ignore[method-assign]
        caches = role == "decode" and rng.random() < 0.5
        runner = OwnRunner(self.engine, self.scheduler, decode_cache=caches, reads_back=caches or role == "prefill")
        self.runner = runner
        self.legs = RankCore(role, 0, runner.facts, self.streams, runner.load)  # type: ignore[arg-type]
        self.driver = RankDriver(self.legs, runner, self.check, self.clock)

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        rng, legs, now = self.rng, self.legs, self.now
        dice = rng.random()
        out: Iterable[Any] = []
        if dice < 0.35:
            message = self.draw(CONTROLLER_TO_NODE)
            if isinstance(message, Dispatch):
                out = legs.ingest(rng.randrange(2), message, self.frames(message), now)
            elif isinstance(message, CancelLeg):
                out = legs.cancel(rng.randrange(2), message, now)
        elif dice < 0.45:
            made = of(Dispatch)(rng)
            sane = Dispatch(
                made.rid,
                made.attempt,
                legs.role,
                0,
                9,
                self.handled,
                5,
                5,
                4,
                made.offset % 3,
                rng.randrange(4),
                made.prefill,
                made.prefill_instance,
                None,
                made.deadline_s,
                0,
                read_back=of(ReadBack)(rng) if legs.role == "prefill" and rng.random() < 0.5 else None,
            )
            out = legs.ingest(0, sane, self.frames(sane), now)
        elif dice < 0.6:
            message = self.draw(TO_NODE_DATA)
            peer = rng.choice(PEERS).encode()
            if isinstance(message, KvPull | KvDone):
                out = legs.pulled(peer, message, now)
            elif isinstance(message, Attach):
                self.streams.attach(peer, message, now)
            elif isinstance(message, Detach):
                self.streams.detach(peer, message)
        elif dice < 0.75:
            message, data = self.draw(FROM_NODE_DATA), rng.randbytes(rng.choice((0, 16)))
            if self.pulls and rng.random() < 0.7:
                message, data = self.answer(self.pulls.pop())
            if isinstance(message, KvMeta | KvBlock | KvFail):
                out = legs.kv_message(message, data, now)
        elif dice < 0.8:
            location = of(Location)(rng)
            found = rng.random() < 0.7
            out = legs.located(
                rng.randrange(4), location if found else None, rng.randrange(1, 4), "unknown_room", "asked", now
            )
        elif dice < 0.85:
            self.runner.tick(now)
            out = legs.tick(now)
            self.streams.tick(now)
        else:
            self.compute()
        self.driver.apply(out)
        self.runner.turn(now)
        self.flush()

    def frames(self, dispatch: Dispatch) -> list[bytes]:
        rng = self.rng
        params = codec.encode(Params() if rng.random() < 0.8 else of(Params)(rng))  # most drawn ones need too much
        prompt = b"".join(
            rng.choice((3, 7, 63, 2**31 - 1 if rng.random() < 0.02 else 5)).to_bytes(4, "little")
            for _ in range(min(dispatch.prompt_tokens, 60))
        )
        bare = dispatch.leg == "decode" and not self.runner.facts.wants_prompt
        frames = [params] if bare else [prompt, params]
        return frames if rng.random() < 0.95 else [rng.randbytes(9) for _ in range(rng.randrange(4))]

    def answer(self, pull: KvPull) -> tuple[KvMeta | KvBlock, bytes]:
        """Answer a pull as a rank would that has two blocks of the prompt."""
        facts, data = self.runner.facts, self.rng.randbytes(self.engine.spec.block_bytes)
        if not pull.count:
            size = facts.block_tokens
            return KvMeta(pull.room, pull.attempt, 5, 3, 2, size, facts.kv_layout, client=pull.client), b""
        crc32 = block_crc32(pull.room, pull.attempt, pull.first, data)
        return KvBlock(pull.room, pull.attempt, pull.first, facts.block_tokens, crc32, pull.client), data

    def compute(self) -> None:
        if not self.steps:
            return
        ((plan, done),) = self.steps
        self.steps.clear()
        error = "broken" if self.rng.random() < 0.1 else ""
        tokens = tuple((row.seq, self.rng.randrange(3, 64)) for row in plan.rows if row.params is not None)
        done(StepResult(plan.number, () if error else tokens, 0.001, error))

    def check(self, action: Any) -> None:
        if isinstance(action, Send):
            table = TO_NODE_DATA if isinstance(action.message, KvPull | KvDone) else FROM_NODE_DATA
            fits(action.message, table)
            if isinstance(action.message, KvPull):
                self.pulls = [*self.pulls[-3:], action.message]
        elif isinstance(action, SendBlock):
            assert len(self.runner.export(action.leg, action.index)) == self.engine.spec.block_bytes
        else:
            assert isinstance(action, Note) or type(action).__module__.startswith("nodes."), action

    def flush(self) -> None:
        for send in self.streams.flush(self.now):
            fits(send.message, FROM_NODE_DATA)
            if self.rng.random() < 0.1:
                self.streams.unsent(send, self.rng.choice(list(SendFailure)), self.now)
        for report in self.legs.reports.take().values():
            fits(Progress("p", 0, 1, tuple(report.started[:100]), tuple(report.ended[:100])), NODE_TO_CONTROLLER)

    def validate(self) -> None:
        self.scheduler.validate()
        self.streams.validate()
        assert self.legs.load().kv_tokens <= self.engine.spec.kv_capacity


class ClientFuzz(Core):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.core = ClientCore(Patience(2, 10.0), rng)
        self.begun: set[str] = set()
        self.places = ("ipc:///c", "ipc:///c2", *fuzz_messages.ENDPOINTS[:4])

    def step(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.1:
            rid = rng.choice(("r0", "r1", "r2", "r3"))
            if rid in self.begun:
                return
            leg: Any = rng.choice(("pair", "prefill", "unified", None))
            options = Options(
                rid=rid, max_tokens=rng.randint(1, 9), bootstrap_room=5, deadline_s=rng.choice((0.0, 9.0)), leg=leg
            )
            at = Controllers("ipc:///c", None if leg else "ipc:///c2")
            actions = self.core.begin(make_request([0] * 5, options, at, rng), self.now)
            self.begun.add(rid)
        elif dice < 0.12:
            actions = self.core.cancel(rng.choice(("r0", "r1", "r2", "r3")), self.now)
        elif dice < 0.9:
            message = self.draw(CONTROLLER_TO_CLIENT | {"tokens": FROM_NODE_DATA["tokens"]})
            if message is None:
                return
            actions = self.core.received(rng.choice(self.places), message, self.now)
        else:
            actions = self.core.tick(self.now)
        for action in actions:
            self.check(action)

    def check(self, action: object) -> None:
        if isinstance(action, Send):
            fits(action.message, CLIENT_TO_CONTROLLER | TO_NODE_DATA)
        elif isinstance(action, Deliver):
            assert action.rid in self.begun, "tokens after the end"
            assert action.ids
        else:
            assert isinstance(action, Ended)
            assert action.rid in self.begun, "ended twice"
            self.begun.remove(action.rid)

    def validate(self) -> None:
        assert len(self.core) == len(self.begun)


class CodecFuzz(Core):
    """Whatever `decode` lets through, in whichever table, is something it would send."""

    TABLES = (
        PUBLICATIONS,
        TO_BROKER,
        FROM_BROKER,
        NODE_TO_CONTROLLER,
        CONTROLLER_TO_NODE,
        CLIENT_TO_CONTROLLER,
        CONTROLLER_TO_CLIENT,
        TO_NODE_DATA,
        FROM_NODE_DATA,
        PARAMS,
    )

    def step(self) -> None:
        table = self.rng.choice(self.TABLES)
        message = self.draw(table)
        if message is not None:
            fits(message, table)


CORES: dict[str, Callable[[random.Random], Core]] = {
    "broker": BrokerFuzz,
    "publisher": PublisherFuzz,
    "resolver": ResolverFuzz,
    "controller": ControllerFuzz,
    "node": NodeFuzz,
    "client": ClientFuzz,
    "codec": CodecFuzz,
}


def fuzz(name: str, seed: int, count: int) -> None:
    """`count` events to a fresh core; AssertionError or whatever it raised, with the way to have it again."""
    core = CORES[name](random.Random(seed))
    for number in range(count):
        core.pass_time()
        core.handled = number
        try:
            core.step()
            if number % VALIDATE_EVERY == 0:
                core.validate()
        except Exception as error:
            raise AssertionError(f"fuzz({name!r}, {seed}, {number + 1}): {type(error).__name__}: {error}") from error
    core.validate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", choices=[*CORES, "all"], default="all")
    options = parser.parse_args()
    names = list(CORES) if options.core == "all" else [options.core]
    began, done, seed = time.monotonic(), 0, options.seed
    while done < options.messages and time.monotonic() - began < options.seconds:
        for name in names:
            fuzz(name, seed, RUN)
            done += RUN
        seed += 1
        if seed % 25 == 0:
            print(f"{done} messages, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"{done} messages, seeds {options.seed}..{seed - 1}, {time.monotonic() - began:.0f} s: nothing unexpected")


if __name__ == "__main__":
    main()
