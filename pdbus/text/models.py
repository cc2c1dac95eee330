"""The text of a model, whichever it is: by the files of its own tokenizer, or byte by byte."""

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

BYTE_MODELS = ("sim", "tiny")  # of our own engines; they have no vocabulary of words
OWN_NEW_TOKENS = 1024  # of a chat's answer: our own engines reserve memory for all that may come
BYTE_SPECIALS = 3  # ids of BytesText that stand for no byte: unused, begin, end
BYTE_EOS = 2
NO_TEXT = "\u00b7".encode()  # what an id beyond the bytes looks like


class ModelText(Protocol):
    """One model's texts. Its methods take a time that grows with the text; any thread may call them."""

    eos_ids: tuple[int, ...]  # the tokens that end an answer
    sampling: Mapping[str, float]  # options of the client that the model wants where a request says nothing
    max_new_tokens: int  # of an answer to a chat that says nothing; 0: what fits
    longest_token: int  # in characters, so that a text has so many tokens at least; 0: nobody knows

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, special tokens in it read as such; with those that the model wants around a text."""

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        """The ids of a conversation, each message with `role` and `content`; with `answer`, up to where the assistant
        speaks. ConfigError when the model's template is missing, has an error, or refuses them."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Decoder:
        """For the answer to `prompt`, as it comes."""

    def token(self, id: int) -> str:
        """One token by itself, special ones too; bytes that are no whole character are U+FFFD."""

    def token_bytes(self, id: int) -> bytes:
        """The same in UTF-8, or the part of a character that it is."""


class BytesText:
    """Byte b is id 3 + b; a conversation is its lines."""

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
    """By what `places` says of `model`, else by its own files. ConfigError where there are none, when a package is
    missing, or when the files make no sense. May take seconds."""
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
