"""What a caller gets: pieces of output as they come, and how the request went; and text, where a tokenizer is at work.

Owns these shapes, and a client's tokenizers, which are loaded only when text is used.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from msgspec import Struct

from bus.errors import RequestFailed
from bus.wire.codes import Code
from bus.wire.messages import FinishReason, FoundBy, Location, TokenLogprobs

if TYPE_CHECKING:
    from pdbus.text.find import Places
    from pdbus.text.models import ModelText


class Piece(Struct, frozen=True, gc=False):
    """Some output: token `ids`, the text they complete (empty where no tokenizer is at work), and where the option
    `logprobs` asks for them the log probabilities of each."""

    ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Result(Struct, frozen=True, gc=False):
    """How a request ended. `ids` are all output tokens, with `logprobs` of each where they were asked for; times in
    seconds from the submit, at the client."""

    rid: str  # the request's id
    finish: FinishReason  # stop, length, cancelled or failed
    ids: tuple[int, ...]
    attempts: int  # how many: 1 when nothing went wrong
    bootstrap_room: int | None  # None of a unified request
    prefill: Location | None  # of the rank that computed the prompt's KV cache; None without
    decode: Location | None  # of the rank that streamed (unified included)
    found_by: FoundBy  # how decode learned of it: told by the controller, from the bus, or computed from the room
    ttft_s: float  # 0 without any token
    total_s: float  # to the end of the stream
    code: Code = "ok"  # why it failed; ok otherwise
    message: str = ""  # the same in one sentence
    retry_after_s: float = 0.0  # when it failed: how long to wait before a new try (0: as one likes)
    retryable: bool = False  # when it failed: whether a new try may go better
    cached_tokens: int = 0  # of the prompt, from a prefix cache; 0 where no rank says, or the end did not come
    logprobs: tuple[TokenLogprobs, ...] = ()
    ran: bool = False  # a rank had it, or may have had it: its controller never said what became of it

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 with fewer than two."""
        return (self.total_s - self.ttft_s) / (len(self.ids) - 1) if len(self.ids) > 1 else 0.0

    def raise_if_failed(self) -> None:
        """RequestFailed when `finish` is `failed`."""
        if self.finish == "failed":
            raise RequestFailed(self.code, self.message, retryable=self.retryable, retry_after_s=self.retry_after_s)


class Deliver(Struct, frozen=True, gc=False):
    """New output tokens, in order. Where they were asked for, `Request.logprobs` has those of each already."""

    rid: str
    ids: tuple[int, ...]


class Ended(Struct, frozen=True, gc=False):
    """The last action of every request."""

    rid: str
    result: Result


def failure(rid: str, code: Code, message: str) -> Result:
    """Of a request that never began."""
    return Result(rid, "failed", (), 1, None, None, None, "", 0.0, 0.0, code, message)


class ModelTexts:
    """A client's tokenizers by model, each loaded once. Any thread."""

    def __init__(self, model: str = "", places: Places | None = None) -> None:
        self.model = model  # of text for which the caller names none; empty while it is unknown
        self._places = places
        self._lock = threading.Lock()
        self._loaded: dict[str, ModelText] = {}

    def of(self, model: str) -> ModelText:
        """ConfigError when there is no tokenizer, or its packages are missing."""
        from pdbus.text.models import text_for

        with self._lock:
            found = self._loaded.get(model)
            if found is None:
                found = self._loaded[model] = text_for(model, self._places)
            return found

    def prompt(self, model: str, text: str, chat: bool, system: str | None) -> tuple[ModelText, list[int]]:
        """The model's text, and the ids of the prompt that asks for an answer to `text`, or continues it."""
        its = self.of(model)
        if not chat:
            return its, its.encode(text)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return its, its.chat(messages)
