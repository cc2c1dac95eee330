"""The intake of a part's loop: messages of peers that it must drop, and items that other threads hand to it.

`Rejections` is the one rule for counting and logging dropped messages. `Mailbox` is the one way into a loop's thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from bus.errors import ProtocolError

PEERS_REMEMBERED = 4096
DETAIL_MAX = 200

Item = TypeVar("Item")


class Rejections:
    """The invalid messages that a part drops. It counts each in `counts`, under `prefix` and its reason, and logs the
    first of each peer as `event` with `fields`, for up to PEERS_REMEMBERED peers."""

    def __init__(
        self, log: Any, counts: Counter[str], *, prefix: str = "", event: str = "message.rejected", **fields: Any
    ) -> None:
        self._log = log
        self._counts = counts
        self._prefix = prefix
        self._event = event
        self._fields = fields
        self._peers: set[str] = set()

    def note(self, peer: str, error: ProtocolError) -> None:
        """Count a message of `peer` that was dropped because of `error`, and log it if it is that peer's first."""
        self._counts[f"{self._prefix}{error.reason}"] += 1
        if peer not in self._peers and len(self._peers) < PEERS_REMEMBERED:
            self._peers.add(peer)
            detail = error.detail[:DETAIL_MAX]
            self._log.warning(self._event, peer=peer, reason=error.reason, detail=detail, **self._fields)


class Mailbox(Generic[Item]):
    """A bounded queue of at most `most` items, which any thread puts in and the thread of a loop takes, all at once.
    No method blocks.

    The owner of the loop opens it with `wake`, which must make the loop's thread call `take` soon. `wake` is called
    once for all items that are put in before the next `take`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[Item] = deque()
        self._lock = threading.Lock()  # of what is spilled
        self._spilled: dict[Any, None] = {}
        self._rung = False
        self._wake: Callable[[], object] | None = None

    def open(self, wake: Callable[[], object]) -> None:
        """Start to wake the taking thread through `wake`; it is called at once if items were put in before."""
        self._wake = wake
        if self._rung:
            wake()

    def close(self) -> None:
        """Stop waking: there is no taking thread any more. Items may still be put in."""
        self._wake = None

    def clear(self) -> None:
        """Drop all items."""
        self._items.clear()
        self._spilled = {}
        self._rung = False

    def put(self, item: Item, *, spills: Any = None, always: bool = False) -> bool:
        """Put `item` in and wake the taking thread; any thread may call it. Return false if the queue is full: `item`
        is lost, and `spills` (a hashable, such as the request's name), if given, is kept for `spilled`. With `always`
        the item is taken beyond the limit."""
        if not always and len(self._items) >= self._most:
            if spills is not None:
                with self._lock:
                    self._spilled[spills] = None
                self.ring()
            return False
        self._items.append(item)
        self.ring()
        return True

    def ring(self) -> None:
        """Wake the taking thread, even without an item."""
        if not self._rung:
            self._rung = True
            if self._wake is not None:
                self._wake()

    def take(self) -> list[Item]:
        """Return the items put in since the last call, in order, and remove them. Only the loop's thread may call
        it."""
        self._rung = False  # before it looks, so that none which comes now is forgotten
        return [self._items.popleft() for _ in range(len(self._items))]

    def spilled(self) -> list[Any]:
        """Return the `spills` of items that were lost since the last call, each once, in order. Only the loop's thread
        may call it."""
        if not self._spilled:
            return []
        with self._lock:
            spilled, self._spilled = self._spilled, {}
        return list(spilled)
