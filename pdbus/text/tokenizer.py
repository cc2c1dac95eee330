"""Text to token ids and back, chosen by model name. Needs torch for none of them; `tokenizers` for SmolLM2 alone.

Owns the chat template and the incremental decoder. Text from a user is never read as special tokens, so that a prompt
cannot close its own turn.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from bus.errors import ConfigError
from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, no_progress
from nodes.own.engines.needs import needed_by
from pdbus.text.tokenizer_json import JsonTokenizer, byte_of, folder_of

BYTE_SPECIALS = 3  # ids of ByteTokenizer that stand for no byte: unused, begin, end
BYTE_EOS = 2
NO_TEXT = "\u00b7".encode()  # what an id beyond the bytes looks like


class Tokenizer(Protocol):
    vocab_size: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, special tokens in it read as plain text."""

    def chat(self, text: str, system: str | None = None) -> list[int]:
        """The prompt that asks for the assistant's answer to `text`."""

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token, maybe part of a character; empty for special and unknown ids."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer:
    """Byte b is id 3 + b; for models that have no vocabulary of words: `tiny` and the sim engine's."""

    vocab_size = BYTE_SPECIALS + 256
    eos_ids: tuple[int, ...] = (BYTE_EOS,)

    def encode(self, text: str) -> list[int]:
        return [BYTE_SPECIALS + byte for byte in text.encode("utf-8", "replace")]

    def chat(self, text: str, system: str | None = None) -> list[int]:
        return self.encode(f"{system}\n{text}" if system else text)

    def token_bytes(self, token: int) -> bytes:
        if token < BYTE_SPECIALS:
            return b""
        return bytes([token - BYTE_SPECIALS]) if token < self.vocab_size else NO_TEXT

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class SmolTokenizer:
    """SmolLM2's byte-level BPE, from the cached `tokenizer.json`."""

    def __init__(self, progress: Progress = no_progress) -> None:
        directory = smollm2.converted(progress)
        with needed_by("tokenizing for SmolLM2"):
            import tokenizers
        self._bpe = tokenizers.Tokenizer.from_file(str(directory / smollm2.TOKENIZER_FILE))
        self._bpe.encode_special_tokens = True  # that is: encode them as the text they are
        self.vocab_size: int = self._bpe.get_vocab_size()
        self.eos_ids = tuple(self._special(token) for token in smollm2.END_TOKENS)
        self._specials = frozenset(self._bpe.get_added_tokens_decoder())
        self._start = self._special("<|im_start|>")
        self._end = self._special("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text.encode("utf-8", "replace").decode("utf-8")).ids
        return ids

    def chat(self, text: str, system: str | None = None) -> list[int]:
        """The template in the model's own metadata (`tokenizer.chat_template`), for one question."""
        turns = [("system", smollm2.DEFAULT_SYSTEM if system is None else system), ("user", text)]
        ids: list[int] = []
        for role, content in turns:
            ids += [self._start, *self.encode(f"{role}\n{content}"), self._end, *self.encode("\n")]
        return [*ids, self._start, *self.encode("assistant\n")]

    def token_bytes(self, token: int) -> bytes:
        if token in self._specials:
            return b""
        piece = self._bpe.id_to_token(token)
        return b"" if piece is None else bytes(byte_of()[character] for character in piece)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _special(self, token: str) -> int:
        found = self._bpe.token_to_id(token)
        assert found is not None, token
        return int(found)


class StreamDecoder:
    """Decodes a stream of tokens as they come; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        """What was held back, when no more comes: U+FFFD for a cut character."""
        return self._utf8.decode(b"", final=True)


def tokenizer_for(model: str, progress: Progress = no_progress) -> Tokenizer:
    """SmolLM2's own; that of a model whose files are here; or bytes for any other. ConfigError when packages are
    missing, or when the name is a path and there is nothing."""
    if model == smollm2.NAME:
        return SmolTokenizer(progress)
    if (folder := folder_of(model)) is not None:
        return JsonTokenizer(folder)
    if model.startswith("/"):
        raise ConfigError(f"there is no tokenizer.json in {model}: text needs the model's files here, token ids do not")
    return ByteTokenizer()
