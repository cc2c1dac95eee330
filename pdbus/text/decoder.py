"""Decoders from token ids that come a few at a time to text. A character is held back until all its bytes have come."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

BEFORE = 8  # the last tokens of the prompt that a decoder gets, as in vLLM


class Decoder(Protocol):
    """Decodes the tokens of one answer."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """Return the text that was held back, at the end of the tokens; U+FFFD for a cut character."""


class BytesDecoder:
    """Decodes tokens that each stand for some bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class FolderDecoder:
    """Decodes with a `tokenizers.Tokenizer`. The last tokens of the `prompt` precede the answer, because some
    tokenizers drop the space before the first token of a text."""

    def __init__(self, tokenizer: Any, prompt: Iterable[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._before = deque(prompt, maxlen=BEFORE)
        self._pending: list[int] = []  # tokens that do not make a whole character yet
        self._stream = self._begun()

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            self._pending.append(token)
            try:
                piece = self._stream.step(self._tokenizer, token)
            except Exception:  # it raises Exception itself, for bytes that never become a character
                piece, self._stream = self._rest(), None
            if piece is not None:
                text += piece
                self._before.extend(self._pending)
                self._pending.clear()
                if self._stream is None:
                    self._stream = self._begun()
        return text

    def finish(self) -> str:
        rest = self._rest() if self._pending else ""
        self._pending.clear()
        return rest

    def _rest(self) -> str:
        """Return the text that `_pending` adds to the tokens before."""
        before = list(self._before)
        known = self._text(before)
        whole = self._text(before + self._pending)
        return whole[len(known) :] if whole.startswith(known) else self._text(self._pending)

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text

    def _begun(self) -> Any:
        """Return a stream of the package that has already decoded the tokens before."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=self._skip)
        try:
            for token in self._before:
                stream.step(self._tokenizer, token)
        except Exception:
            return DecodeStream(skip_special_tokens=self._skip)
        return stream
