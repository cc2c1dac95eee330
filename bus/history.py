"""The records that a controller or a rank keeps of requests that are over, for `pdbus trace`. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct, msgpack

BESIDE_BYTES = 96  # of memory that a record needs in addition to its own, with its name among all
_MARK = b"\xff"  # before and after each name: UTF-8 has no such byte

_R = TypeVar("_R", bound=Struct)


class History(Generic[_R]):
    """The last records of a `kind`, as many as fit into `max_bytes`; 0: none. A kind is a Struct that is encoded as an
    array and whose first field is the rid (the request's id).

    The records are kept encoded: that is smaller, and the garbage collector does not walk through bytes
    (docs/performance.md). So are all rids, one after the other: they are searched as one text. `len` gives the number
    of records.
    """

    def __init__(self, kind: type[_R], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[bytes] = deque()
        self._rids = bytearray(_MARK)
        self._encode = msgpack.Encoder().encode
        self._decoder = msgpack.Decoder(kind)

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, rid: str) -> list[_R]:
        """Return the records of the request with this rid, the oldest first; empty if none is kept."""
        whole, found, at = b"%b%b%b" % (_MARK, rid.encode(), _MARK), [], 0
        while (at := self._rids.find(whole, at)) >= 0:
            at += 1
            found.append(self._decoder.decode(self._kept[-self._rids.count(_MARK, at)]))
        return found

    def named(self, beginning: str, most: int) -> list[str]:
        """Return the rids that begin with `beginning`, each once, the newest first. Only the `most` newest records with
        such a rid count (at least 1)."""
        head, found, at = _MARK + beginning.encode(), dict[str, None](), len(self._rids)
        for _ in range(most):
            at = self._rids.rfind(head, 0, at)
            if at < 0:
                break
            found[self._rids[at + 1 : self._rids.index(_MARK, at + 1)].decode()] = None
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
        self._rids += b"%b\xff" % record.rid.encode()  # type: ignore[attr-defined]
        self._bytes += len(kept) + BESIDE_BYTES
        if self._bytes > self._max_bytes:
            self._trim()

    def _trim(self) -> None:
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popleft()) + BESIDE_BYTES
            del self._rids[: self._rids.index(_MARK, 1)]
