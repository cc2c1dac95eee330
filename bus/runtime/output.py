"""Streams for a command that outlives whoever reads what it says. Owns what becomes of output that cannot be written:
nothing, and the command goes on."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class Unfailing:
    """A text stream in which writing never fails: what the stream below cannot take (a full disk, a pipe without a
    reader, a closed terminal) is lost, and what comes after it is tried again."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """From here on nothing about stdout or stderr raises, whoever writes to them."""
    sys.stdout, sys.stderr = Unfailing(sys.stdout), Unfailing(sys.stderr)
