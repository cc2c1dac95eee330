"""Reads the page of a replay as a browser does: its scripts, its policy, and what is packed in it."""

from __future__ import annotations

import json
import zlib
from array import array
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

from pdbus.explore.packing import CODES


class Page(HTMLParser):
    """The parts of a page: elements by tag, with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self._open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = tag, attributes, text + data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.elements if name == tag]

    @property
    def policy(self) -> str:
        (policy,) = [a["content"] for a, _ in self.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy
        return policy

    @property
    def data(self) -> Unpacked:
        (text,) = [text for attributes, text in self.of("script") if attributes.get("id") == "data"]
        return Unpacked(b64decode(text))


class Unpacked:
    """What was packed: `head`, and columns by their names there."""

    def __init__(self, packed: bytes) -> None:
        self._all = zlib.decompress(packed)
        self._first = 4 + int.from_bytes(self._all[:4], "little")
        self.head: dict[str, Any] = json.loads(self._all[4 : self._first])

    def column(self, name: list[Any]) -> list[float]:
        kind, at, count = name
        found = array(CODES[kind])
        found.frombytes(self._all[self._first + at : self._first + at + count * found.itemsize])
        assert len(found) == count
        return found.tolist()
