"""The client for asyncio: `AsyncClient` and the stream of one request. Owns no sockets (see `channel`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

from bus.wire.messages import DrainRank, Leg, Status, StatusQuery
from pdbus.client.channel import Channel, Update
from pdbus.client.options import (
    Options,
    block_tokens_for,
    check_options,
    check_text,
    leg_for,
    make_plan,
    model_of,
    patience,
    where,
)
from pdbus.client.output import Piece, Result, Texts, Writer


class AsyncClient:
    """As `Client`, for asyncio: the same options and errors."""

    def __init__(
        self,
        controller: str | None = None,
        *,
        prefill_controller: str | None = None,
        decode_controller: str | None = None,
        retries: int = 6,
        connect_timeout_s: float = 10.0,
        keys: str | Path = "",
        model: str = "",
        seed: int | None = None,
    ) -> None:
        self._where = where(controller, prefill_controller, decode_controller)
        self._channel = Channel(self._where.endpoints, patience(retries, connect_timeout_s), keys=keys, seed=seed)
        self._texts = Texts(model)
        self._leg: Leg | None = None if self._where.prefill is None else "pair"
        self._block_tokens = 0

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
        """Submit `text`; see `Client.generate`. Returns once submitted."""
        check_text(text)
        check_options(options)
        model = options.get("model") or self._texts.model or self._texts.learn(model_of(await self.status()))
        tokenizer = await asyncio.to_thread(self._texts.tokenizer, model)
        ids = tokenizer.chat(text, system) if chat else tokenizer.encode(text)
        return await self._begin(ids, options, Writer(tokenizer), tokenizer.eos_ids)

    async def generate_tokens(self, ids: Sequence[int], **options: Unpack[Options]) -> AsyncStream:
        """Submit token ids; the stream's pieces carry ids alone."""
        check_options(options)
        return await self._begin(ids, options, None, ())

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """What the controller (of the decode legs) knows of its ranks. PeerLost when none answers in time."""
        answer = await asyncio.wrap_future(self._channel.ask(self._where.decode, StatusQuery, timeout_s))
        assert isinstance(answer, Status)
        return answer

    async def drain(self, instance: str, dp_rank: int, *, timeout_s: float | None = None) -> None:
        """Let a rank finish what it has and leave. RequestFailed when the controller knows no such rank."""
        question = self._channel.ask(self._where.decode, lambda id: DrainRank(id, instance, dp_rank), timeout_s)
        await asyncio.wrap_future(question)

    async def _begin(
        self, ids: Sequence[int], options: Options, writer: Writer | None, eos_ids: Sequence[int]
    ) -> AsyncStream:
        if self._leg is None and "leg" not in options:
            status = await self.status()
            self._leg, self._block_tokens = leg_for(status), block_tokens_for(status)
        rid, plan = make_plan(
            ids, options, self._where, self._leg or "pair", eos_ids, self._channel, self._block_tokens
        )
        stream = AsyncStream(self._channel, rid, tuple(ids), writer)
        self._channel.begin(rid, plan, stream._sink)
        return stream


class AsyncStream:
    """The output of one request: `async for` gives `Piece`s; one task may iterate, any may cancel.

    Leaving the loop early cancels the request (as does `async with`). `result` is there once the iteration ended.
    """

    def __init__(self, channel: Channel, rid: str, prompt_ids: tuple[int, ...], writer: Writer | None) -> None:
        self.rid = rid
        self.prompt_ids = prompt_ids
        self._channel = channel
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._result: Result | None = None

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

    def cancel(self) -> None:
        """End the request now; the iteration stops, and `result.finish` is `cancelled`."""
        self._channel.cancel(self.rid)

    async def text(self) -> str:
        """All the text (of what was not read yet). RequestFailed when the request fails."""
        return "".join([piece.text async for piece in self])

    async def tokens(self) -> list[int]:
        """All the token ids (of what was not read yet). RequestFailed when the request fails."""
        return [token async for piece in self for token in piece.ids]

    async def _pieces(self) -> AsyncIterator[Piece]:
        while self._result is None:
            update = await self._updates.get()
            if isinstance(update, Result):
                self._result = update
                if self._writer is not None and (rest := self._writer.finish()):
                    yield Piece((), rest)
            else:
                yield Piece(update, self._writer.push(update) if self._writer is not None else "")

    def _sink(self, update: Update) -> None:
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # its event loop has ended: nobody reads any more
            self._channel.cancel(self.rid)
