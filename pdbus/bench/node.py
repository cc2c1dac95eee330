"""The node process of a benchmark: takes a dispatch and ends it at once, so that what is measured is the way to it.

`ours` speaks the whole protocol of a node (hello, welcome, pongs, membership, load reports with acknowledgements at
`report_hz`, progress once a turn), for any number of ranks, and computes nothing; `bare` echoes frames. Both note how
long each dispatch was on its way, when its prompt starts with the time of its submit.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.epochs import new_epoch
from bus.runtime.loop import Loop
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    CONTROLLER_TO_NODE,
    Ack,
    Dispatch,
    Ended,
    Hello,
    Load,
    LoadReport,
    Member,
    Ping,
    Pong,
    Progress,
    Role,
    Welcome,
    Who,
)
from pdbus.bench.bare import BUDGET, NO_COPY_FROM
from pdbus.bench.child import STDIN, Parent

KV_TOKENS = 1 << 40
MEMBER_S = 0.25


class Journeys:
    """Nanoseconds from submit to arrival."""

    def __init__(self) -> None:
        self._ns: list[int] = []

    def note(self, prompt: Any) -> None:
        if stamp := int.from_bytes(bytes(prompt[:8]), "little"):
            self._ns.append(time.monotonic_ns() - stamp)

    def take(self) -> list[int]:
        taken, self._ns = self._ns, []
        return taken


def bare(parent: Parent, endpoint: str, payload_bytes: int, reply_bytes: int = 60) -> None:
    copy = payload_bytes < NO_COPY_FROM
    journeys = Journeys()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send(b"here")
        parent.ready()
        reply = b"x" * reply_bytes
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(STDIN, zmq.POLLIN)
        while not parent.gone:
            for source, _ in poller.poll():
                if source is not socket:
                    for _ in parent.commands():
                        parent.say(journeys.take())
                    continue
                for _ in range(BUDGET):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK, copy=copy)
                    except zmq.Again:
                        break
                    journeys.note(frames[2] if copy else frames[2].buffer)
                    socket.send_multipart([frames[0], reply])


def ours(
    parent: Parent,
    bus: str,
    controller: str,
    ranks: list[int],
    dp_size: int,
    role: Role = "unified",
    instance: str = "bench",
    report_hz: float = 20.0,
) -> None:
    journeys = Journeys()
    loop = Loop()
    with Sockets() as sockets:
        pub = sockets.pub(BusAddress(bus).publish)
        address = ControllerAddress(controller).nodes
        nodes = [
            _Rank(loop, sockets.dealer(address, maximum=PAYLOAD_MAX), pub, instance, dp_rank, dp_size, role, journeys)
            for dp_rank in ranks
        ]
        waiting = set(nodes)

        def commands() -> None:
            for _ in parent.commands():
                parent.say(journeys.take())
            if parent.gone:
                loop.stop()

        def announce() -> None:
            for node in nodes:
                node.member()
            welcomed = {node for node in waiting if node.welcomed}
            waiting.difference_update(welcomed)
            if welcomed and not waiting:
                parent.ready()

        def progress() -> None:
            for node in nodes:
                if node.taken:
                    node.progress()

        def report_at(node: _Rank) -> None:
            loop.call_every(1 / report_hz, node.report)

        loop.call_every(MEMBER_S, announce)
        for index, node in enumerate(nodes):  # spread over the interval, as independent schedulers would be
            loop.call_later(index / len(nodes) / report_hz, partial(report_at, node))
        loop.after_turn(progress)
        watch_stdin(loop, commands)
        loop.run()
        loop.close()


def watch_stdin(loop: Loop, function: Callable[[], None]) -> None:
    """Call `function` on the loop's thread whenever STDIN can be read."""
    turn = threading.Semaphore(1)

    def ready() -> None:
        function()
        turn.release()

    def watch() -> None:
        while True:
            turn.acquire()
            select.select([STDIN], [], [])
            loop.call_threadsafe(ready)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


class _Rank:
    def __init__(
        self,
        loop: Loop,
        socket: Socket,
        pub: Socket,
        instance: str,
        dp_rank: int,
        dp_size: int,
        role: Role,
        journeys: Journeys,
    ) -> None:
        self.socket, self.pub, self.journeys = socket, pub, journeys
        self.who = (instance, dp_rank, new_epoch())
        self.role, self.dp_size = role, dp_size
        self.endpoint = f"ipc:///nowhere/{instance}-{dp_rank}"
        self.welcomed = False
        self.controller_epoch = 0
        self.dispatches = self.tokens = self.step = 0
        self.load_seq = self.member_seq = 0
        self.taken: list[tuple[str, int]] = []
        loop.add(socket, self.on_message, copied=1)
        self.hello()

    def hello(self) -> None:
        instance, dp_rank, epoch = self.who
        hello = Hello(
            instance, dp_rank, epoch, self.role, "bench", self.dp_size, "ready", self.endpoint,
            max_context=1 << 20, kv_capacity=KV_TOKENS, max_running=1 << 20, block_tokens=16,
        )  # fmt: skip
        self.socket.send(codec.encode(hello))

    def on_message(self, frames: list[Any]) -> None:
        message = codec.decode(frames[0], CONTROLLER_TO_NODE)
        if isinstance(message, Dispatch):
            if message.controller_epoch == self.controller_epoch:
                self.dispatches += 1
                self.tokens += message.charge
            self.taken.append((message.rid, message.attempt))
            if len(frames) == 3:
                self.journeys.note(frames[1].buffer)
        elif isinstance(message, Ping):
            self.socket.send(codec.encode(Pong(message.n, self.step, False)))
        elif isinstance(message, Welcome):
            self.welcomed = True
            self.controller_epoch = message.epoch
        elif isinstance(message, Who):
            self.hello()

    def progress(self) -> None:
        """Everything of this turn started and ended; the report that acknowledges it follows at its time."""
        self.step += 1
        taken, self.taken = self.taken, []
        for first in range(0, len(taken), 1024):
            part = tuple(taken[first : first + 1024])
            ended = tuple(Ended(rid, attempt, self.role, "ok", "", 1) for rid, attempt in part)
            self.socket.send(codec.encode(Progress(*self.who, part, ended)))

    def load(self) -> Load:
        acks = (Ack(self.controller_epoch, self.dispatches, self.tokens),) if self.controller_epoch else ()
        self.load_seq += 1
        return Load(self.load_seq, self.step, 0, 0, 0, 0, KV_TOKENS, 1 << 20, acks)

    def report(self) -> None:
        load = self.load()
        self.publish(LoadReport(*self.who, load.seq, load))

    def member(self) -> None:
        self.member_seq += 1
        member = Member(
            *self.who, self.member_seq, self.load(), self.role, "bench", self.dp_size, "ready", self.endpoint,
            follow_bootstrap_room=False, rooms_seq=0, interval_s=MEMBER_S,
        )  # fmt: skip
        self.publish(member)

    def publish(self, message: LoadReport | Member) -> None:
        self.pub.send_multipart((topics.of(message), codec.encode(message)))
