"""The client's shell for asyncio: its traffic, run by the caller's own event loop. Decides nothing.

No other thread takes part: the calling task sends its messages itself, and a message that comes wakes the task that
waits for it. `socket_reader` reads the sockets.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVarTuple

from bus.errors import PartFailed
from bus.runtime.keys import Keys
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Sockets
from bus.wire.messages import Message
from pdbus.client.channel import CLOSED
from pdbus.client.core import Patience
from pdbus.client.questions import REPEAT_S, A
from pdbus.client.request import Request
from pdbus.client.socket_reader import SocketReader
from pdbus.client.traffic import TICK_S, Sink, Traffic, check_question

log = get_logger("client")
_T = TypeVarTuple("_T")


class LoopChannel:
    """A `Channel` for the running event loop. Only the loop's thread may call it, except for `cancel`, `drop` and
    `abandon`.

    It runs from `open` to `stop`, or to the end of the loop, which it notices because a loop that ends closes the
    asynchronous generators that were started on it: `_lifetime` is one.
    """

    def __init__(self, controllers: Sequence[str], patience: Patience, rng: random.Random, keys: Keys | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = rng
        self.closed = False
        self._pid = os.getpid()
        self._failure: Exception | None = None
        self._reader = SocketReader(self.loop, self._flush, self._fail)
        self._stopping = asyncio.Lock()
        self._left = asyncio.Event()
        self.gone: Future[None] = Future()  # done once its sockets are closed
        self._ending = threading.Lock()
        self._running = self._lifetime()
        self._sockets = Sockets(keys=keys)
        try:
            for endpoint in controllers:
                self._sockets.check(endpoint)
            self._traffic = Traffic(
                controllers, patience, rng, self._sockets, time.monotonic, self._reader.watch, self._reader.unwatch,
                self._reader.send, self._reader.turn_soon,
            )  # fmt: skip
        except BaseException:
            self._close_now()
            raise
        self._timer = self.loop.call_later(TICK_S, self._tick)

    async def open(self) -> None:
        """Register with the loop, so that the channel ends with it. Call it once before the others."""
        await anext(self._running)

    def begin(self, request: Request, sink: Sink) -> None:
        """Start a request; see `Channel.begin`. `sink` is called on the loop's thread, perhaps before this returns."""
        self._raise_if_over()
        self._run(self._traffic.begin, request, sink)
        self._raise_if_over()

    def cancel(self, rid: str, sink: Sink | None = None) -> None:
        """Cancel a request, from any thread, without waiting; see `Channel.cancel`. Nothing in a closed channel or a
        forked child."""
        if self.closed or self._pid != os.getpid():
            return
        if asyncio._get_running_loop() is self.loop:
            self._run(self._traffic.cancel, rid, sink)
        else:
            with suppress(RuntimeError):  # the loop is closed, and this channel with it
                self.loop.call_soon_threadsafe(self.cancel, rid, sink)

    def drop(self, rid: str, sink: Sink) -> None:
        """Cancel a request that is no longer read, from any thread; see `Channel.drop`."""
        self._traffic.dropped.append((rid, sink))

    def ask(
        self,
        controller: str,
        make: Callable[[int], Message],
        kind: type[A],
        timeout_s: float | None = None,
        until: Callable[[A], bool] | None = None,
        repeat_s: float = REPEAT_S,
    ) -> Future[A]:
        """Ask `controller` a question and return the answer's future at once; see `Channel.ask`. A
        ConfigError that `make` raises comes from here."""
        check_question(make, timeout_s)
        self._raise_if_over()
        answer: Future[A] = Future()
        self._run(self._traffic.ask, controller, make, kind, answer, timeout_s, until, repeat_s)
        return answer

    async def stop(self) -> None:
        """Cancel live requests, wait until the sockets are closed; a second call waits for the same. Every sink has its
        Result when this returns."""
        async with self._stopping:
            try:
                await self._running.aclose()
            except RuntimeError:  # the end of the loop is closing it already
                if not self.closed:
                    raise
                await self._left.wait()

    def stop_soon(self) -> None:
        """Cancel live requests and begin to close the sockets, without waiting; the future `gone` is done once they are
        closed. It makes no task, because that would be lost if the loop ends now."""
        self._leave()
        with suppress(RuntimeError):  # the end of the loop is closing it already
            self.loop.run_in_executor(None, self._close)

    def raise_if_inherited(self) -> None:
        """Raise PartFailed in a forked child."""
        raise_if_forked(self._pid)

    def abandon(self) -> None:
        """Stop the channel of a loop that no longer runs, from any thread; blocks until the sockets are closed. If the
        loop is closed, results are dropped."""
        if self.loop.is_closed():
            self._traffic.drop_results()
        self._leave()
        self._close()

    # --- inside -------------------------------------------------------------------------------------------------

    async def _lifetime(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._leave()
            # Messages just sent still leave. The waiting task may be cancelled, the closing must not be.
            try:
                await asyncio.shield(self.loop.run_in_executor(None, self._close))
            finally:
                self._left.set()

    def _leave(self) -> None:
        with self._ending:
            if not self.closed:
                self.closed = self._reader.closed = True
                self._timer.cancel()
                self._run(self._traffic.leave, RuntimeError(CLOSED))

    def _close(self) -> None:
        with self._ending:
            self._sockets.close()
            if not self.gone.done():
                self.gone.set_result(None)

    def _run(self, function: Callable[[*_T], None], *arguments: *_T) -> None:
        if self._failure is not None:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the client after a bug of ours, so that no caller waits without end."""
        self._failure = error
        log.error("client.failed", exc_info=error)
        self._timer.cancel()
        self._close_now()
        self._traffic.fail()

    def _flush(self) -> None:
        self._traffic.flush()

    def _close_now(self) -> None:
        self._reader.close()
        self._sockets.close()

    def _raise_if_over(self) -> None:
        """Raise if the channel is closed or has failed, perhaps while the caller waited."""
        if self.closed:
            raise RuntimeError(CLOSED)
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise PartFailed(f"the client of this process has failed: {why}") from self._failure

    def _tick(self) -> None:
        self._timer = self.loop.call_later(TICK_S, self._tick)
        self._run(self._traffic.tick)


def raise_if_forked(pid: int) -> None:
    """Raise PartFailed if this process is not `pid`: a client belongs to the process that made it."""
    if pid != os.getpid():
        raise PartFailed("this client is the parent process's: in a forked child, make another")
