"""What reads and writes the sockets of a client on an event loop. Decides nothing.

The descriptor of a ZeroMQ socket says that something happened, not that there is a message, and says it once. So a
socket is read until it is empty, and looked at again after whatever was sent, since sending takes in what happened too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from bus.runtime import frames
from bus.runtime.connection_limiter import hang_up
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Socket

BUDGET = 64  # messages of a socket before others have their turn

log = get_logger("client")
Handler = Callable[[list[bytes]], None]


class SocketReader:
    """Each message of a watched socket goes to its handler. `flush` sends what is to be said, and is called soon after
    `turn_soon`. What either of them raises ends the reading and goes to `failed`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, flush: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._loop = loop
        self._flush = flush
        self._failed = failed
        self._handlers: dict[Socket, tuple[int, Handler]] = {}
        self.closed = False  # nothing is to be read any more, and the loop may be closed too
        self._turning = False  # `_turn` is to come
        self._unseen: set[Socket] = set()  # to be looked at then
        self._skipping: set[Socket] = set()  # in the midst of a message with too many frames

    def watch(self, socket: Socket, handler: Handler) -> None:
        descriptor = int(socket.getsockopt(zmq.FD))
        self._handlers[socket] = descriptor, handler
        self._loop.add_reader(descriptor, self._read, socket, True)
        self._look_soon(socket)

    def unwatch(self, socket: Socket) -> None:
        descriptor, _ = self._handlers.pop(socket)
        self._skipping.discard(socket)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)

    def close(self) -> None:
        """Watch none any more."""
        self.closed = True
        for socket in list(self._handlers):
            self.unwatch(socket)

    def send(self, socket: Socket, message: Sequence[bytes]) -> None:
        frames.send(socket, message)
        self._unseen.add(socket)

    def turn_soon(self) -> None:
        if not self._turning and not self.closed:
            self._turning = True
            self._loop.call_soon(self._turn)

    # --- inside -------------------------------------------------------------------------------------------------

    def _look_soon(self, socket: Socket) -> None:
        self._unseen.add(socket)
        self.turn_soon()

    def _turn(self) -> None:
        """Send what was said, and look at what may have come."""
        self._turning = False
        if self.closed:
            return
        try:
            self._flush()
        except Exception as error:
            self._failed(error)
        unseen, self._unseen = self._unseen, set()
        for socket in unseen:
            self._read(socket, False)

    def _read(self, socket: Socket, likely: bool) -> None:
        try:
            self._drain(socket, likely)
        except Exception as error:
            self._failed(error)

    def _drain(self, socket: Socket, likely: bool) -> None:
        """Read it until it is empty. To ask first whether there is a message costs less than an attempt in vain, and
        more than one that succeeds: so not where it is `likely` that there is one."""
        likely = likely and socket not in self._skipping
        for _ in range(BUDGET):
            watched = self._handlers.get(socket)
            if watched is None or not (likely or frames.has_message(socket)):
                return
            likely = False
            if socket in self._skipping:
                if frames.skip(socket):
                    self._skipping.discard(socket)
                continue
            try:
                received = frames.receive(socket)
            except zmq.Again:
                return
            except frames.TooManyFrames as error:
                log.warning("peer.cut_off", peer=error.source, why="too_many_frames")
                hang_up(error.descriptor, error.source)
                self._skipping.add(socket)
                continue
            watched[1](received)
        self._look_soon(socket)
