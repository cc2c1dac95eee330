"""What a part remembers of requests that are over, for whoever asks what became of one (`pdbus trace`). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_R = TypeVar("_R")


class Memory(Generic[_R]):
    """The last records, as many as fit into `max_bytes`; 0: none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[tuple[_R, int]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[_R]:
        """The oldest first."""
        return (record for record, _ in self._kept)

    def limit(self, max_bytes: int) -> None:
        """From now on so many."""
        self._max_bytes = max_bytes
        self._trim()

    def add(self, record: _R, size: int) -> None:
        """`size`: of the record in bytes, about."""
        self._kept.append((record, size))
        self._bytes += size
        if self._bytes > self._max_bytes:
            self._trim()

    def _trim(self) -> None:
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popleft()[1]
