"""The output that a caller gets: pieces as they come, and the result of the request.

Owns these classes, and a client's tokenizers, which are loaded only when text is used.
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
    """A piece of output: token `ids`, the text that they complete (empty without a tokenizer), and their log
    probabilities where the option `logprobs` asks for them."""

    ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Result(Struct, frozen=True, gc=False):
    """The result of a request. `ids` are all output tokens, `logprobs` has an entry for each where they were asked for.
    Times are in seconds from the submit, measured at the client."""

    rid: str  # the request's id
    finish: FinishReason  # stop, length, cancelled or failed
    ids: tuple[int, ...]
    attempts: int  # how many: 1 when nothing went wrong
    bootstrap_room: int | None  # None for a unified request
    prefill: Location | None  # the rank that computed the prompt's KV cache; None: there was none
    decode: Location | None  # the rank that streamed the output, also a unified one
    found_by: FoundBy  # how decode found the prefill rank: from the controller, from the bus, or computed from the room
    ttft_s: float  # 0: there was no token
    total_s: float  # to the end of the stream
    code: Code = "ok"  # why it failed; ok otherwise
    message: str = ""  # the same in one sentence
    retry_after_s: float = 0.0  # after a failure: how long to wait before a new try; 0: no advice
    retryable: bool = False  # after a failure: whether a new try may succeed
    cached_tokens: int = 0  # prompt tokens from a prefix cache; 0 also where no rank reported them
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens from the second on, where asked for
    ran: bool = False  # a rank had the request, or may have had it: its controller did not answer
    written_tokens: int = 0  # prompt tokens written to a prefix cache; 0 also where no rank reported them

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for fewer than two tokens."""
        return (self.total_s - self.ttft_s) / (len(self.ids) - 1) if len(self.ids) > 1 else 0.0

    def raise_if_failed(self) -> None:
        """Raise RequestFailed when `finish` is `failed`."""
        if self.finish == "failed":
            raise RequestFailed(self.code, self.message, retryable=self.retryable, retry_after_s=self.retry_after_s)


class Deliver(Struct, frozen=True, gc=False):
    """An action: deliver new output tokens, in order. `Request.logprobs` already has theirs, where asked for."""

    rid: str
    ids: tuple[int, ...]


class Ended(Struct, frozen=True, gc=False):
    """An action, the last of every request: deliver its result."""

    rid: str
    result: Result


def failure(rid: str, code: Code, message: str) -> Result:
    """Return the result of a request that failed before it began; `message` is the reason in a sentence."""
    return Result(rid, "failed", (), 1, None, None, None, "", 0.0, 0.0, code, message)


class ModelTexts:
    """A client's tokenizers by model, each loaded once. Any thread may use it. `places` gives tokenizers by model
    (None: the models' own files)."""

    def __init__(self, model: str = "", places: Places | None = None) -> None:
        self.model = model  # for text without a model named; empty while it is unknown
        self._places = places
        self._lock = threading.Lock()
        self._loaded: dict[str, ModelText] = {}

    def of(self, model: str) -> ModelText:
        """Return the tokenizer and chat template of `model`; the first call loads them, which may take seconds, and
        others wait for it. Raises ConfigError when there is no tokenizer, or when packages are missing."""
        from pdbus.text.models import text_for

        with self._lock:
            found = self._loaded.get(model)
            if found is None:
                found = self._loaded[model] = text_for(model, self._places)
            return found

    def prompt(self, model: str, text: str, chat: bool, system: str | None) -> tuple[ModelText, list[int]]:
        """Return what `of` returns, and the ids of a prompt: with `chat`, a conversation of the `system` message (None:
        none) and the user's `text`; otherwise `text` as it is. Loads and raises as `of` does; ConfigError also without
        a chat template."""
        its = self.of(model)
        if not chat:
            return its, its.encode(text)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return its, its.chat(messages)
