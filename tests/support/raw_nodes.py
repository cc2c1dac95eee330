"""A fake node and a fake client on raw sockets, polled with deadlines, for tests of a live controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    CONTROLLER_TO_NODE,
    Ack,
    Bye,
    Dispatch,
    Ended,
    Hello,
    Load,
    LoadReport,
    Message,
    Ping,
    Pong,
    Progress,
    Submit,
    Welcome,
    Who,
)

M = TypeVar("M", bound=Message)
WAIT_S = 15.0


class Peer:
    """One DEALER and everything that came over it."""

    def __init__(self, socket: Socket, table: dict[str, type[Message]]) -> None:
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
        self.react(message, frames)
        return True

    def react(self, message: Message, frames: list[bytes]) -> None:
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

    def __init__(self, sockets: Sockets, hello: Hello, controller: str, bus: str = "", *, eager: bool = False) -> None:
        super().__init__(sockets.dealer(ControllerAddress(controller).nodes), CONTROLLER_TO_NODE)
        self.hello = hello
        self.eager = eager
        self.pub = sockets.pub(BusAddress(bus).publish) if bus else None
        self.legs: list[Dispatch] = []
        self.ingested = 0
        self.tokens = 0
        self.epoch = 0
        self.seq = 0
        self.say(hello)

    def react(self, message: Message, frames: list[bytes]) -> None:
        if isinstance(message, Ping):
            self.say(Pong(message.n, 0, False))
        elif isinstance(message, Who):
            self.say(self.hello)
        elif isinstance(message, Welcome):
            self.epoch = message.epoch
        elif isinstance(message, Dispatch):
            self.legs.append(message)
            self.ingested += 1
            self.tokens += message.charge
            if self.eager:
                self.end(message)

    def end(self, leg: Dispatch, code: str = "ok") -> None:
        self.legs.remove(leg)
        started = ((leg.rid, leg.attempt),) if code == "ok" else ()
        ended = Ended(leg.rid, leg.attempt, leg.leg, code)  # type: ignore[arg-type]
        self.say(Progress(self.hello.instance, self.hello.dp_rank, self.hello.epoch, started, (ended,)))

    def report(self) -> None:
        """Publish the load as it is: all legs run."""
        assert self.pub is not None
        self.seq += 1
        tokens = sum(leg.prompt_tokens for leg in self.legs)
        acks = (Ack(self.epoch, self.ingested, self.tokens),) if self.epoch else ()
        load = Load(self.seq, self.seq, len(self.legs), 0, 0, tokens, self.hello.kv_capacity, 4, acks)
        report = LoadReport(self.hello.instance, self.hello.dp_rank, self.hello.epoch, self.seq, load)
        self.pub.send_multipart((topics.of(report), codec.encode(report)))

    def bye(self) -> None:
        self.say(Bye(self.hello.instance, self.hello.dp_rank, self.hello.epoch))
