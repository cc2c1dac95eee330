"""The node process of a benchmark: takes a dispatch and ends it at once, so that what is measured is the way to it.

`ours` speaks the whole protocol of a node (hello, welcome, pongs, membership, load reports with acknowledgements at
`report_hz`, progress once a turn), for any number of ranks and controllers, and computes nothing: it uses the
connection and the reports of nodes/link, and makes no legs (a rank's shares of requests) of dispatches. `bare` echoes
frames. Both note how long each dispatch was on its way, when its prompt starts with the time of its submit.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import zmq

from benchmarks.bare import BUDGET, NO_COPY_FROM
from benchmarks.child import STDIN, Parent
from bus.actions import Publish
from bus.embed.publications import PublisherCore
from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.epochs import new_epoch
from bus.runtime.loop import Loop
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    CancelLeg,
    Dispatch,
    Ended,
    Hello,
    Load,
    RecordQuery,
    RecordReply,
    Role,
    TraceEvent,
    Welcome,
)
from nodes.link.config import LinkConfig
from nodes.link.connection import Connection
from nodes.link.rank import hello_of
from nodes.link.reports import Reports
from nodes.link.runner import RankFacts

KV_TOKENS = 1 << 40
MANY = 1 << 20
FACTS = RankFacts(model="bench", max_context=MANY, kv_capacity=KV_TOKENS, max_running=MANY, block_tokens=16)
MEMBER_S = 0.25
Reporting = Callable[[Loop, "Sequence[Rank]", float], AbstractContextManager[None]]  # the last in 1/s


class Journeys:
    """The times from submit to arrival, in nanoseconds."""

    def __init__(self) -> None:
        self._ns: list[int] = []

    def note(self, prompt: Any) -> None:
        """Note the arrival of a prompt whose first 8 bytes are the time of its submit."""
        self.sent_at(int.from_bytes(bytes(prompt[:8]), "little"))

    def sent_at(self, stamp_ns: int) -> None:
        """Note the arrival now of a request submitted at `stamp_ns`, in monotonic nanoseconds; 0: its latency is not
        measured."""
        if stamp_ns:
            self._ns.append(time.monotonic_ns() - stamp_ns)

    def take(self) -> list[int]:
        """Return the times since the last call."""
        taken, self._ns = self._ns, []
        return taken


def bare(parent: Parent, endpoint: str, payload_bytes: int, reply_bytes: int = 60) -> None:
    """Run a node for `bare.broker`: answer each message at `endpoint` with `reply_bytes` bytes. Each command of the
    parent is answered with the journeys since the last one."""
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
                        parent.send(journeys.take())
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
    controllers: list[str],
    ranks: list[int],
    dp_size: int,
    role: Role = "unified",
    instance: str = "bench",
    report_hz: float = 20.0,
    make: type[Rank] | None = None,
    reporting: Reporting | None = None,
) -> None:
    """Run a node process with the given `ranks` (numbers of `dp_size`) for these controllers, until the parent has
    gone; READY once all of them have welcomed all ranks. The command `count` is answered with the number of
    publications so far, any other with the journeys since the last one.

    `make` is another class of ranks, `reporting` a context manager in which they report, in place of timers of the
    loop.
    """
    journeys = Journeys()
    kind = make or Rank
    loop = Loop()
    with Sockets() as sockets:
        pub = sockets.pub(BusAddress(bus).publish)
        config = LinkConfig(
            role, instance, dp_size, tuple(ranks), bus, tuple(controllers), "ipc:///never-bound",
            report_interval_s=MEMBER_S,
        )  # fmt: skip
        nodes = [kind(loop, sockets, pub, config, dp_rank, journeys, 0.5 / report_hz) for dp_rank in ranks]
        waiting = set(nodes)

        def commands() -> None:
            for command in parent.commands():
                parent.send(sum(node.published for node in nodes) if command["do"] == "count" else journeys.take())
            if parent.gone:
                loop.stop()

        def announce() -> None:
            for node in nodes:
                for connection in node.connections:
                    connection.tick()
            welcomed = {node for node in waiting if all(each.welcome is not None for each in node.connections)}
            waiting.difference_update(welcomed)
            if welcomed and not waiting:
                parent.ready()

        def progress() -> None:
            for node in nodes:
                if node.taken:
                    node.progress()

        loop.call_every(MEMBER_S, announce)
        loop.after_turn(progress)
        watch_stdin(loop, commands)
        with (reporting or _by_timers)(loop, nodes, report_hz):
            loop.run()
        loop.close()


@contextmanager
def _by_timers(loop: Loop, nodes: Sequence[Rank], report_hz: float) -> Iterator[None]:
    """Spread over the interval, as independent schedulers would be."""

    def report_at(node: Rank) -> None:
        loop.call_every(1 / report_hz, node.report)

    for index, node in enumerate(nodes):
        loop.call_later(index / len(nodes) / report_hz, partial(report_at, node))
    yield


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


class Rank:
    """The part of a rank that a connection needs (`nodes.link.connection.RankEndpoint`), without its core. The methods
    below `wall_s` are called by its connections to controllers."""

    def __init__(
        self, loop: Loop, sockets: Sockets, pub: Socket, config: LinkConfig, dp_rank: int, journeys: Journeys,
        report_gap_s: float,
    ) -> None:  # fmt: skip
        self.instance, self.dp_rank, self.epoch = config.instance, dp_rank, new_epoch()
        self.taken: dict[Connection, list[tuple[str, int]]] = {}
        self.published = 0
        self._config = config
        self._endpoint = f"ipc:///nowhere/{config.instance}-{dp_rank}"
        self._clock = loop.clock
        self._pub = pub
        self._journeys = journeys
        self._reports = Reports()
        self._step = 0
        self._publisher = PublisherCore(
            instance=config.instance, dp_rank=dp_rank, epoch=self.epoch, role=config.role, model=FACTS.model,
            dp_size=config.dp_size, endpoint=self._endpoint, interval_s=config.report_interval_s,
            report_gap_s=report_gap_s, state="ready",
        )  # fmt: skip
        self.connections = []
        for key, address in enumerate(config.controllers):
            endpoint = ControllerAddress(address).nodes
            connection = Connection(sockets, self, key, endpoint, loop.clock, lambda *_: None)
            loop.add(connection.socket, connection.receive, copied=1)
            connection.send_hello()
            self.connections.append(connection)

    def progress(self) -> None:
        """Report to the controllers that everything of this turn started and ended; the load report that acknowledges
        it follows at its time."""
        self._step += 1
        taken, self.taken = self.taken, {}
        for connection, legs in taken.items():
            ended = [Ended(rid, attempt, self._config.role, "ok", "", 1) for rid, attempt in legs]
            connection.progress(legs, ended)

    def report(self) -> None:
        """Publish the load."""
        now = self._clock()
        load = Load(
            seq=0, step=self._step, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=KV_TOKENS,
            max_running=MANY, acks=self._reports.acks,
        )  # fmt: skip
        self._publish(self._publisher.report(load, now))
        self._publish(self._publisher.tick(now))

    def _publish(self, publications: list[Publish]) -> None:
        for publication in publications:
            self.published += 1
            self._pub.send_multipart((topics.of(publication.message), codec.encode(publication.message)))

    # --- from the controller (connection.RankEndpoint) ------------------------------------------------------------

    wall_s = 0.0

    def dispatched(self, connection: Connection, dispatch: Dispatch, frames: list[Any]) -> None:
        """Take a request: acknowledge it, and end it at the turn's end."""
        if len(frames) == 2:
            self._journeys.note(frames[0].buffer)
        self._reports.acknowledge(dispatch)
        self.taken.setdefault(connection, []).append((dispatch.rid, dispatch.attempt))

    def hello(self) -> Hello:
        """Return the hello for a controller."""
        return hello_of(self._config, FACTS, self.dp_rank, self.epoch, "ready", self._endpoint)

    def steps(self) -> tuple[int, bool, int]:
        """Return step, false (it computes nothing) and the number of the last load, for a pong."""
        return self._step, False, self._publisher.load_seq

    def restate_cache(self) -> None: ...

    def recall(self, rid: str) -> tuple[TraceEvent, ...]:
        """Return the recorded events of a request: none."""
        return ()

    def recorded(self, query: RecordQuery) -> RecordReply:
        """Return what the rank has recorded: it does not record."""
        return RecordReply(query.id, records=False)

    def welcomed(self, connection: Connection, welcome: Welcome, again: bool) -> None:
        """Note a controller's welcome."""
        self._reports.welcomed(connection.key, welcome.epoch)

    def cancelled(self, connection: Connection, cancel: CancelLeg) -> None: ...
    def drain(self, cause: str) -> None: ...
    def superseded(self, why: str) -> None: ...
