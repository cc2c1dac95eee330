"""The tokenizer of any Hugging Face model whose files are on this machine, for clients of engines that serve it.

Owns reading `tokenizer.json`, the chat template and the end tokens. Needs the packages `tokenizers` and, for chat
templates, `jinja2`; a model by its hub name needs `huggingface_hub`, which looks where it has put it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from nodes.own.engines.needs import needed_by

TOKENIZER_FILE = "tokenizer.json"
_PARTS = ("pre_tokenizer", "decoder")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MARKS = ("\ue000system\ue000", "\ue000user\ue000")  # stand for what people wrote while the template is filled in


def folder_of(model: str) -> Path | None:
    """Where the files of `model` are: itself, or what the hub's cache has of it; None where that is nowhere."""
    if (Path(model) / TOKENIZER_FILE).is_file():
        return Path(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and find_spec("huggingface_hub"):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, TOKENIZER_FILE)
        return Path(found).parent if isinstance(found, str) else None
    return None


class JsonTokenizer:
    """Of the files in `folder`; as `pdbus.text.tokenizer.Tokenizer`."""

    def __init__(self, folder: Path) -> None:
        with needed_by("tokenizing"):
            import tokenizers
        text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        self._folder = folder
        self._plain = tokenizers.Tokenizer.from_str(text)  # special tokens are the text they are
        self._plain.encode_special_tokens = True
        self._template = tokenizers.Tokenizer.from_str(text)
        self._byte_level = '"ByteLevel"' in json.dumps([json.loads(text).get(part) for part in _PARTS])
        self._settings = self._read("tokenizer_config.json")
        self._specials = frozenset(self._plain.get_added_tokens_decoder())
        self.vocab_size: int = self._plain.get_vocab_size()
        eos = self._read("generation_config.json").get("eos_token_id", self._read("config.json").get("eos_token_id"))
        self.eos_ids: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos or ())

    def encode(self, text: str) -> list[int]:
        """With the tokens that the model wants before a text, if it wants any."""
        ids: list[int] = self._plain.encode(_clean(text)).ids
        return ids

    def chat(self, text: str, system: str | None = None) -> list[int]:
        """By the model's own template; what people wrote can't close its own turn."""
        turns = [] if system is None else [{"role": "system", "content": _MARKS[0]}]
        filled = self._fill([*turns, {"role": "user", "content": _MARKS[1]}])
        written = dict(zip(_MARKS, (system or "", text), strict=True))
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(_MARKS)})", filled):
            tokenizer = self._plain if piece in written else self._template
            ids += tokenizer.encode(_clean(written.get(piece, piece)), add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        piece = None if token in self._specials else self._plain.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(byte_of()[character] for character in piece)
        if single := _BYTE.fullmatch(piece):
            return bytes([int(single[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _fill(self, messages: list[dict[str, str]]) -> str:
        apart = self._folder / "chat_template.jinja"
        template = apart.read_text(encoding="utf-8") if apart.is_file() else self._settings.get("chat_template")
        if not isinstance(template, str):
            raise ConfigError(
                f"the model in {self._folder} has no chat template; say the text is to go as it is: --raw"
            )
        with needed_by("a chat template"):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(why: str) -> None:
            raise TemplateError(why)

        tokens = {name: self._word(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
        except TemplateError as error:
            raise ConfigError(f"the chat template of the model in {self._folder}: {error}; perhaps --raw") from None

    def _word(self, name: str) -> str:
        found = self._settings.get(name) or ""
        return str(found.get("content", "")) if isinstance(found, dict) else str(found)

    def _read(self, file: str) -> dict[str, Any]:
        path = self._folder / file
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2): the way back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
