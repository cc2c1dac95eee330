"""Decoders from token ids that come a few at a time to text. A character is held back until all its bytes have come."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

BEFORE = 8  # the last tokens of the prompt that a decoder gets, as in vLLM


class Decoder(Protocol):
    """Decodes the tokens of one answer as they come."""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is complete now; it may be empty."""

    def finish(self) -> str:
        """Return the text that was held back, after the last token; U+FFFD for a character that is not complete."""


class BytesDecoder:
    """A `Decoder` for tokens that each stand for some bytes; `bytes_of` gives those of a token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class FolderDecoder:
    """A `Decoder` by a `tokenizers.Tokenizer`. It also reads the last tokens of the `prompt`, without returning their
    text, because some tokenizers drop the space before the first token of a text. Special tokens give no text unless
    `skip_special_tokens` is false."""

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
