"""A part that runs on a thread of its own inside another program, or on the caller's as a program.

Owns the thread and its end; what is opened, served and closed is the part's.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from bus.logs import get_logger
from bus.loop import Loop


class Service:
    """`with Part(...) as part:` serves until the block ends (StartError on entry where an endpoint is taken). A program
    calls `open`, `loop.run` and `close` itself."""

    part: str  # names the thread and the log lines
    loop: Loop
    _thread: threading.Thread | None = None

    def open(self) -> None:
        """Bind and connect everything, `loop` above all."""
        raise NotImplementedError

    def close(self) -> None:
        """What `open` opened; idempotent. Only when `loop` no longer runs."""
        raise NotImplementedError

    def start(self) -> Self:
        """Open, and serve from a thread of its own."""
        self.open()
        self._thread = threading.Thread(target=self._run, name=self.part, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Leave; idempotent. Sockets, threads and the Context are gone when it returns."""
        if self._thread is not None:
            self.loop.call_threadsafe(self.leave)
            self._thread.join()
            self._thread = None
        self.close()

    def leave(self) -> None:
        """Say what is to be said at the end, and stop `loop` (on its thread)."""
        self.loop.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:
            get_logger(self.part).exception(f"{self.part}.failed")
            raise
