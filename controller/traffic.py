"""The controller's messages: what comes over its sockets, as events for its core, and the core's actions, as frames.

This module owns how messages are read and written, and the handling of broken ones; sockets, clock and thread are
the shell's. Payload frames go through as they came: `zmq.Frame`s, neither decoded nor copied. Messages to send wait
until the turn is over, so that those to one peer share system calls.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from bus.actions import Publish
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.rights import key_of, speaks_for
from bus.runtime.frames import name_of, send
from bus.runtime.intake import Rejections
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Socket
from bus.runtime.token_buckets import LARGE, TokenBuckets
from bus.wire import codec, topics
from bus.wire.codes import refusal_of
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    NODE_TO_CONTROLLER,
    Accepted,
    Beacon,
    Done,
    Message,
    Refused,
    Submit,
)
from controller.core import ControllerCore
from controller.events import (
    ClientGone,
    Event,
    FromClient,
    FromNode,
    Over,
    Published,
    ToClient,
    ToNode,
    Undelivered,
    Unreachable,
)
from controller.requests.record import RequestRecord

LOCAL = "local"  # the peer that is this process; routing ids are bytes

log = get_logger("controller")


class Traffic:
    """The messages between `core` and its three sockets (clients, nodes, publications). `on_local` gets what is for
    this process itself, `on_beacon` is called for each beacon, `on_over` for each traced request that ended. All
    methods are for the loop's thread."""

    def __init__(
        self,
        core: ControllerCore,
        clock: Callable[[], float],
        clients: Socket,
        nodes: Socket,
        pub: Socket,
        on_local: Callable[[Message], None] | None,
        on_beacon: Callable[[], None],
        on_over: Callable[[RequestRecord], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._clients = clients
        self._nodes = nodes
        self._pub = pub
        self._on_local = on_local
        self._on_beacon = on_beacon
        self._on_over = on_over
        self._outbox: list[Any] = []
        self._buckets = TokenBuckets()
        self._rejections = Rejections(log, core.counts, prefix="rejected_")

    # --- in -----------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Let the core decide; its actions are done at the end of the turn."""
        self._outbox += self._core.handle(event, self._clock())

    def from_client(self, frames: list[Any]) -> None:
        """Handle a client's message (its routing id, header and payload). An invalid one is refused and counted."""
        peer = frames[0]
        try:
            if len(frames) < 2:
                raise RemoteProtocolError("frames", "no header")
            message = codec.decode(frames[1], CLIENT_TO_CONTROLLER)
            if len(frames) > 2 and type(message) is not Submit:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            self.reject(peer, error)
            self._send(self._clients, peer, Refused(refusal_of(error.reason), str(error)[:1024]))
            return
        self.handle(FromClient(peer, message, frames[2:]))

    def from_node(self, frames: list[bytes]) -> None:
        """Handle a node's message (its routing id and header). An invalid one, or one for an instance that its key does
        not own, is refused and counted."""
        peer = frames[0]
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = codec.decode(frames[1], NODE_TO_CONTROLLER)
            instance = getattr(message, "instance", None)  # a pong has none
            if instance is not None and not speaks_for(peer, instance):
                raise RemoteProtocolError("not_yours", f"{type(message).__name__} of {instance}")
        except RemoteProtocolError as error:
            self.reject(peer, error)
            self._send(self._nodes, peer, Refused(refusal_of(error.reason), str(error)[:1024]))
            return
        self.handle(FromNode(peer, message))

    def published(self, frames: list[bytes]) -> None:
        """Handle a publication of the bus. An invalid one is counted."""
        try:
            message = topics.read(frames)
        except RemoteProtocolError as error:
            self.reject(frames[0], error)
            return
        if type(message) is Beacon:
            self._on_beacon()
        self.handle(Published(message))

    def reject(self, peer: bytes, error: RemoteProtocolError) -> None:
        """Count an invalid message; log the first of each peer."""
        self._rejections.note(name_of(peer), error)

    # --- out ----------------------------------------------------------------------------------------------------------

    def farewell(self) -> None:
        """End every live request here, and send its client so; it then sends the request elsewhere."""
        self._outbox = self._core.shutdown(self._clock())
        self.carry_out()

    def carry_out(self) -> None:
        """Do the collected actions; the loop calls it at the end of each turn. It never waits: a message for a full or
        gone peer becomes an event."""
        outbox = self._outbox
        for action in outbox:  # what a failed send leads to joins the end of the list
            kind = type(action)
            if kind is ToNode:
                if failure := self._send(self._nodes, action.peer, action.message, action.frames):
                    gone = failure == errno.EHOSTUNREACH
                    self.handle((Unreachable if gone else Undelivered)(action.peer, action.message))
            elif kind is ToClient:
                if action.peer is LOCAL:
                    if self._on_local is not None:
                        self._on_local(action.message)
                elif failure := self._send(self._clients, action.peer, action.message):
                    if type(action.message) is not Done:  # it has its last token, and need not stay for this
                        self._core.counts["clients_unreachable"] += 1  # it may come back and ask again
                    if failure == errno.EHOSTUNREACH and type(action.message) is Accepted:
                        self.handle(ClientGone(action.peer, action.message.rid))
            elif kind is Publish:
                self._publish(action.message)
            elif kind is Over:
                self._on_over(action.record)
            else:
                getattr(log, action.level)(action.event, **action.fields)
        outbox.clear()

    def _send(self, router: Socket, peer: bytes, message: Message, frames: Sequence[Any] = ()) -> int:
        """Send a message; return 0, or the errno of the reason why it did not leave."""
        try:
            header = codec.encode(message)
        except LocalProtocolError as error:
            log.error("message.too_large", detail=str(error))
            header = codec.encode(
                Refused("too_many", "the answer does not fit in a message", getattr(message, "id", 0))
            )
        if len(header) > LARGE and not self._buckets.allows(key_of(peer) or peer, len(header), self._clock()):
            return errno.EAGAIN
        try:
            send(router, (peer, header, *frames))
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return error.errno
        return 0

    def _publish(self, message: Message) -> None:
        try:
            send(self._pub, (topics.of(message), codec.encode(message)))
        except LocalProtocolError as error:
            log.error("message.too_large", detail=str(error))
