"""The text of a model by its files, in the layout of Hugging Face: token ids of texts and chats, and texts of ids.
Needs the package `tokenizers`.

In a chat the contents of messages, whatever their role, are never read as special tokens, so a message cannot close its
own turn. A text by itself (`encode`) is read as engines read it, with its special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from bus.errors import ConfigError
from bus.wire.messages import Params
from nodes.own.engines.needs import needed_by
from pdbus.text.decoder import Decoder, FolderDecoder
from pdbus.text.find import TOKENIZER_FILE
from pdbus.text.templates import ChatTemplate

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: put around user text that looks like a special token
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_MARKS = str.maketrans("", "", OPEN + CLOSE)
_NO_MARKS = str.maketrans({OPEN: "\ufffd", CLOSE: "\ufffd"})
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPECIALS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
LONG = 4096  # characters; longer texts are encoded with the interpreter lock released


class FolderText:
    """A `ModelText` (`pdbus.text.models`) from the files in `folder`: `tokenizer.json` and, if they exist,
    `tokenizer_config.json`, `generation_config.json`, `config.json` and `chat_template.jinja`. Files are read at
    construction. `max_new_tokens` is the model's usual limit of an answer in tokens; 0: the one that
    `generation_config.json` states, if any. Raises ConfigError for invalid files or if a package
    is missing."""

    def __init__(self, folder: Path, *, max_new_tokens: int = 0) -> None:
        with needed_by("text for a model with a vocabulary of its own"):
            import tokenizers
        try:
            json_text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            self._whole = tokenizers.Tokenizer.from_str(json_text)
            self._plain = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # `tokenizers` raises Exception itself
            raise ConfigError(f"{folder} holds no tokenizer: {error}") from None
        self._plain.encode_special_tokens = True  # encode special tokens as plain text
        config = _json(folder / "tokenizer_config.json")
        generation = _json(folder / "generation_config.json")
        names = {name: content for name in _SPECIALS if (content := _content(config.get(name)))}
        self.eos_ids = self._end_tokens(folder, generation, names.get("eos_token"))
        self.sampling: Mapping[str, float] = _sampling(generation)
        most = generation.get("max_new_tokens")
        self.max_new_tokens: int = max_new_tokens or (most if isinstance(most, int) and most > 0 else 0)
        added = self._whole.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile(_longest_of(special) or r"(?!)")
        self.longest_token = _longest_token(json.loads(json_text)["model"], added.values())
        self._added = {id: token.content for id, token in added.items()}
        source = _template(folder, config)
        self._template = ChatTemplate(source, names) if source else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, in which special tokens are read as such. `add_special_tokens`: also those that the
        tokenizer puts around a text."""
        return _ids(self._whole, text, add_special_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, answer: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a conversation by the model's template; each message has `role` and `content`. With
        `answer`, they end where the assistant's answer begins. `add_special_tokens`: also those that the tokenizer puts
        around a text. Raises ConfigError without a template, or if it refuses the messages."""
        if self._template is None:
            raise ConfigError(
                "the model has no chat template: send a text as it is (/v1/completions, `chat=False`, `--raw`)"
            )
        marked = [{name: self._marked(content) for name, content in message.items()} for message in messages]
        ids: list[int] = []
        for number, part in enumerate(_MARKED.split(self._template.fill(marked, answer=answer))):
            if number % 2:
                ids += _ids(self._plain, part, False)
            elif part := part.translate(_MARKS):  # a template that cuts texts may leave one mark of a pair
                ids += _ids(self._whole, part, False)
        if add_special_tokens:
            before, behind = self._around()
            return before + ids + behind
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, by default without special tokens; unknown ids give no text."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(list(ids)) + decoder.finish()

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Decoder:
        """Return a decoder for an answer whose tokens come a few at a time. The ids of `prompt` before it decide how
        its first token reads (with a space before it or not); they give no text themselves."""
        return FolderDecoder(self._whole, prompt, skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str:
        """Return the text of one token by itself, also a special one. Part of a character is U+FFFD, an unknown id
        gives an empty text."""
        text: str = self._whole.decode([id], skip_special_tokens=False)
        return text

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be a part of a character; empty for an unknown id."""
        piece = self._added.get(id)
        if piece is not None:
            return piece.encode()
        piece = self._whole.id_to_token(id) or ""
        if single := _BYTE.fullmatch(piece):
            return bytes([int(single[1], 16)])
        letters = _byte_of()
        if self._is_byte_level() and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return piece.replace("\u2581", " ").encode()

    def _is_byte_level(self) -> bool:
        decoder = self._whole.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def _marked(self, text: str) -> str:
        return self._special.sub(lambda found: f"{OPEN}{found[0]}{CLOSE}", text.translate(_NO_MARKS))

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _end_tokens(self, folder: Path, generation: dict[str, Any], named: str | None) -> tuple[int, ...]:
        """Return the end tokens of the configuration and of the tokenizer; fine-tuned models name theirs in either
        one."""
        listed = generation.get("eos_token_id")
        if listed is None:
            listed = _json(folder / "config.json").get("eos_token_id")
        ids = listed if isinstance(listed, list) else [listed]
        own = self._whole.token_to_id(named) if named else None
        return tuple(dict.fromkeys(id for id in (*ids, own) if isinstance(id, int)))


def _longest_token(model: Mapping[str, Any], added: Iterable[Any]) -> int:
    """Return the length of the longest token in characters; 0 if a token may stand for text of any length."""
    if model.get("type") != "BPE" or (model.get("unk_token") and not model.get("byte_fallback")):
        return 0
    return max([len(token) for token in model["vocab"]] + [len(token.content) for token in added], default=0)


def _longest_of(words: Iterable[str]) -> str:
    """Return a regular expression for the longest of `words` at each place; empty: there are none. Beginnings that
    words share are tried once: `re` keeps the interpreter lock, and a text may be full of them."""
    by_first: dict[str, list[str]] = {}
    for word in set(words):
        by_first.setdefault(word[:1], []).append(word)
    ends_here = by_first.pop("", None)
    ways = []
    for some in by_first.values():
        shared = commonprefix(some)  # noqa: RUF071 (they are no paths)
        ways.append(re.escape(shared) + _longest_of(word[len(shared) :] for word in some))
    return f"(?:{'|'.join(ways)}){'?' if ends_here else ''}" if ways else ""


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be encoded
    if len(text) <= LONG:
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoded,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoded.ids
    return ids


def _template(folder: Path, config: dict[str, Any]) -> str:
    """Return the source of the model's chat template; empty: there is none."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    return source if isinstance(source, str) else ""


def _sampling(generation: dict[str, Any]) -> dict[str, float]:
    """Return `ModelText.sampling`, without values that the protocol refuses."""
    hints = get_type_hints(Params, include_extras=True)
    found: dict[str, float] = {}
    for name in _SAMPLING:
        if generation.get(name) is not None:
            try:
                found[name] = msgspec.convert(generation[name], hints[name])
            except msgspec.ValidationError:
                continue
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with the string."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte of each character: byte-level BPE (GPT-2) writes each byte as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
