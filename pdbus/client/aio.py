"""The client for asyncio: `AsyncClient` and the stream of one request. Owns no sockets (see `channel`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from bus.wire.messages import Status, TokenLogprobs
from pdbus.client.base import BaseClient, BaseStream
from pdbus.client.channel import Channel, Update
from pdbus.client.options import Options, check_options, check_text
from pdbus.client.output import Piece, Result

if TYPE_CHECKING:
    from nodes.own.engines.tokenizer import Tokenizer


class _Post:
    """Updates on their way from the channel's thread to an event loop, which is woken once for all that are there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._updates: deque[tuple[AsyncStream, Update]] = deque()
        self._woken = False

    def put(self, stream: AsyncStream, update: Update) -> None:
        self._updates.append((stream, update))
        if self._woken and not self.loop.is_closed():  # one that was closed does not run what it was woken for
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop has ended: nobody reads any more
            self._woken = False
            self._updates.clear()
            stream.cancel()

    def _deliver(self) -> None:
        self._woken = False  # before it looks, so that none which comes now is forgotten
        while self._updates:
            stream, update = self._updates.popleft()
            stream._updates.put_nowait(update)


class AsyncClient(BaseClient):
    """As `Client`, for asyncio: the same arguments, options and errors."""

    _post: _Post | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is live and leave; idempotent."""
        await asyncio.to_thread(self._channel.stop)

    async def generate(
        self, text: str, *, chat: bool = True, system: str | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """As `Client.generate`. Returns once submitted."""
        check_text(text)
        check_options(options)
        model = options.get("model") or self._texts.model
        if not model:
            model = self._learn_model(await asyncio.wrap_future(self._ask_cluster()))
        tokenizer = await asyncio.to_thread(self._texts.tokenizer, model)
        ids = tokenizer.chat(text, system) if chat else tokenizer.encode(text)
        return await self._begin(ids, options, tokenizer)

    async def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """As `Client.generate_tokens`. Returns once submitted."""
        check_options(options)
        return await self._begin(ids, options, None)

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """As `Client.status`."""
        return await asyncio.wrap_future(self._ask_status(timeout_s))

    async def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """As `Client.drain`."""
        await asyncio.wrap_future(self._ask_drain(instance, dp_rank, timeout_s))

    async def _begin(self, ids: Sequence[int], options: Options, tokenizer: Tokenizer | None) -> AsyncStream:
        if self._leg is None and "leg" not in options:
            self._learn_leg(await asyncio.wrap_future(self._ask_cluster()))
        request = self._request(ids, options, tokenizer)
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = _Post(loop)
        stream = AsyncStream(self._channel, request.rid, ids, tokenizer, request.logprobs)
        self._channel.begin(request, partial(self._post.put, stream))
        return stream


class AsyncStream(BaseStream):
    """The output of one request: `async for` gives `Piece`s; one task may iterate, any may cancel. RequestFailed at the
    end when the request failed.

    Leaving the loop early cancels the request (as does `async with`). `result` is there once the iteration ended.
    """

    def __init__(
        self, channel: Channel, rid: str, prompt_ids: Sequence[int], tokenizer: Tokenizer | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:  # fmt: skip
        super().__init__(channel, rid, prompt_ids, tokenizer, logprobs)
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    @property
    def result(self) -> Result | None:
        """How the request went; None before the iteration ended."""
        return self._result

    async def wait(self) -> Result:
        """The end of the request, what was not read being dropped. Does not raise if it failed."""
        async for _ in self._pieces():
            pass
        assert self._result is not None
        return self._result

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._result is None:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for piece in self._pieces():
                yield piece
        finally:
            if self._result is None:
                self.cancel()
        assert self._result is not None
        self._result.raise_if_failed()

    async def text(self) -> str:
        """All the text (of what was not read yet). RequestFailed when the request fails."""
        return "".join([piece.text async for piece in self])

    async def tokens(self) -> list[int]:
        """All the token ids (of what was not read yet). RequestFailed when the request fails."""
        return [token async for piece in self for token in piece.ids]

    async def _pieces(self) -> AsyncIterator[Piece]:
        while self._result is None:
            if (piece := self._piece(await self._updates.get())) is not None:
                yield piece
