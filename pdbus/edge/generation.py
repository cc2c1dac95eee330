"""The answers of one HTTP request in progress; each is a stream of the client library. Its tokens become text, and stop
strings end it. Sends nothing to the HTTP client itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.client import AsyncStream, Piece, Result
from pdbus.edge.answers import Answer
from pdbus.edge.errors import HttpError
from pdbus.edge.metrics import Counts
from pdbus.text.decoder import Decoder
from pdbus.text.stops import StopFinder

Item: TypeAlias = "tuple[Choice, str, bool]"


class Gone(Exception):
    """The HTTP client has gone, and its streams were cancelled."""


class Interrupted(HttpError):
    """The answer of `choice` lost its rank and cannot be resumed in the middle (a grammar, penalties). Started again
    from the beginning, it may succeed; otherwise it is the error 503."""

    def __init__(self, choice: Choice, why: str) -> None:
        super().__init__(503, f"the answer was interrupted, and cannot be resumed: {why}", code="interrupted")
        self.choice = choice


@dataclass(slots=True, eq=False)
class Choice:
    """One answer in progress, with its decoder and stop finder. `decoder` is None without a tokenizer: then there are
    ids alone."""

    answer: Answer
    stream: AsyncStream
    decoder: Decoder | None
    stops: StopFinder
    stop_ids: frozenset[int]  # the request's stop tokens, which end the answer
    unseen: frozenset[int] = frozenset()  # tokens that end it and are not part of its text
    min_tokens: int = 0  # stop strings are ignored in the first tokens
    last_at: float | None = None  # when its last token came

    @property
    def ran(self) -> bool:
        """True if a rank ran the request, or may have; used for a choice that was cancelled or is over, whose unread
        output is dropped."""
        while self.stream.result is None and self.stream.take() is not None:
            pass
        return bool(self.answer.ids) or self.stream.result is None or self.stream.result.ran

    def take(self, piece: Piece) -> str:
        """Add `piece` to the answer and return the text that may be shown now. Sets the answer's `finish` at a stop
        string."""
        ids = piece.ids
        self.answer.ids.extend(ids)
        if self.answer.likelihoods is not None:
            self.answer.likelihoods.add(ids, piece.logprobs)
        if self.decoder is None:
            return ""
        seen = ids[:-1] if ids[-1] in self.unseen else ids
        text = ""
        if self.min_tokens and (early := self.min_tokens - len(self.answer.ids) + len(ids)) > 0:
            text = self.stops.push_early(self.decoder.push(seen[:early]))
            seen = seen[early:]
        text += self.stops.push(self.decoder.push(seen))
        if self.stops.found is not None:
            self.answer.finish, self.answer.matched = "stop", self.stops.found
        self.answer.text += text
        return text

    def end(self, finish: str) -> str:
        """End the answer for the reason `finish` (or `stop`, if its last text has a stop string), and return the text
        that was held back."""
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
    """The answers of one request, on one event loop: `while await generation.more(): for choice, text, last in
    generation.taken(): ...` gives text as it comes, the answer that it belongs to, and whether it is the last of that
    answer. Counts tokens and times in `counts`; `began_at` is when the request came, by `clock`."""

    def __init__(self, counts: Counts, began_at: float, clock: Callable[[], float]) -> None:
        self.choices: list[Choice] = []
        self._counts = counts
        self._began_at = began_at
        self._clock = clock
        self._came = True  # something came since the last `taken`
        self._waiting: asyncio.Future[None] | None = None

    def add(self, choice: Choice) -> None:
        """Watch one more answer, which was submitted."""
        self.choices.append(choice)
        choice.stream.on_update(self._wake)

    def replace(self, old: Choice, new: Choice) -> None:
        """Watch `new` in the place of `old`, which has failed."""
        old.stream.on_update(None)
        self.choices[self.choices.index(old)] = new
        new.stream.on_update(self._wake)
        self._came = True  # another answer may have output too, as `taken` stopped at `old`

    def cancel(self) -> None:
        """Cancel all answers that are not over; `taken` then raises Gone."""
        for choice in self.choices:
            if choice.answer.result is None:
                choice.stream.cancel()

    def close(self) -> None:
        """Cancel all answers and stop watching their streams."""
        self.cancel()
        for choice in self.choices:
            choice.stream.on_update(None)

    @property
    def answers(self) -> list[Answer]:
        """The answers so far, in order."""
        return [choice.answer for choice in self.choices]

    async def more(self) -> bool:
        """Wait until output or an end has come, and return true; false when all answers are over."""
        if all(choice.answer.result is not None for choice in self.choices):
            return False
        if not self._came:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return True

    def taken(self) -> Iterator[Item]:
        """Yield all that has come, without waiting. Raises RequestFailed or Interrupted when an answer fails, after the
        output that came before; raises Gone after `cancel`."""
        self._came = False
        for choice in self.choices:
            answer, stream = choice.answer, choice.stream
            if answer.result is not None:
                continue
            while (piece := stream.take()) is not None:
                if answer.finish or not piece.ids:  # output that was on its way when a stop string was found
                    continue
                self._count(choice, len(piece.ids))
                text = choice.take(piece)
                if choice.stops.found is not None:
                    stream.cancel()
                if text or choice.decoder is None:
                    yield choice, text, False
            if stream.result is not None:
                yield choice, self._end(choice, stream.result), True

    def _end(self, choice: Choice, result: Result) -> str:
        """End one answer and return the text that was held back."""
        answer = choice.answer
        answer.result = result
        if not answer.finish:
            if result.code == "bad_request" and result.ids:  # the resumed one was refused, the first was valid
                raise Interrupted(choice, result.message)
            result.raise_if_failed()
            if result.finish == "cancelled":
                raise Gone
        text = "" if answer.finish else choice.end(result.finish)
        if answer.first:  # the prompt's tokens are counted once too
            self._counts.cached_tokens += answer.cached_tokens
        self._counts.e2e.observe(self._clock() - self._began_at)
        return text

    def _wake(self) -> None:
        self._came = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _count(self, choice: Choice, tokens: int) -> None:
        now = self._clock()
        if choice.last_at is None:
            self._counts.ttft.observe(now - self._began_at)
        else:
            self._counts.token_gap(now - choice.last_at, tokens)
        choice.last_at = now
        self._counts.generation_tokens += tokens
