"""One rank's connection to one controller: hello, liveness, what comes in and goes out. Owns its DEALER.

A controller may come late, vanish and return: the rank says hello until it is welcomed, and again when it has heard
nothing for a lease. Requests of a vanished controller go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog
import zmq

from bus.codec import decode, encode
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.messages import (
    CONTROLLER_TO_NODE,
    Bye,
    CancelLeg,
    Dispatch,
    Drain,
    Ended,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    Who,
)
from bus.sockets import PAYLOAD_MAX, Socket, Sockets

HELLO_S = 1.0
WHO_GAP_S = 0.05
DEFAULT_LEASE_S = 3.0
MAX_ENDED_PER_MESSAGE = 128  # so that both fit in a frame with the longest rids and sentences, in any script
MAX_STARTED_PER_MESSAGE = 512

log = structlog.get_logger("node")


class LinkedRank(Protocol):
    """What a link needs of its rank."""

    instance: str
    dp_rank: int
    epoch: int

    def hello(self) -> Hello: ...
    def welcomed(self, link: Link, welcome: Welcome, again: bool) -> None: ...
    def dispatched(self, link: Link, dispatch: Dispatch, frames: list[bytes]) -> None: ...
    def cancelled(self, link: Link, cancel: CancelLeg) -> None: ...
    def drain(self, cause: str) -> None: ...
    def pong(self, n: int) -> Pong: ...


class Link:
    """`key` names it to the rank's core as the owner of legs."""

    def __init__(
        self, sockets: Sockets, rank: LinkedRank, key: int, endpoint: str, clock: Callable[[], float],
        rejected: Callable[[str, RemoteProtocolError], None],
    ) -> None:  # fmt: skip
        self.rank = rank
        self.key = key
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self.unsent = 0
        self._clock = clock
        self._rejected = rejected
        self._sockets = sockets
        self._heard_at = float("-inf")
        self._hello_at = float("-inf")
        self.socket: Socket = sockets.dealer(endpoint, maximum=PAYLOAD_MAX)

    @property
    def silent(self) -> bool:
        """Never welcomed, or nothing heard for a lease."""
        return self.welcome is None or self._clock() - self._heard_at > (self.welcome.lease_s or DEFAULT_LEASE_S)

    def tick(self) -> None:
        if self.silent and self._clock() - self._hello_at >= HELLO_S:
            self.say_hello()

    def say_hello(self) -> None:
        self._hello_at = self._clock()
        self.send(self.rank.hello())

    def say_bye(self) -> None:
        self.send(Bye(self.rank.instance, self.rank.dp_rank, self.rank.epoch))

    def progress(self, started: list[tuple[str, int]], ended: list[Ended]) -> None:
        """One message, or a few when there is very much to tell."""
        while started or ended:
            self.send(
                Progress(
                    self.rank.instance,
                    self.rank.dp_rank,
                    self.rank.epoch,
                    tuple(started[:MAX_STARTED_PER_MESSAGE]),
                    tuple(ended[:MAX_ENDED_PER_MESSAGE]),
                )
            )
            started, ended = started[MAX_STARTED_PER_MESSAGE:], ended[MAX_ENDED_PER_MESSAGE:]

    def send(self, message: Message) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except (zmq.Again, LocalProtocolError) as error:
            if not self.unsent:
                log.warning("controller.unsent", endpoint=self.endpoint, why=type(error).__name__)
            self.unsent += 1

    def receive(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[0], CONTROLLER_TO_NODE)
            if len(frames) > 1 and not isinstance(message, Dispatch):
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            self._rejected("controller", error)
            return
        now = self._clock()
        self._heard_at = now
        rank = self.rank
        if isinstance(message, Dispatch):
            rank.dispatched(self, message, frames[1:])
        elif isinstance(message, Ping):
            self.send(rank.pong(message.n))
        elif isinstance(message, CancelLeg):
            rank.cancelled(self, message)
        elif isinstance(message, Welcome):
            again = self.welcome is not None
            self.welcome = message
            rank.welcomed(self, message, again)
        elif isinstance(message, Who):
            if now - self._hello_at >= WHO_GAP_S:
                self.say_hello()
        elif isinstance(message, Drain):
            rank.drain("drain")
        elif isinstance(message, Refused):
            log.warning("controller.refused", endpoint=self.endpoint, code=message.code, why=message.message)

    def close(self, *, linger_ms: int) -> None:
        self._sockets.close_socket(self.socket, linger_ms=linger_ms)
