"""The client's shell for asyncio: its traffic, run by the caller's own event loop. Decides nothing.

No thread is crossed: the task that has something to say sends it, and what comes wakes the task that waits for it.

The descriptor of a ZeroMQ socket says that something happened, not that there is a message, and says it once. So a
socket is read until it is empty, and looked at again after whatever was sent, since sending takes in what happened too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVarTuple

import zmq

from bus.errors import PartFailed
from bus.runtime import frames
from bus.runtime.doors import hang_up
from bus.runtime.keys import Keys
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Socket, Sockets
from bus.wire.messages import Message, Status
from pdbus.client.core import Patience
from pdbus.client.request import Request
from pdbus.client.traffic import TICK_S, Sink, Traffic, check_question

BUDGET = 64  # messages of a socket before others have their turn

log = get_logger("client")
_T = TypeVarTuple("_T")


class LoopChannel:
    """As `Channel`, for one event loop, which alone calls it, `cancel` excepted. Serves from `open` to `stop` or to the
    end of the loop: `asyncio.run` then ends the asynchronous generators that it knows, and `_life` is one."""

    def __init__(self, controllers: Sequence[str], patience: Patience, rng: random.Random, keys: Keys | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = rng
        self.closed = False
        self._failure: Exception | None = None
        self._handlers: dict[Socket, tuple[int, Callable[[list[bytes]], None]]] = {}
        self._turning = False  # `_turn` is to come
        self._unseen: set[Socket] = set()  # to be looked at then
        self._skipping: set[Socket] = set()  # in the midst of a message with too many frames
        self._stopping = asyncio.Lock()
        self._living = self._life()
        self._sockets = Sockets(keys=keys)
        try:
            self._traffic = Traffic(
                controllers, patience, rng, self._sockets, time.monotonic, self._watch, self._unwatch, self._send,
                self._flush_soon,
            )  # fmt: skip
        except BaseException:
            self._close_now()
            raise
        self._timer = self.loop.call_later(TICK_S, self._tick)

    async def open(self) -> None:
        await anext(self._living)

    def begin(self, request: Request, sink: Sink) -> None:
        """As `Channel.begin`."""
        self._run(self._traffic.begin, request, sink)
        self._raise_if_failed()

    def cancel(self, rid: str) -> None:
        """As `Channel.cancel`; from any thread."""
        if self.closed:
            return
        if asyncio._get_running_loop() is self.loop:
            self._run(self._traffic.cancel, rid)
        else:
            with suppress(RuntimeError):  # the loop is closed, and so will this be
                self.loop.call_soon_threadsafe(self.cancel, rid)

    def ask(
        self,
        controller: str,
        make: Callable[[int], Message],
        timeout_s: float | None = None,
        until: Callable[[Status], bool] | None = None,
    ) -> Future[Status]:
        """As `Channel.ask`."""
        check_question(make)
        self._raise_if_failed()
        answer: Future[Status] = Future()
        self._run(self._traffic.ask, controller, make, timeout_s, until, answer)
        return answer

    async def stop(self) -> None:
        """Cancel what is live, and leave; idempotent. Every sink has got its Result when this returns."""
        async with self._stopping:
            await self._living.aclose()

    def abandon(self) -> None:
        """`stop`, of a loop that does not run any more; on any thread."""
        if self.loop.is_closed():
            self._traffic.mute()
        self._leave()
        self._sockets.close()

    # --- inside -------------------------------------------------------------------------------------------------

    async def _life(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._leave()
            # What was just said still goes out. Whoever waits may be cancelled, but not the closing.
            await asyncio.shield(self.loop.run_in_executor(None, self._sockets.close))

    def _leave(self) -> None:
        if not self.closed:
            self.closed = True
            self._timer.cancel()
            self._run(self._traffic.leave)

    def _run(self, function: Callable[[*_T], None], *arguments: *_T) -> None:
        """What it raises is a bug of ours, and the end: nobody may wait for ever."""
        if self._failure is not None:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._failure = error
            log.exception("client.failed")
            self._timer.cancel()
            self._close_now()
            self._traffic.fail()

    def _close_now(self) -> None:
        for socket in list(self._handlers):
            self._unwatch(socket)
        self._sockets.close()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise PartFailed(f"the client of this process has failed: {why}") from self._failure

    def _tick(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._tick)
        self._run(self._traffic.tick)

    # --- sockets ------------------------------------------------------------------------------------------------

    def _watch(self, socket: Socket, handler: Callable[[list[bytes]], None]) -> None:
        descriptor = int(socket.getsockopt(zmq.FD))
        self._handlers[socket] = descriptor, handler
        self.loop.add_reader(descriptor, self._read, socket, True)
        self._look_soon(socket)

    def _unwatch(self, socket: Socket) -> None:
        descriptor, _ = self._handlers.pop(socket)
        self._skipping.discard(socket)
        if not self.loop.is_closed():
            self.loop.remove_reader(descriptor)

    def _send(self, socket: Socket, message: Sequence[bytes]) -> None:
        frames.send(socket, message)
        self._unseen.add(socket)

    def _look_soon(self, socket: Socket) -> None:
        self._flush_soon()
        self._unseen.add(socket)

    def _flush_soon(self) -> None:
        if not self._turning and not self.closed:  # then `leave` flushes, and its loop may be closed too
            self._turning = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Send what was said, and look at what may have come."""
        self._turning = False
        self._run(self._traffic.flush)
        unseen, self._unseen = self._unseen, set()
        for socket in unseen:
            self._read(socket, False)

    def _read(self, socket: Socket, likely: bool) -> None:
        self._run(self._drain, socket, likely)

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
