"""Log probabilities of an answer's tokens, in OpenAI's two forms. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bus.wire.messages import TokenLogprobs


class Likelihoods:
    """The log probabilities of one answer.

    `name` returns the text of one token, `bytes_of` its UTF-8 bytes. Without them tokens are named by their ids, as
    vLLM does. `chat` and `completion` return what has come since the last call of either, in the form of that endpoint.
    """

    def __init__(
        self, name: Callable[[int], str] = "token_id:{}".format, bytes_of: Callable[[int], bytes] | None = None
    ) -> None:
        self._name = name
        self._bytes_of = bytes_of
        self._pending: list[tuple[int, TokenLogprobs]] = []
        self._offset = 0  # of the next token, in characters

    def __bool__(self) -> bool:
        """Return true if there is something to return."""
        return bool(self._pending)

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add tokens and their log probabilities, one for each."""
        self._pending += zip(ids, logprobs, strict=True)

    def chat(self) -> dict[str, Any]:
        """Return what was added since the last call, in the form of chat completions."""
        content = [
            {**self._one(token, it.logprob), "top_logprobs": [self._one(*each) for each in it.top]}
            for token, it in self._take()
        ]
        return {"content": content, "refusal": None}

    def completion(self) -> dict[str, Any]:
        """Return what was added since the last call, in the form of text completions: `text_offset` counts characters
        of the answer, from 0. Where the most likely tokens were asked for, the chosen one is listed with them."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, it in self._take():
            text = self._name(token)
            top = {self._name(other): logprob for other, logprob in it.top}
            values = (text, it.logprob, {**top, text: it.logprob} if top else None, self._offset)
            for each, value in zip(columns.values(), values, strict=True):
                each.append(value)
            self._offset += len(text)
        return columns

    def _take(self) -> list[tuple[int, TokenLogprobs]]:
        taken, self._pending = self._pending, []
        return taken

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._name(token)
        part = "\ufffd" in text and self._bytes_of is not None  # a part of a character
        data = self._bytes_of(token) if part else text.encode()  # type: ignore[misc]
        return {"token": text, "logprob": logprob, "bytes": list(data)}
