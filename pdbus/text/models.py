"""The text of any model (token ids of texts and chats, and texts of ids): by the files of its own tokenizer, or byte by
byte. `text_for` chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bus.errors import ConfigError
from nodes.own.engines import smollm2
from nodes.own.engines.cache import Progress, no_progress
from pdbus.text.decoder import BytesDecoder, Decoder
from pdbus.text.find import BYTES, Places, folder_of
from pdbus.text.folder import FolderText

BYTE_MODELS = ("sim", "tiny")  # models of our own engines without a vocabulary of words
OWN_NEW_TOKENS = 1024  # for a chat: our own engines reserve memory for the whole answer
BYTE_SPECIALS = 3  # ids of BytesText that stand for no byte: unused, begin, end
BYTE_EOS = 2
NO_TEXT = "\u00b7".encode()  # shown for an id that stands for no byte


class ModelText(Protocol):
    """The text of one model. The time of each method grows with the text; any thread may call them."""

    eos_ids: tuple[int, ...]  # the tokens that end an answer
    sampling: Mapping[str, float]  # client options for requests that do not set them
    max_new_tokens: int  # for chats without a maximum; 0: what fits
    longest_token: int  # in characters: a lower bound for a text's tokens; 0: unknown

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, in which special tokens are read as such. `add_special_tokens`: also those that the
        model puts around a text."""

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a conversation; each message has `role` and `content`. With `answer`, they end where the
        assistant's answer begins. `add_special_tokens`: also those that the model puts around a text; templates
        normally have them. Raises ConfigError when the template is missing, has an error, or refuses the messages."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, by default without special tokens."""

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Decoder:
        """Return a decoder for the answer to `prompt`, whose tokens come a few at a time."""

    def token(self, id: int) -> str:
        """Return the text of one token by itself, also a special one; bytes of a part of a character are U+FFFD."""

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token in UTF-8, also a part of a character."""


class BytesText:
    """A `ModelText` in which byte b is id 3 + b, and a conversation is the contents of its messages, a line each. Ids 0
    to 2 give no text."""

    eos_ids: tuple[int, ...] = (BYTE_EOS,)
    max_new_tokens = OWN_NEW_TOKENS
    longest_token = 1

    def __init__(self) -> None:
        self.sampling: Mapping[str, float] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BYTE_SPECIALS + byte for byte in text.encode("utf-8", "replace")]

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Decoder:
        return BytesDecoder(self.token_bytes)

    def token(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        if id < BYTE_SPECIALS:
            return b""
        return bytes([id - BYTE_SPECIALS]) if id < BYTE_SPECIALS + 256 else NO_TEXT


def text_for(model: str, places: Places | None = None, progress: Progress = no_progress) -> ModelText:
    """Return the text of `model`, by the place that `places` gives for it or by its own files on this machine. It may
    take seconds, most for our own `smollm2`, whose files are converted at the first call (`progress` shows it). Raises
    ConfigError when there are no files, when a package is missing, or when files are invalid."""
    place = (places or {}).get(model) or (places or {}).get("")
    if place == BYTES or (place is None and model in BYTE_MODELS):
        return BytesText()
    if isinstance(place, Path):
        return FolderText(place)
    if model == smollm2.NAME:
        return FolderText(smollm2.converted(progress), max_new_tokens=OWN_NEW_TOKENS)
    if (folder := folder_of(model)) is not None:
        return FolderText(folder)
    raise ConfigError(
        f"there is no tokenizer for the model {model!r} here: name a folder with its tokenizer.json, as with "
        "--tokenizer, or send token ids"
    )
