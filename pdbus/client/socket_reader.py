"""Reads and writes the sockets of a client on an event loop. Decides nothing.

The descriptor of a ZeroMQ socket signals once that something happened, not that there is a message. So a socket is read
until it is empty, and checked again after each send, because sending processes pending events of the socket too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from bus.runtime import frames
from bus.runtime.connection_limiter import hang_up
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Socket

BUDGET = 64  # messages read from one socket before the others are read

log = get_logger("client")
Handler = Callable[[list[bytes]], None]


class SocketReader:
    """Passes each message of a watched socket to its handler, on the loop's thread. `flush` sends pending messages; it
    is called in the next turn of the loop after `turn_soon`. An exception of a handler or of `flush` is passed to
    `failed`. For the loop's thread alone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, flush: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._loop = loop
        self._flush = flush
        self._failed = failed
        self._handlers: dict[Socket, tuple[int, Handler]] = {}
        self.closed = False  # nothing is read any more; the loop may be closed too
        self._turning = False  # `_turn` is scheduled
        self._unseen: set[Socket] = set()  # sockets to check in the next turn
        self._skipping: set[Socket] = set()  # sockets in the middle of a message with too many frames

    def watch(self, socket: Socket, handler: Handler) -> None:
        """Call `handler` with the frames of each message of `socket` from now on."""
        descriptor = int(socket.getsockopt(zmq.FD))
        self._handlers[socket] = descriptor, handler
        self._loop.add_reader(descriptor, self._read, socket, True)
        self._look_soon(socket)

    def unwatch(self, socket: Socket) -> None:
        """Stop watching a socket; it is not closed."""
        descriptor, _ = self._handlers.pop(socket)
        self._skipping.discard(socket)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)

    def close(self) -> None:
        """Stop watching all sockets, for good; they are not closed."""
        self.closed = True
        for socket in list(self._handlers):
            self.unwatch(socket)

    def send(self, socket: Socket, message: Sequence[bytes]) -> None:
        """Send a message without waiting. Raises zmq.Again if the socket's queue is full."""
        frames.send(socket, message)
        self._unseen.add(socket)

    def turn_soon(self) -> None:
        """Have the loop call `flush` and read the sockets in its next turn; further calls before that
        change nothing."""
        if not self._turning and not self.closed:
            self._turning = True
            self._loop.call_soon(self._turn)

    # --- inside -------------------------------------------------------------------------------------------------

    def _look_soon(self, socket: Socket) -> None:
        self._unseen.add(socket)
        self.turn_soon()

    def _turn(self) -> None:
        """Send pending messages, and read sockets that may have messages."""
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
        """Read `socket` until it is empty. Checking for a message first costs less than a read that fails, but more
        than one that succeeds; so there is no check where a message is `likely`."""
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
