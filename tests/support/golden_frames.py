"""Golden frames: messages as values beside the bytes that they took on the wire when they were recorded.

`tests/golden/TAG.txt` holds the frames of one message kind, each a title, the message as Python writes it (with every
field that it had) and its bytes in hexadecimal. To record one, write its title and its message at the end of the file
and run `make golden`, which adds the bytes where there are none and leaves all else as it is.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.wire import codec, messages
from bus.wire.messages import Message

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS: dict[str, type[Message]] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message and not name.startswith("_")
}
TAGS: dict[str, type[Message]] = {str(tag): kind for kind in KINDS.values() if (tag := kind.__struct_config__.tag)}


@dataclass(frozen=True)
class Golden:
    """One recorded frame; `frame` is empty when its bytes are still to be added."""

    tag: str
    title: str
    text: str
    frame: bytes

    def calls(self) -> list[ast.Call]:
        """The message and all messages inside it, as they are written."""
        return [node for node in ast.walk(ast.parse(self.text, mode="eval")) if isinstance(node, ast.Call)]

    def kinds(self) -> set[str]:
        return {call.func.id for call in self.calls() if isinstance(call.func, ast.Name)}

    def is_current(self) -> bool:
        """Whether it was recorded with all the fields that its messages have now."""
        return all(
            [keyword.arg for keyword in call.keywords] == list(KINDS[call.func.id].__struct_fields__)
            for call in self.calls()
            if isinstance(call.func, ast.Name)
        )

    def written(self) -> str:
        wrapped = textwrap.fill(self.text, 100, break_long_words=False, break_on_hyphens=False)
        return f"# {self.title}\n{wrapped}\n{textwrap.fill(self.frame.hex(), 100)}\n"


def build(text: str) -> Message:
    """The message that `text`, a call of its class with literals, describes."""
    message = _value(ast.parse(text, mode="eval").body)
    assert isinstance(message, Message)
    return message


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        named = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        return KINDS[node.func.id](*map(_value, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)


def read(path: Path) -> Iterator[Golden]:
    """The frames of one file, in its order. ValueError when it is not of the form above."""
    for part in path.read_text(encoding="utf-8").split("\n\n"):
        found = re.fullmatch(r"# (?P<title>.+)\n(?P<text>[A-Z][^\n]*(?:\n[^\n]+)*?)(?P<hex>(?:\n[0-9a-f]+)*)\n?", part)
        if found is None:
            raise ValueError(f"{path}: not a title, a message and its bytes: {part[:60]!r}")
        text, digits = (found[name].replace("\n", joint) for name, joint in (("text", " "), ("hex", "")))
        yield Golden(path.stem, found["title"], text, bytes.fromhex(digits))


def fill(path: Path) -> int:
    """Add the bytes of the messages of a file that have none; how many. The others stay as they are."""
    goldens = list(read(path))
    added = 0
    parts = []
    for golden, part in zip(goldens, path.read_text(encoding="utf-8").split("\n\n"), strict=True):
        if golden.frame:
            parts.append(part.rstrip("\n") + "\n")
            continue
        message = build(golden.text)  # `repr` names every field, so that it shows which ones there were
        parts.append(Golden(golden.tag, golden.title, repr(message), codec.encode(message)).written())
        added += 1
    if added:
        path.write_text("\n".join(parts), encoding="utf-8")
    return added


def main() -> None:
    files = sorted(GOLDEN.glob("*.txt"))
    added = sum(map(fill, files))
    print(f"{added} frames added, {sum(len(list(read(path))) for path in files) - added} left as they were")
    if missing := sorted(f"tests/golden/{tag}.txt" for tag in set(TAGS) - {path.stem for path in files}):
        sys.exit(f"no frame yet: write a title and a message to {', '.join(missing)}")


if __name__ == "__main__":
    main()
