"""Output streams for a command that must outlive the reader of its output. Output that cannot be written is dropped."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class Unfailing:
    """A text stream in which a write never fails: what the stream below cannot take (full disk, closed pipe or
    terminal) is lost, and the next write is tried again. All other attributes are those of the stream below."""

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
    """Make writes to stdout and stderr never raise from here on, in all code of the process. For a command that must go
    on after the reader of its output has gone."""
    sys.stdout, sys.stderr = Unfailing(sys.stdout), Unfailing(sys.stderr)
