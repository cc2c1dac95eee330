"""The thread that watches a cluster for pages: one question a second, however many they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bus.errors import PeerLost
from bus.wire.messages import MemberKey
from pdbus.fleet.frames import Frames
from pdbus.fleet.history import RankRow
from pdbus.fleet.one_request import as_page
from pdbus.fleet.source import StatusSource

ASK_S = 1.0
Opened = Callable[[], AbstractContextManager[StatusSource]]


class Feed(threading.Thread):
    """Asks a source each second and hands the delta for all readers to `publish`, on this thread. `opened` opens the
    source. An exception that ends the thread goes to `failed`. The other methods may be called by any thread."""

    def __init__(
        self, opened: Opened, frames: Frames, publish: Callable[[bytes], None], failed: Callable[[Exception], None]
    ) -> None:
        super().__init__(name="fleet", daemon=True)
        self._opened = opened
        self._frames = frames
        self._publish = publish
        self._failed = failed
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._source: StatusSource | None = None  # once it is open

    def run(self) -> None:
        """The thread's loop; `start` runs it."""
        try:
            with self._opened() as source:
                self._source = source
                due = time.monotonic()
                while not self._leaving.is_set():
                    update = source.ask()
                    with self._lock:
                        delta = self._frames.add(update)
                    self._publish(delta)
                    due = max(due + ASK_S, time.monotonic())
                    self._leaving.wait(due - time.monotonic())
        except Exception as error:
            if not self._leaving.is_set():
                self._failed(error)

    def snapshot(self) -> bytes:
        """Return a message with everything, as of the last delta."""
        with self._lock:
            return self._frames.snapshot()

    def series(self, key: MemberKey) -> list[RankRow]:
        """Return the rows of a rank's last fifteen minutes; empty: it is unknown."""
        with self._lock:
            return self._frames.history.series(key)

    def request(self, rid: str) -> dict[str, Any]:
        """Return what became of a request, for JSON; it waits for the answer. Raises BusError
        where there is none."""
        if self._source is None:
            raise PeerLost("no controller has answered yet")
        return as_page(rid, self._source.trace(rid))

    def stop(self) -> None:
        """End the thread without waiting for it."""
        self._leaving.set()
