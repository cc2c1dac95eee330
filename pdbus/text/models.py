"""Text and token ids of each model: the model's own tokenizer and chat template where it has files, else built-in ones.

Text from a user is never read as special tokens, whatever the template does with it: it cannot close its own turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bus.errors import ConfigError
from nodes.own.engines import smollm2
from nodes.own.engines.needs import needed_by
from pdbus.edge.errors import invalid
from pdbus.text.tokenizer import StreamDecoder, tokenizer_for

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: around what a user wrote that looks like a special token
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_MARKS = str.maketrans("", "", OPEN + CLOSE)
_NO_MARKS = str.maketrans({OPEN: "\ufffd", CLOSE: "\ufffd"})


class Decoder(Protocol):
    """Of one answer's tokens, as they come; a character that is not whole yet is held back."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class ModelText(Protocol):
    """One model's texts. Its methods take a time that grows with the text; any thread may call them."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def chat(self, turns: Sequence[tuple[str, str]], *, answer: bool = True) -> list[int]:
        """The ids of a conversation of (role, text); with `answer`, up to where the assistant speaks."""

    def decode(self, ids: Iterable[int]) -> str: ...
    def decoder(self) -> Decoder: ...

    def token(self, id: int) -> str:
        """One token by itself, special ones too; bytes that are no whole character are U+FFFD."""


class BuiltInText:
    """Bytes, for models without a vocabulary of their own (`tiny`, `sim`); a conversation is its lines."""

    def __init__(self, model: str) -> None:
        self._tokenizer = tokenizer_for(model)
        self.eos_ids = self._tokenizer.eos_ids
        self.encode = self._tokenizer.encode

    def chat(self, turns: Sequence[tuple[str, str]], *, answer: bool = True) -> list[int]:
        return self.encode("\n".join(text for _, text in turns))

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(ids)

    def decoder(self) -> Decoder:
        return StreamDecoder(self._tokenizer)

    def token(self, id: int) -> str:
        return self._tokenizer.decode([id])


class FolderText:
    """From a folder as models are published: `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and
    `chat_template.jinja`, of which the first alone must be there. ConfigError when it is not, or makes no sense."""

    def __init__(self, folder: Path) -> None:
        with needed_by("text for a model with a vocabulary of its own"):
            import tokenizers
        try:
            said = (folder / "tokenizer.json").read_text(encoding="utf-8")
            self._whole = tokenizers.Tokenizer.from_str(said)
            self._plain = tokenizers.Tokenizer.from_str(said)
        except Exception as error:  # `tokenizers` raises Exception itself
            raise ConfigError(f"{folder} holds no tokenizer: {error}") from None
        self._plain.encode_special_tokens = True  # that is: as the text they are
        config = _json(folder / "tokenizer_config.json")
        self._names = {
            name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        self.eos_ids = self._end_tokens(_json(folder / "generation_config.json"))
        special = [token.content for token in self._whole.get_added_tokens_decoder().values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._template = _template(folder, config)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text).ids
        return ids

    def chat(self, turns: Sequence[tuple[str, str]], *, answer: bool = True) -> list[int]:
        if self._template is None:
            raise invalid("messages", "the model has no chat template: use /v1/completions")
        from jinja2 import TemplateError

        messages = [{"role": role, "content": self._marked(text)} for role, text in turns]
        try:
            text = self._template.render(messages=messages, add_generation_prompt=answer, tools=None, **self._names)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise invalid("messages", f"messages: the model's chat template refuses them: {error}") from None
        ids: list[int] = []
        for number, part in enumerate(_MARKED.split(text)):
            if number % 2:
                ids += self._plain.encode(part, add_special_tokens=False).ids
            elif part := part.translate(_MARKS):  # a template that cuts texts may have left one of a pair
                ids += self._whole.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        decoder = self.decoder()
        return decoder.push(list(ids)) + decoder.finish()

    def decoder(self) -> Decoder:
        return _FolderDecoder(self._whole)

    def token(self, id: int) -> str:
        text: str = self._whole.decode([id], skip_special_tokens=False)
        return text

    def _marked(self, text: str) -> str:
        return self._special.sub(lambda found: f"{OPEN}{found[0]}{CLOSE}", text.translate(_NO_MARKS))

    def _end_tokens(self, generation: dict[str, Any]) -> tuple[int, ...]:
        said = generation.get("eos_token_id")
        named = self._names["eos_token"]
        found = self._whole.token_to_id(named) if named else None
        ids = said if isinstance(said, list) else [said if said is not None else found]
        return tuple(dict.fromkeys(id for id in ids if isinstance(id, int)))


class _FolderDecoder:
    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._new: Any = lambda: DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # no whole character yet

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            self._pending.append(token)
            try:
                piece = self._stream.step(self._tokenizer, token)
            except Exception:  # it raises Exception itself, for bytes that never become a character
                piece, self._stream = self._tokenizer.decode(self._pending), self._new()
            if piece is not None:
                text += piece
                self._pending.clear()
        return text

    def finish(self) -> str:
        rest: str = self._tokenizer.decode(self._pending) if self._pending else ""
        self._pending.clear()
        return rest


def text_for(model: str, folders: dict[str, Path]) -> ModelText:
    """`folders` by model, the one under the empty name being for all others. ConfigError when a package is missing or a
    folder holds no tokenizer. May take seconds."""
    folder = folders.get(model) or folders.get("")
    if folder is None and model == smollm2.NAME:
        folder = smollm2.converted()
    return FolderText(folder) if folder is not None else BuiltInText(model)


def _template(folder: Path, config: dict[str, Any]) -> Any:
    """The model's own, compiled in Jinja's sandbox with what templates expect beside Jinja's own; None without."""
    path = folder / "chat_template.jinja"
    said = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(said, list):  # several, by name
        said = next((each["template"] for each in said if each.get("name") == "default"), None)
    if not said:
        return None
    with needed_by("chat templates"):
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(said)
    except TemplateError as error:
        raise ConfigError(f"{folder}: its chat template makes no sense: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return said if isinstance(said, dict) else {}


def _content(token: Any) -> str:
    """A special token is written as its text, or as an object that has it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
