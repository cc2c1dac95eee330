"""The answers of one HTTP request while they are made: each a stream of the client library. Sends nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.client import AsyncStream, Piece
from pdbus.edge.answers import Answer
from pdbus.edge.metrics import Counts
from pdbus.edge.stops import StopFinder
from pdbus.edge.texts import Decoder

Item: TypeAlias = "tuple[Choice, str, bool]"


class Gone(Exception):
    """Nobody waits for the answers any more: the streams were cancelled from outside."""


@dataclass(slots=True, eq=False)
class Choice:
    """One answer, and what its tokens go through. `decoder` is None where ids are all that can be had."""

    answer: Answer
    stream: AsyncStream
    decoder: Decoder | None
    stops: StopFinder
    stop_ids: frozenset[int]  # of the request: they end the answer, and are no part of its text
    last_at: float | None = None  # when its last token came

    def take(self, piece: Piece) -> str:
        """The text that `piece` adds. Sets the answer's `finish` at a stop string."""
        ids = piece.ids
        self.answer.ids.extend(ids)
        if self.answer.likelihoods is not None:
            self.answer.likelihoods.add(ids, piece.logprobs)
        if self.decoder is None:
            return ""
        text = self.stops.push(self.decoder.push(ids[:-1] if ids[-1] in self.stop_ids else ids))
        if self.stops.found is not None:
            self.answer.finish, self.answer.matched = "stop", self.stops.found
        self.answer.text += text
        return text

    def end(self, finish: str) -> str:
        """The last text, which was held back; the tokens are over, for the reason `finish`."""
        text = ""
        if self.decoder is not None:
            text = self.stops.push(self.decoder.finish())
            text += self.stops.finish()
            self.answer.text += text
        found = self.stops.found  # in what the decoder held back
        last = self.answer.ids[-1] if self.answer.ids else None
        self.answer.finish = "stop" if found else finish
        self.answer.matched = found or (last if last in self.stop_ids else None)
        return text


class Generation:
    """`async for choice, text, last in Generation(...)`: text as it comes, whichever answer it belongs to, and whether
    it is that answer's last. RequestFailed when one fails, which ends the others; Gone after `cancel`."""

    def __init__(self, choices: Sequence[Choice], counts: Counts, began_at: float, clock: Callable[[], float]) -> None:
        self.choices = choices
        self._counts = counts
        self._began_at = began_at
        self._clock = clock

    def cancel(self) -> None:
        for choice in self.choices:
            if choice.answer.result is None:
                choice.stream.cancel()

    @property
    def answers(self) -> list[Answer]:
        return [choice.answer for choice in self.choices]

    def __aiter__(self) -> AsyncIterator[Item]:
        return self._one(self.choices[0]) if len(self.choices) == 1 else self._all()

    async def _one(self, choice: Choice) -> AsyncIterator[Item]:
        answer, stream = choice.answer, choice.stream
        while (piece := await stream.next()) is not None:
            if answer.finish or not piece.ids:  # what was under way when a stop string was found
                continue
            self._count(choice, len(piece.ids))
            text = choice.take(piece)
            if choice.stops.found is not None:
                stream.cancel()
            if text:
                yield choice, text, False
        answer.result = stream.result
        assert answer.result is not None
        if not answer.finish:
            answer.result.raise_if_failed()
        if answer.result.finish == "cancelled" and not answer.finish:
            raise Gone
        text = "" if answer.finish else choice.end(answer.result.finish)
        self._counts.cached_tokens += answer.cached_tokens
        self._counts.e2e.observe(self._clock() - self._began_at)
        yield choice, text, True

    async def _all(self) -> AsyncIterator[Item]:
        came: asyncio.Queue[Item | Exception | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for item in self._one(choice):
                    came.put_nowait(item)
                came.put_nowait(None)
            except Exception as error:
                came.put_nowait(error)

        tasks = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            for _ in tasks:
                while (item := await came.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            self.cancel()
            await asyncio.gather(*tasks)

    def _count(self, choice: Choice, tokens: int) -> None:
        now = self._clock()
        if choice.last_at is None:
            self._counts.ttft.observe(now - self._began_at)
        else:
            self._counts.token_gap(now - choice.last_at, tokens)
        choice.last_at = now
        self._counts.generation_tokens += tokens
