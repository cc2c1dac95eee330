"""`client`: CPU that the client library takes, a request and a streamed token, beside its messages alone.

Ranks are rank links with an engine that answers at once (`edge_parts.rank`), under a controller that looks at hashes of
prompts. Two processes use the library as a program would, `Client` from one thread and `AsyncClient` from tasks. The
floor sends and receives the same messages over the same sockets and does nothing else: prompts are packed and hashed
beforehand, nothing is checked, kept or resumed. CPU is of the whole process, ZeroMQ's I/O thread included.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import deque
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass

import zmq

from benchmarks import parts
from benchmarks.child import Parent
from benchmarks.harness import Aim, Process, Row, Scope, Workspace, row
from bus.build import CORES
from bus.endpoints import ControllerAddress
from bus.runtime import frames
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec
from bus.wire.hashing import packed_hashes, token_bytes
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    FROM_NODE_DATA,
    Accepted,
    Attach,
    Detach,
    Message,
    Params,
    Submit,
    Tokens,
)
from pdbus.client import AsyncClient, Client, Stream

BLOCK_TOKENS = 16
RANKS = 4
STREAMED = 65  # tokens, of which the first is counted with the request
WAIT_MS = 20_000
REQUEST, TOKEN = "CPU a request", "CPU a streamed token"


@dataclass(frozen=True, slots=True)
class Case:
    """A case to measure: prompts of `tokens` tokens, `at_once` requests open at any time. `aim` is in microseconds;
    None: no aim."""

    tokens: int
    at_once: int
    metric: str = REQUEST
    packed: bool = False  # the caller has its ids in an array, not in a list
    aim: float | None = None

    def __str__(self) -> str:
        return f"{self.tokens} tokens{' in an array' if self.packed else ''}, {self.at_once} at once"


CASES = (
    Case(128, 32, aim=80.0),
    Case(128, 1),
    Case(2_048, 32),
    Case(32_768, 32, aim=200.0),
    Case(32_768, 32, packed=True),
    Case(128, 32, TOKEN, aim=5.0),  # a rank says those of its eight requests in one message
    Case(128, 4, TOKEN),  # each in a message of its own
)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    figures: dict[tuple[str, Case], list[float]] = {}
    with Workspace() as space:
        scope.show("starting broker, controller, ranks and clients")
        parts.broker(space)
        parts.controller(space, "--unified-method", "cache_aware")
        parts.rank_links(space, RANKS)
        sides = {
            name: space.part(f"library:{function}", controller=space.endpoint("ctl"))
            for name, function in (("floor", "messages"), ("AsyncClient", "by_tasks"), ("Client", "by_thread"))
        }
        for process in sides.values():
            process.wait_ready()
        for number in scope.rounds:
            for case, (name, side) in itertools.product(CASES, sides.items()):
                scope.show(f"run {number} of {scope.runs}: {case}, {name}")
                figures.setdefault((name, case), []).append(_cost(side, case, scope))
            if not number:
                figures.clear()  # warm-up
    return [
        row(
            f"{case}, {name} ({CORES})", case.metric, "µs", figures[name, case], figures["floor", case],
            Aim(case.aim, of_ratio=False) if case.aim else None,
        )
        for case, name in itertools.product(CASES, list(sides)[1:])
    ]  # fmt: skip


def _cost(side: Process, case: Case, scope: Scope) -> float:
    """Microseconds of processor time: of a request with one token, or of a further token."""

    def cost(count: int, output: int) -> float:
        asked = {"tokens": case.tokens, "at_once": case.at_once, "packed": case.packed}
        taken: float = side.ask(count=count, output=output, **asked)
        return taken / count * 1e6

    if case.metric == REQUEST:
        return cost(scope.size(200, 2) if case.tokens > 10_000 else scope.size(1_000, 16), 1)
    count = scope.size(160, 8)
    return max(0.01, (cost(count, STREAMED) - cost(count, 1)) / (STREAMED - 1))


# --- what is measured: each process answers with the seconds of CPU that its requests took ----------------------------


def _prompts(tokens: int, packed: bool = False) -> Iterator[MutableSequence[int]]:
    """The same list with another first token each time, so that no prefix cache helps and making it costs nothing."""
    ids: MutableSequence[int] = array("i", range(tokens)) if packed else list(range(tokens))
    for number in itertools.count(time.monotonic_ns()):
        ids[0] = number & 0xFFFF  # what the ranks have
        yield ids


def by_thread(parent: Parent, controller: str) -> None:
    """Run a process that uses `Client`. A command is answered with the processor seconds of its `count` requests."""
    with Client(controller) as client:

        def measure(tokens: int, count: int, at_once: int, output: int, packed: bool) -> float:
            prompts = _prompts(tokens, packed)
            live: deque[Stream] = deque()
            began = time.process_time()
            for _ in range(count):
                if len(live) == at_once:
                    live.popleft().tokens()
                live.append(client.generate_tokens(next(prompts), max_tokens=output, ignore_eos=True))
            for stream in live:
                stream.tokens()
            return time.process_time() - began

        parent.serve(measure)


def by_tasks(parent: Parent, controller: str) -> None:
    """Run a process that uses `AsyncClient`; answers as `by_thread`."""
    client = AsyncClient(controller)

    async def measure(tokens: int, count: int, at_once: int, output: int, packed: bool) -> float:
        prompts = _prompts(tokens, packed)
        left = iter(range(count))

        async def ask() -> None:
            for _ in left:
                async for _ in await client.generate_tokens(next(prompts), max_tokens=output, ignore_eos=True):
                    pass

        began = time.process_time()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return time.process_time() - began

    with asyncio.Runner() as runner:
        parent.serve(lambda **asked: runner.run(measure(**asked)))
        runner.run(client.close())


def messages(parent: Parent, controller: str) -> None:
    """Run the floor's process; answers as `by_thread`."""
    with Sockets() as sockets:
        parent.serve(_Messages(sockets, ControllerAddress(controller).clients).measure)


class _Messages:
    """The floor: submits, attaches and detaches, and reads what comes."""

    def __init__(self, sockets: Sockets, controller: str) -> None:
        self._sockets = sockets
        self._poller = zmq.Poller()
        self._nodes: dict[str, Socket] = {}  # by endpoint
        self._controller = self._connect(controller)
        self._numbers = itertools.count()
        self._params = codec.encode(Params(ignore_eos=True))

    def measure(self, tokens: int, count: int, at_once: int, output: int, packed: bool) -> float:
        made = [token_bytes(ids) for ids, _ in zip(_prompts(tokens), range(count), strict=False)]
        prompts = iter([(prompt, packed_hashes(prompt, BLOCK_TOKENS)) for prompt in made])
        streams: dict[str, Socket] = {}
        began = time.process_time()
        for prompt in itertools.islice(prompts, at_once):
            self._submit(tokens, output, *prompt)
        ended = 0
        while ended < count:
            for message in self._received():
                if isinstance(message, Accepted) and message.decode is not None:
                    node = streams[message.rid] = self._node(message.decode.endpoint)
                    frames.send(node, [codec.encode(Attach(message.rid, message.attempt, several=True))])
                elif isinstance(message, Tokens) and message.finish and message.rid in streams:
                    frames.send(streams.pop(message.rid), [codec.encode(Detach(message.rid, message.attempt))])
                    ended += 1
                    for prompt in itertools.islice(prompts, 1):
                        self._submit(tokens, output, *prompt)
        return time.process_time() - began

    def _submit(self, tokens: int, output: int, prompt: bytes, hashes: bytes) -> None:
        rid = f"floor-{next(self._numbers)}"
        submit = Submit(rid, "unified", tokens, output, block_tokens=BLOCK_TOKENS, block_hashes=hashes)
        frames.send(self._controller, [codec.encode(submit), prompt, self._params])

    def _received(self) -> Iterator[Message]:
        ready = self._poller.poll(WAIT_MS)
        if not ready:
            raise TimeoutError("no answer")
        for socket, _ in ready:
            table = CONTROLLER_TO_CLIENT if socket is self._controller else FROM_NODE_DATA
            while True:
                try:
                    received = frames.receive(socket)
                except zmq.Again:
                    break
                yield codec.decode(received[0], table)

    def _node(self, endpoint: str) -> Socket:
        if endpoint not in self._nodes:
            self._nodes[endpoint] = self._connect(endpoint)
        return self._nodes[endpoint]

    def _connect(self, endpoint: str) -> Socket:
        socket = self._sockets.dealer(endpoint, maximum=PAYLOAD_MAX)
        self._poller.register(socket, zmq.POLLIN)
        return socket
