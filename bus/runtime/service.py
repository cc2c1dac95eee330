"""A part (broker, node, controller, ...) that runs on a thread of its own inside another program, or on the caller's
thread as a program.

This module owns the thread, its end, and the failure. The part itself opens, serves and closes.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from bus.errors import PartFailed, StartError
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop


class Service:
    """A part's life: `with Part(...) as part:` serves until the block ends (StartError on entry where an endpoint is
    taken). A program calls `open`, `loop.run` and `close` itself. A part that was stopped, or that failed, starts as
    a new one in another `with`, under an epoch of its own; between the two, and where that start fails, every call
    raises PartFailed.

    Any thread except its own may start and stop it, one at a time. A part that serves cannot be started again.

    An exception on the part's thread is a bug of ours. It ends the part, which closes what it had open. `failure`
    then holds it; threads that wait for the part wake, and every later call raises PartFailed.

    A forked process has a copy of an open part without its thread. There every call raises PartFailed, `stop` and
    `close` do not touch what is the parent's, and `start` or `open` makes a new part from the same arguments.
    """

    part: str  # names the thread and the log lines
    loop: Loop
    spin_us = 0  # how long the loop polls before it sleeps, while messages come as densely
    failure: Exception | None = None
    inherited = False  # opened by the process that this one was forked from
    opened = False  # it serves, or has served
    stopped = False  # it has served, and does not now
    _is_open = False  # by `open`, until `close`
    _thread: threading.Thread | None = None
    _turn: threading.Lock  # held while a thread starts or stops the part
    _exits = ExitStack()  # what an open part has to close, the last one first
    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        part = super().__new__(cls)
        part._made_of, part._turn = (args, kwargs), threading.Lock()
        return part

    # --- the part's -------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        """Bind and connect everything, and register with `exits` what closes it. If this raises, everything
        registered is closed."""
        raise NotImplementedError

    def _renew(self) -> None:
        """Reset the state of the part's former life before it is opened again. Its counts go on."""

    def _failed(self) -> None:
        """Wake threads that wait: the part's thread has failed (`failure` says why) and all is closed."""

    def _ended(self) -> None:
        """Finish after the part was stopped (`stopped`): end what came too late for its thread."""

    def _leave(self) -> None:
        """Send the last messages and stop `loop` (on its thread)."""
        self.loop.stop()

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make `loop`, bind and connect everything, for a caller that then runs `loop` itself. An exception leaves
        nothing open. StartError if it is open already or an endpoint is taken."""
        self._raise_if_own()
        with self._turn:
            self._make()

    def close(self) -> None:
        """Close what `open` opened, when `loop` no longer runs; idempotent. RuntimeError while it serves from a thread
        of its own, which `stop` ends."""
        with self._turn:
            if self._thread is not None and self.failure is None:
                raise RuntimeError(f"this {self.part} serves from a thread of its own: stop it")
            self._unmake()

    def _make(self) -> None:
        if self._is_open:
            raise StartError(f"this {self.part} is open already: close it first, or make another one")
        if self.inherited:
            (args, kwargs), turn = self._made_of, self._turn
            self.__dict__.clear()
            type(self).__init__(self, *args, **kwargs)
            self._made_of, self._turn = (args, kwargs), turn
        _opened.add(self)
        if self.stopped or self.failure is not None:
            self._renew()
        with ExitStack() as exits:
            self.loop = Loop(spin_s=self.spin_us / 1e6)
            exits.callback(self.loop.close)
            self._open(exits)
            self._exits = exits.pop_all()
        self.failure, self.stopped, self.opened, self._is_open = None, False, True, True

    def _unmake(self) -> None:
        if self._is_open:
            self._is_open = False
            if self.failure is None and not self.stopped:
                self.stopped = True
                self._ended()
            self._exits.close()

    def start(self) -> Self:
        """Open, and serve on a thread of its own; return when everything is bound. StartError if it serves already
        (then it goes on serving) or an endpoint is taken."""
        self._raise_if_own()
        with self._turn:
            if self._thread is not None:
                if self.failure is None:
                    raise StartError(f"this {self.part} serves already: stop it first, or make another one")
                self._thread.join()  # until what it had open is closed
            self._make()
            thread = threading.Thread(target=self._run, name=f"pdbus-{self.part}", daemon=True)
            try:
                thread.start()
            except BaseException:
                self._unmake()
                raise
            self._thread = thread
            return self

    def stop(self) -> None:
        """Stop, and wait until sockets, threads and the Context are gone; idempotent. RuntimeError on the part's own
        thread, which cannot wait for itself."""
        self._raise_if_own()
        with self._turn:
            if self._thread is not None:
                self.loop.call_threadsafe(self._leave)
                self._thread.join()
                self._thread = None
                self.stopped = True
                self._ended()
            self._unmake()

    def _raise_if_own(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError(f"the {self.part}'s own thread can neither start nor stop it")

    def raise_if_failed(self) -> None:
        """Raise PartFailed if the part's thread has failed, was stopped, or runs in the parent of this forked
        process."""
        self.raise_if_inherited()
        if self.failure is not None:
            why = f"{type(self.failure).__name__}: {self.failure}"
            raise PartFailed(f"the {self.part} of this process has failed: {why}") from self.failure
        if self.stopped:
            raise PartFailed(f"the {self.part} of this process was stopped: start it again, or make another one")

    def raise_if_closed(self) -> None:
        """Raise PartFailed if the part does not serve: it failed, was stopped or was not started yet."""
        self.raise_if_failed()
        if not self.opened:
            raise PartFailed(f"the {self.part} of this process was not started yet: call it in a `with` block of it")

    def raise_if_inherited(self) -> None:
        """Raise PartFailed in a forked child of the process that opened the part. Methods call it before they take a
        lock of the part, which no thread would release there."""
        if self.inherited:
            raise PartFailed(f"this {self.part} is the parent process's: in a forked child, make another")

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
                self._unmake()  # an endpoint that is bound but not served is worse than none
            except Exception:
                log.exception(f"{self.part}.close_failed")
            self._failed()


_opened: WeakSet[Service] = WeakSet()


def _forked() -> None:
    for part in _opened:
        part.inherited = True
        part._thread, part._exits, part._turn, part._is_open = None, ExitStack(), threading.Lock(), False
    _opened.clear()


os.register_at_fork(after_in_child=_forked)
