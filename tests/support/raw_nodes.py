"""A node and a client for tests of a live controller: no threads, read when the test says so, with deadlines.

The node is a bare connection of nodes/link: it has no legs, and ends what it was dispatched when the test says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from bus.embed.publications import PublisherCore
from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec, topics
from bus.wire.codes import Code
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    CONTROLLER_TO_NODE,
    CancelLeg,
    Dispatch,
    Ended,
    Hello,
    Load,
    Message,
    Submit,
    Table,
    TraceEvent,
    Welcome,
)
from nodes.link.connection import Connection
from nodes.link.reports import Reports

M = TypeVar("M", bound=Message)
WAIT_S = 60.0  # of a busy machine; a wait that succeeds ends with its event


class Peer:
    """One DEALER and everything that came over it."""

    def __init__(self, socket: Socket, table: Table) -> None:
        self.socket = socket
        self.table = table
        self.got: list[tuple[Message, list[bytes]]] = []

    def say(self, message: Message, *frames: bytes) -> None:
        self.socket.send_multipart((codec.encode(message), *frames))

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take in at most one message; False when none came in time."""
        if not self.socket.poll(int(timeout_s * 1000), zmq.POLLIN):
            return False
        header, *frames = self.socket.recv_multipart()
        message = codec.decode(header, self.table)
        self.got.append((message, frames))
        self.react([header, *frames])
        return True

    def react(self, frames: list[bytes]) -> None:
        """What a subclass does at once."""

    def wait(self, kind: type[M], count: int = 1, where: Callable[[M], bool] = lambda message: True) -> list[M]:
        """Until `count` messages of `kind` have come in all; AssertionError after the deadline."""
        until = time.monotonic() + WAIT_S
        while True:
            found = [m for m, _ in self.got if isinstance(m, kind) and where(m)]
            if len(found) >= count:
                return found
            left_s = until - time.monotonic()
            assert left_s > 0, f"{len(found)} of {count} {kind.__name__}; got {[type(m).__name__ for m, _ in self.got]}"
            self.read(left_s)


class Client(Peer):
    def __init__(self, sockets: Sockets, controller: str) -> None:
        super().__init__(sockets.dealer(ControllerAddress(controller).clients), CONTROLLER_TO_CLIENT)

    def submit(self, submit: Submit) -> None:
        self.say(submit, b"\1\0\0\0" * max(0, submit.prompt_tokens), b"params")


class Node(Peer):
    """Answers pings and `who`; counts and acknowledges dispatches; ends legs when told, or at once (`eager`)."""

    def __init__(self, sockets: Sockets, info: Hello, controller: str, bus: str = "", *, eager: bool = False) -> None:
        self.instance, self.dp_rank, self.epoch = info.instance, info.dp_rank, info.epoch
        self.info = info
        self.wall_s = 0.0
        self.eager = eager
        self.pub = sockets.pub(BusAddress(bus).publish) if bus else None
        self.legs: list[Dispatch] = []
        self._reports = Reports()
        self._publisher = PublisherCore(
            instance=info.instance, dp_rank=info.dp_rank, epoch=info.epoch, role=info.role, model=info.model,
            dp_size=info.dp_size, endpoint=info.endpoint, interval_s=0.0, report_gap_s=0.0,
        )  # fmt: skip
        endpoint = ControllerAddress(controller).nodes
        self._connection = Connection(sockets, self, 0, endpoint, time.monotonic, _rejected)
        super().__init__(self._connection.socket, CONTROLLER_TO_NODE)
        self._connection.send_hello()

    def react(self, frames: list[bytes]) -> None:
        self._connection.receive(frames)

    def end(self, leg: Dispatch, code: Code = "ok") -> None:
        self.legs.remove(leg)
        started = [(leg.rid, leg.attempt)] if code == "ok" else []
        self._connection.progress(started, [Ended(leg.rid, leg.attempt, leg.leg, code)])

    def report(self) -> None:
        """Publish the load as it is: all legs run."""
        assert self.pub is not None
        tokens = sum(leg.prompt_tokens for leg in self.legs)
        load = Load(
            seq=0, step=0, running=len(self.legs), waiting=0, waiting_tokens=0, kv_tokens=tokens,
            kv_capacity=self.info.kv_capacity, max_running=4, acks=self._reports.acks,
        )  # fmt: skip
        now = time.monotonic()
        for publication in [*self._publisher.report(load, now), *self._publisher.flush(now)]:
            self.pub.send_multipart((topics.of(publication.message), codec.encode(publication.message)))

    def bye(self) -> None:
        self._connection.send_bye()

    # --- what the connection needs of a rank (connection.RankEndpoint) ------------------------------------------

    def hello(self) -> Hello:
        return self.info

    def steps(self) -> tuple[int, bool]:
        return 0, False

    def dispatched(self, connection: Connection, dispatch: Dispatch, frames: list[bytes]) -> None:
        self.legs.append(dispatch)
        self._reports.acknowledge(dispatch)
        if self.eager:
            self.end(dispatch)

    def welcomed(self, connection: Connection, welcome: Welcome, again: bool) -> None:
        self._reports.welcomed(connection.key, welcome.epoch)

    def cancelled(self, connection: Connection, cancel: CancelLeg) -> None: ...
    def drain(self, cause: str) -> None: ...
    def superseded(self, why: str) -> None: ...
    def restate_cache(self) -> None: ...
    def recall(self, rid: str) -> tuple[TraceEvent, ...]:
        return ()


def _rejected(socket: str, error: Exception, peer: str) -> None:
    raise AssertionError(f"the controller said nonsense: {error}")
