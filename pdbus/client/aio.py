"""The client for asyncio: `AsyncClient` and the stream of one request. Owns no sockets (see `loop_channel`)."""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from bus.runtime.keys import any_key
from bus.wire.messages import Role, Status, TraceReply
from pdbus.client.base import BaseClient, BaseStream
from pdbus.client.channel import CLOSED
from pdbus.client.loop_channel import LoopChannel, raise_if_forked
from pdbus.client.options import Options, check_options, check_text
from pdbus.client.output import Piece, Result
from pdbus.client.request import Request
from pdbus.client.traffic import Update

if TYPE_CHECKING:
    from pdbus.text.models import ModelText

CLOSE_S = 5.0  # how long `close` waits for another loop to leave


class AsyncClient(BaseClient):
    """A `Client` for asyncio, with the same arguments, options and errors. Starts no thread: the event loop that uses
    it carries its messages. Each of several loops has its own connections, and its requests end with it.
    """

    def _start(self, keys: str | Path, seed: int | None) -> None:
        self._keys = any_key(keys)
        self._rng = random.Random(seed)
        self._channels: dict[asyncio.AbstractEventLoop, LoopChannel] = {}
        self._closed = False
        self._pid = os.getpid()

    async def __aenter__(self) -> AsyncClient:
        await self._channel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel live requests and close the connections, also those on other loops (it waits up to 5 s for each).
        Calling it again does nothing, nor does a forked child."""
        if self._pid != os.getpid():
            return
        self._closed = True
        here = asyncio.get_running_loop()
        for loop, channel in list(self._channels.items()):
            if loop is here:
                await channel.stop()
                continue
            if loop.is_running():
                with suppress(RuntimeError):  # it has just been closed
                    loop.call_soon_threadsafe(channel.stop_soon)
                    await asyncio.wait([asyncio.wrap_future(channel.gone)], timeout=CLOSE_S)
            if not (channel.gone.done() or loop.is_running()):
                await asyncio.to_thread(channel.abandon)

    async def generate(
        self, text: str, *, chat: bool = True, system: str | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Submit `text` as a user's turn in the model's chat template, after the system message `system` (None: none);
        the stream's pieces carry text. With `chat` false, submit it as it is. Return once it is submitted; before that
        it may wait for the controller's answer, and for the tokenizer (loaded in a thread). Errors are those of
        `Client.generate`."""
        check_text(text)
        check_options(options)
        channel = await self._channel()
        model = options.get("model") or self._texts.model
        if not model:
            model = self._learn_model(await asyncio.wrap_future(self._ask_cluster(channel)))
        its, ids = await asyncio.to_thread(self._texts.prompt, model, text, chat, system)
        return await self._begin(channel, ids, options, its)

    async def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """Submit token ids; the stream's pieces carry ids alone. Return once they are submitted; the first call may
        wait for the controller's answer. Errors are those of `Client.generate_tokens`."""
        check_options(options)
        return await self._begin(await self._channel(), ids, options, None)

    async def status(
        self, *, timeout_s: float | None = None, events_from: int | None = None, requests: bool = False
    ) -> Status:
        """Return the controller's status: its ranks and counts; see `Client.status`. Raises PeerLost when it does not
        answer within `timeout_s` (None: `connect_timeout_s`)."""
        return await asyncio.wrap_future(self._ask_status(await self._channel(), timeout_s, events_from, requests))

    async def trace(self, rid: str, *, timeout_s: float | None = None) -> TraceReply:
        """Return what controller and ranks recorded of the request `rid`; see `Client.trace`. Raises RequestFailed when
        this client may not see it, and PeerLost as `status` does."""
        return await asyncio.wrap_future(self._ask_trace(await self._channel(), rid, timeout_s))

    async def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """Order a rank to finish its requests and leave; return when the controller has taken the order. Errors are
        those of `Client.drain`."""
        await asyncio.wrap_future(self._ask_drain(await self._channel(), instance, dp_rank, timeout_s))

    async def drain_role(self, role: Role, model: str = "", *, timeout_s: float | None = None) -> None:
        """Drain all ranks of a role, of one model or of all models (empty), as `drain` does; see
        `Client.drain_role`."""
        await asyncio.wrap_future(self._ask_drain_role(await self._channel(), role, model, timeout_s))

    async def _begin(
        self, channel: LoopChannel, ids: Sequence[int], options: Options, text: ModelText | None
    ) -> AsyncStream:
        if not self._knows(options):
            self._learn_leg(self._model(options), await asyncio.wrap_future(self._ask_cluster(channel)))
        request = self._request(channel, ids, options, text)
        stream = AsyncStream(channel, request, text, self._learnt.clear)
        channel.begin(request, stream._sink)
        return stream

    async def _channel(self) -> LoopChannel:
        """Return the channel of the running loop."""
        raise_if_forked(self._pid)
        self._raise_if_closed()
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None or channel.closed:
            channel = LoopChannel(self._controllers.endpoints, self._patience, self._rng, self._keys)
            over = [self._channels.pop(other, None) for other in list(self._channels) if other.is_closed()]
            self._channels[loop] = channel
            await channel.open()
            for former in over:
                if former is not None:
                    await asyncio.to_thread(former.abandon)
            try:
                self._raise_if_closed()  # another thread may have closed the client without seeing this channel
            except RuntimeError:
                await channel.stop()
                raise
        return channel

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(CLOSED)


class _Inbox:
    """The updates of a request that were not read yet. The channel holds this object and not the stream, so that the
    stream is collected when the caller drops it."""

    __slots__ = ("callback", "reader", "updates")

    def __init__(self) -> None:
        self.updates: deque[Update] = deque()
        self.reader: asyncio.Future[None] | None = None  # waits for the next update
        self.callback: Callable[[], None] | None = None  # called instead of waking the reader

    def put(self, update: Update) -> None:
        self.updates.append(update)
        if self.callback is not None:
            self.callback()
        elif self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class AsyncStream(BaseStream):
    """The output of one request. `async for` gives `Piece`s; a request that failed raises RequestFailed at the end.

    One task may iterate, any task may cancel. Leaving the loop early cancels the request (as `async with` does), and so
    does dropping the stream before its end. `result` is available after the iteration.
    """

    def __init__(
        self, channel: LoopChannel, request: Request, text: ModelText | None, forget: Callable[[], object]
    ) -> None:
        self._inbox = _Inbox()
        self._updates = self._inbox.updates
        super().__init__(channel, request, text, forget, self._inbox.put)

    @property
    def result(self) -> Result | None:
        """The result of the request; None until its last piece was read. It waits for nothing."""
        return self._result

    async def wait(self) -> Result:
        """Wait for the end of the request, drop output that was not read, and return the result. Does not raise if the
        request failed. Cancelling the waiting task cancels the request."""
        try:
            while await self.next() is not None:
                pass
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self._result is not None
        return self._result

    async def next(self) -> Piece | None:
        """Return the next piece; None at the end, when `result` is available. A caller that stops calling this does not
        cancel the request."""
        while self._result is None:
            if (piece := self.take()) is not None:
                return piece
            if self._result is None:
                self._channel.raise_if_inherited()
                self._inbox.reader = reader = asyncio.get_running_loop().create_future()
                await reader
        return None

    def take(self) -> Piece | None:
        """Return the next piece that has come already; None if there is none now. If `result` is set then, the request
        has ended."""
        while self._updates:
            if (piece := self._piece(self._updates.popleft())) is not None:
                return piece
        return None

    def on_update(self, function: Callable[[], None] | None) -> None:
        """Call `function` on the loop's thread when new output or the result has come, and at once where some waits to
        be read; None ends that. For callers that wait for several streams and read them with `take`."""
        self._inbox.callback = function
        if function is not None and self._updates:
            function()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._result is None:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while (piece := await self.next()) is not None:
                yield piece
        finally:
            if self._result is None:
                self.cancel()
        assert self._result is not None
        self._result.raise_if_failed()

    async def text(self) -> str:
        """Return all text that was not read yet. Raises RequestFailed when the request fails."""
        return "".join([piece.text async for piece in self])

    async def tokens(self) -> list[int]:
        """Return all token ids that were not read yet. Raises RequestFailed when the request fails."""
        return [token async for piece in self for token in piece.ids]
