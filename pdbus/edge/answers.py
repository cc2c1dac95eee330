"""The bytes of the edge's HTTP answers: OpenAI's chat and text completions and SGLang's `/generate`, whole or as
server-sent events (one for each piece of text).

The part that is the same in every event of an answer is made once; a token adds its text. Pure, but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bus.wire.messages import Location
from pdbus.client import Result
from pdbus.edge.logprobs import Likelihoods

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """One answer (OpenAI's choice) number `index` of a response: its output so far, and its end. `matched` is the stop
    string or token that ended it; None: neither. `result` is None until the end."""

    index: int
    prompt_tokens: int
    first: bool = True  # the first choice of its prompt, whose tokens count once
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str = ""  # stop or length
    matched: str | int | None = None
    result: Result | None = None
    likelihoods: Likelihoods | None = None  # where the request asks for log probabilities

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that a prefix cache had; 0 before the end."""
        return self.result.cached_tokens if self.result is not None else 0

    def route(self) -> dict[str, Any] | None:
        """Return the ranks that answered (`instance/number`, or None), how they found each other, and the number of
        attempts, for the field `pdbus`; None before the end."""
        result = self.result
        if result is None:
            return None
        return {
            "prefill": _name(result.prefill),
            "decode": _name(result.decode),
            "found_by": result.found_by,
            "attempts": result.attempts,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The part that all choices share. `prompt_tokens` are those of the request: each prompt counts once."""

    id: str
    model: str
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False  # in every event, for its choice so far
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return OpenAI's `usage` for these answers: their output tokens, and each prompt once."""
        out = sum(len(answer.ids) for answer in answers)
        return _usage(self.prompt_tokens, out) | {
            "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers if answer.first)},
        }


class Writer(Protocol):
    """Makes the bytes of one HTTP response: for a stream `begin`, `more` and `end` of each answer, then `close`;
    otherwise `whole` alone."""

    def begin(self, answer: Answer) -> bytes:
        """Return the event before the first text of `answer`; empty in forms without one."""

    def more(self, answer: Answer, text: str) -> bytes:
        """Return the event for `text`, which was added to `answer`."""

    def end(self, answer: Answer) -> bytes:
        """Return the event for the end of `answer`."""

    def close(self, answers: Sequence[Answer]) -> bytes:
        """Return the last events of the stream, when all answers have ended."""

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the response body with all answers, not as events."""


class _OpenAi:
    """The common part of OpenAI's two forms."""

    chunk: str  # the `object` of an event
    object: str  # the `object` of a whole response
    prefix: str  # of response ids

    def __init__(self, head: Head, choices: int) -> None:
        self._head = head
        self._usage = b',"usage":null' if head.include_usage else b""
        begin = encode(self._fields(self.chunk))[:-1]
        self._starts = [b'data: %b,"choices":[{"index":%d,' % (begin, index) for index in range(choices)]

    def _fields(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": self.prefix + head.id, "object": kind, "created": head.created, "model": head.model}

    def _event(self, answer: Answer, inside: bytes) -> bytes:
        usage = self._usage
        if usage and self._head.continuous_usage:
            usage = b',"usage":%b' % encode(_usage(answer.prompt_tokens, len(answer.ids)))
        return b"%b%b}]%b}\n\n" % (self._starts[answer.index], inside, usage)

    def close(self, answers: Sequence[Answer]) -> bytes:
        if not self._head.include_usage:
            return DONE
        last = self._fields(self.chunk) | {"choices": [], "usage": self._head.usage(answers)}
        return b"data: %b\n\n%b" % (encode(last), DONE)

    def whole(self, answers: Sequence[Answer]) -> bytes:
        choices = [self._choice(answer) | self._ending(answer) for answer in answers]
        return encode(self._fields(self.object) | {"choices": choices, "usage": self._head.usage(answers)})

    def _ending(self, answer: Answer) -> dict[str, Any]:
        stop_reason = answer.matched if answer.finish == "stop" else None
        return {
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish,
            "stop_reason": stop_reason,
            "pdbus": answer.route(),
        }

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log probabilities of the tokens since the last event."""
        return self._likely(answer.likelihoods) if answer.likelihoods else None

    def _choice(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _likely(self, likelihoods: Likelihoods) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(_OpenAi):
    """The `Writer` of `/v1/chat/completions`."""

    chunk = "chat.completion.chunk"
    object = "chat.completion"
    prefix = "chatcmpl-"

    def begin(self, answer: Answer) -> bytes:
        return self._event(answer, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')

    def more(self, answer: Answer, text: str) -> bytes:
        encoded = encode(text), encode(self._logprobs(answer))
        return self._event(answer, b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null' % encoded)

    def end(self, answer: Answer) -> bytes:
        return self._event(answer, b'"delta":{},' + encode(self._ending(answer))[1:-1])

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {"index": answer.index, "message": {"role": "assistant", "content": answer.text, "refusal": None}}

    def _likely(self, likelihoods: Likelihoods) -> dict[str, Any]:
        return likelihoods.chat()


class CompletionWriter(_OpenAi):
    """The `Writer` of `/v1/completions`."""

    chunk = "text_completion"
    object = "text_completion"
    prefix = "cmpl-"

    def begin(self, answer: Answer) -> bytes:
        return b""

    def more(self, answer: Answer, text: str) -> bytes:
        encoded = encode(text), encode(self._logprobs(answer))
        return self._event(answer, b'"text":%b,"logprobs":%b,"finish_reason":null' % encoded)

    def end(self, answer: Answer) -> bytes:
        return self._event(answer, b'"text":"",' + encode(self._ending(answer))[1:-1])

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {"index": answer.index, "text": answer.text}

    def _likely(self, likelihoods: Likelihoods) -> dict[str, Any]:
        return likelihoods.completion()


class GenerateWriter:
    """The `Writer` of SGLang's `/generate`: every event repeats the text and ids so far. With `batch` the answers are a
    list, and each event has an index."""

    def __init__(self, head: Head, *, batch: bool) -> None:
        self._head = head
        self._batch = batch
        self._began_at = time.monotonic()

    def begin(self, answer: Answer) -> bytes:
        return b""

    def more(self, answer: Answer, text: str) -> bytes:
        return b"data: %b\n\n" % encode(self._fields(answer, over=False))

    def end(self, answer: Answer) -> bytes:
        return b"data: %b\n\n" % encode(self._fields(answer))

    def close(self, answers: Sequence[Answer]) -> bytes:
        return DONE

    def whole(self, answers: Sequence[Answer]) -> bytes:
        every = [self._fields(answer) for answer in answers]
        return encode(every if self._batch else every[0])

    def _fields(self, answer: Answer, over: bool = True) -> dict[str, Any]:
        finish: dict[str, Any] | None = None
        if over and answer.finish == "length":
            finish = {"type": "length", "length": len(answer.ids)}
        elif over:
            finish = {"type": answer.finish, "matched": answer.matched}
        meta = {
            "id": self._head.id,
            "finish_reason": finish,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.ids),
            "cached_tokens": answer.cached_tokens,
            "e2e_latency": time.monotonic() - self._began_at,
            "pdbus": answer.route(),
        }
        fields: dict[str, Any] = {"text": answer.text, "output_ids": answer.ids, "meta_info": meta}
        return fields | {"index": answer.index} if self._batch else fields


def failed(body: bytes) -> bytes:
    """Return the last event of a stream that failed after it had begun; `body` is the error in JSON."""
    return b"data: %b\n\n%b" % (body, DONE)


def _usage(prompt: int, out: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}


def _name(at: Location | None) -> str | None:
    return f"{at.instance}/{at.dp_rank}" if at is not None else None
