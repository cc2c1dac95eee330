"""The records that a controller or a rank keeps of requests that are over, for `pdbus trace`. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct, msgpack

BESIDE_BYTES = 64  # of memory that a record needs in addition to its own
_STR_HEADS = {0xD9: 2, 0xDA: 3}  # bytes before a string's own, by MessagePack's first; 1 of those below 32 bytes

_R = TypeVar("_R", bound=Struct)


class History(Generic[_R]):
    """The last records of a `kind`, as many as fit into `max_bytes`; 0: none. A kind is a Struct that is encoded as an
    array and whose first field is the rid (the request's id).

    The records are kept encoded: that is smaller, and the garbage collector does not walk through bytes
    (docs/performance.md). `len` gives their number.
    """

    def __init__(self, kind: type[_R], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[bytes] = deque()
        self._encode = msgpack.Encoder().encode
        self._decoder = msgpack.Decoder(kind)
        self._rid_at = 1 if len(kind.__struct_fields__) < 16 else 3  # after the array's head

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, rid: str) -> list[_R]:
        """Return the records of the request with this rid, the oldest first; empty if none is kept. It searches all
        records."""
        name, at = self._encode(rid), self._rid_at
        return [self._decoder.decode(record) for record in self._kept if record.startswith(name, at)]

    def named(self, beginning: str, most: int) -> list[str]:
        """Return the rids that begin with `beginning`, each once, the newest first. Only the `most` newest records with
        such a rid count (at least 1)."""
        head = beginning.encode()
        found: dict[str, None] = {}
        for record in reversed(self._kept):
            at = self._rid_at + _STR_HEADS.get(record[self._rid_at], 1)
            if record.startswith(head, at):
                found[self._decoder.decode(record).rid] = None  # type: ignore[attr-defined]
                most -= 1
                if not most:
                    break
        return list(found)

    @property
    def oldest(self) -> _R | None:
        """The oldest record that is kept; None if there is none."""
        return self._decoder.decode(self._kept[0]) if self._kept else None

    def limit(self, max_bytes: int) -> None:
        """Set the limit from now on, and drop the oldest records beyond it."""
        self._max_bytes = max_bytes
        self._trim()

    def add(self, record: _R) -> None:
        """Keep `record`, and drop the oldest ones beyond the limit."""
        kept = self._encode(record)
        self._kept.append(kept)
        self._bytes += len(kept) + BESIDE_BYTES
        if self._bytes > self._max_bytes:
            self._trim()

    def _trim(self) -> None:
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popleft()) + BESIDE_BYTES
