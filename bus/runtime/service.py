"""A part that runs on a thread of its own inside another program, or on the caller's as a program.

Owns the thread, its end, and what became of it; what is opened, served and closed is the part's.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from bus.errors import PartFailed
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop


class Service:
    """`with Part(...) as part:` serves until the block ends (StartError on entry where an endpoint is taken). A program
    calls `open`, `loop.run` and `close` itself.

    An exception on the part's thread is a bug of ours. It ends the part, which closes what it had open, and is
    `failure` from then on; whoever waits for the part wakes, and every later call to it raises PartFailed.
    """

    part: str  # names the thread and the log lines
    loop: Loop
    spin_us = 0  # how long the loop polls before it sleeps, while messages come as densely
    failure: Exception | None = None
    _thread: threading.Thread | None = None
    _exits = ExitStack()  # what an open part has to close, the last one first

    # --- the part's -------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        """Bind and connect everything, and leave with `exits` what closes it. Whatever it raises, that is closed."""
        raise NotImplementedError

    def _failed(self) -> None:
        """The thread has failed (`failure` says why) and all is closed: wake who waits."""

    def leave(self) -> None:
        """Say what is to be said at the end, and stop `loop` (on its thread)."""
        self.loop.stop()

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make `loop`, bind and connect everything. What raises leaves nothing open."""
        with ExitStack() as exits:
            self.loop = Loop(spin_s=self.spin_us / 1e6)
            exits.callback(self.loop.close)
            self._open(exits)
            self._exits = exits.pop_all()

    def close(self) -> None:
        """What `open` opened; idempotent. Only when `loop` no longer runs."""
        self._exits.close()

    def start(self) -> Self:
        """Open, and serve from a thread of its own."""
        self.open()
        thread = threading.Thread(target=self._run, name=f"pdbus-{self.part}", daemon=True)
        try:
            thread.start()
        except BaseException:
            self.close()
            raise
        self._thread = thread
        return self

    def stop(self) -> None:
        """Leave; idempotent. Sockets, threads and the Context are gone when it returns."""
        if self._thread is not None:
            self.loop.call_threadsafe(self.leave)
            self._thread.join()
            self._thread = None
        self.close()

    def raise_if_failed(self) -> None:
        """PartFailed if the part's thread has failed."""
        if self.failure is not None:
            why = f"{type(self.failure).__name__}: {self.failure}"
            raise PartFailed(f"the {self.part} of this process has failed: {why}") from self.failure

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        log = get_logger(self.part)
        try:
            self.loop.run()
        except Exception as error:
            self.failure = error
            log.exception(f"{self.part}.failed")
            try:
                self.close()  # an endpoint that nobody serves is worse than none
            except Exception:
                log.exception(f"{self.part}.close_failed")
            self._failed()
