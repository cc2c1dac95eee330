"""Packs columns of numbers and a head of JSON into one deflated block of bytes, which the page's script unpacks
(`page.js`). Knows nothing of what they mean.

The block inflates to: the length of the head in bytes (4), the head, and the columns, each from a place that 4 divides.
The head names a column by its kind, its place behind the head, and its length. All is little-endian.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["u8", "i16", "u32", "i32", "f32"]
Column: TypeAlias = tuple[Kind, int, int]
CODES: dict[Kind, str] = {"u8": "B", "i16": "h", "u32": "I", "i32": "i", "f32": "f"}
MOST = {"u8": 2**8 - 1, "i16": 2**15 - 1, "u32": 2**32 - 1, "i32": 2**31 - 1}
ALIGN = 4


class Pack:
    """Columns that come one after the other, and are packed together at last."""

    def __init__(self) -> None:
        self._columns = bytearray()

    def add(self, kind: Kind, values: Iterable[float]) -> Column:
        """Add a column, and return its name for the head. Whole numbers that are too large become the largest."""
        if kind == "f32":
            column = array("f", values)
        else:
            most = MOST[kind]
            column = array(CODES[kind], [min(int(value), most) for value in values])
        if sys.byteorder == "big":
            column.byteswap()
        name = kind, len(self._columns), len(column)
        self._columns += column.tobytes()
        self._columns += bytes(-len(self._columns) % ALIGN)
        return name

    def packed(self, head: Any) -> bytes:
        """Return all of it, deflated, with a head for JSON."""
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * (-len(text) % ALIGN)
        return zlib.compress(len(text).to_bytes(4, "little") + text + self._columns, 9)
