"""The readers of a fleet's messages, each at a pace of its own. Pure; times are in seconds of one clock.

Readers share the bytes of messages. One that reads too slowly gets a new snapshot in place of what it has missed, and
one that reads nothing is cut off, so none keeps more than a few messages, whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_READERS = 64
LATE_S = 5.0  # a reader so far behind gets a snapshot
GONE_S = 20.0  # one so far behind is cut off


class Reader:
    """One of them. `wake` is called when there is something to take."""

    __slots__ = ("_pending", "_reading_since", "_snapshot", "over", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.over = False  # it shall end: nothing more comes
        self._snapshot = True  # it needs all of it
        self._pending: list[bytes] = []
        self._reading_since: float | None = None  # when it took what it still reads; None: it waits for more

    def offer(self, message: bytes, now: float) -> None:
        """Keep a message for it, unless it is so late that it gets a snapshot instead."""
        if self.behind_s(now) >= LATE_S:
            self._snapshot = True
        if self._snapshot:
            self._pending.clear()
        else:
            self._pending.append(message)
        self.wake()

    def take(self, snapshot: Callable[[], bytes], now: float) -> bytes:
        """Return what it has not read yet, as it now has read what it took before; empty: wait for `wake`."""
        if self._snapshot:
            self._snapshot, data = False, snapshot()
        else:
            data = b"".join(self._pending)
        self._pending.clear()
        self._reading_since = now if data else None
        return data

    def behind_s(self, now: float) -> float:
        """Return for how long it has been reading what it took last."""
        return 0.0 if self._reading_since is None else now - self._reading_since

    @property
    def kept(self) -> int:
        """The bytes kept for it."""
        return sum(map(len, self._pending))


class Readers:
    """All readers of one fleet, at most MAX_READERS."""

    def __init__(self) -> None:
        self._all: list[Reader] = []

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, wake: Callable[[], None]) -> Reader | None:
        """Return a new reader, which first takes a snapshot; None: there are as many as there may be."""
        if len(self._all) >= MAX_READERS:
            return None
        reader = Reader(wake)
        self._all.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """Forget a reader."""
        self._all.remove(reader)

    def publish(self, message: bytes, now: float) -> None:
        """Offer a message to all."""
        for reader in self._all:
            reader.offer(message, now)

    def too_late(self, now: float) -> list[Reader]:
        """Return the readers to be cut off."""
        return [reader for reader in self._all if reader.behind_s(now) >= GONE_S]

    def end(self) -> None:
        """Have all readers end."""
        for reader in self._all:
            reader.over = True
            reader.wake()
