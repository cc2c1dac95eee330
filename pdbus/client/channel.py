"""The client's shell for programs with threads: a background thread that runs its traffic. Decides nothing.

Any thread may call `begin`, `cancel` and `ask`. Callbacks run on the background thread, so a callback must only pass
its argument on.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

from bus.errors import PartFailed
from bus.runtime.keys import Keys, any_key
from bus.runtime.service import Service
from bus.runtime.sockets import Sockets
from bus.wire.messages import Message
from pdbus.client.core import Patience
from pdbus.client.questions import REPEAT_S, A, settle
from pdbus.client.request import Request
from pdbus.client.traffic import TICK_S, Sink, Traffic, broken, bug, check_question

CLOSED = "this client is closed"


class Channel(Service):
    """The background thread of a `Client`, from its construction to `stop`. `controllers` are client endpoints, `keys`
    is a directory of keys (empty: none), or the key to use, `seed` is for `rng`. Raises ConfigError or StartError if it
    cannot start. After `stop`, calls raise RuntimeError; after a bug in the thread or in a forked child, PartFailed."""

    part = "client"

    def __init__(
        self, controllers: Sequence[str], patience: Patience, *, keys: Keys | str | Path = "", seed: int | None = None
    ) -> None:
        self._patience = patience
        self._keys = keys if isinstance(keys, Keys) else any_key(keys)
        self.rng = random.Random(seed)  # any thread draws from it: a single draw is atomic
        self._controllers = controllers
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], None], Callable[[], None]]] = (
            deque()
        )  # waiting for the thread; see `_call`
        self._closed = False
        self.start()

    def _open(self, exits: ExitStack) -> None:
        sockets = exits.enter_context(Sockets(keys=self._keys))
        loop = self.loop
        for endpoint in self._controllers:
            sockets.check(endpoint)  # here, as the thread connects later and could not raise to the caller
        self._traffic = Traffic(self._controllers, self._patience, self.rng, sockets, loop.clock, loop.add, loop.remove)
        loop.call_every(TICK_S, self._traffic.tick)
        loop.after_turn(self._traffic.flush)

    # --- any thread ---------------------------------------------------------------------------------------------

    def begin(self, request: Request, sink: Sink) -> None:
        """Start a request; return at once. `sink` is called on the background thread: with new token ids as they come,
        in order, and at the end with the Result."""
        self._call(lambda: self._traffic.begin(request, sink), lambda: sink(broken(request.rid)))

    def cancel(self, rid: str, sink: Sink | None = None) -> None:
        """Cancel the request `rid` if it is still live, without waiting; with `sink`, only if it is that sink's. Its
        Result still comes. It raises nothing."""
        with suppress(PartFailed, RuntimeError):
            self._call(lambda: self._traffic.cancel(rid, sink), lambda: None)

    def drop(self, rid: str, sink: Sink) -> None:
        """Cancel the request of `sink` a little later, because its output is no longer read. Takes no lock, so it may
        be called at any moment."""
        self._traffic.dropped.append((rid, sink))

    def ask(
        self,
        controller: str,
        make: Callable[[int], Message],
        kind: type[A],
        timeout_s: float | None = None,
        until: Callable[[A], bool] | None = None,
        repeat_s: float = REPEAT_S,
    ) -> Future[A]:
        """Send `make(id)` to `controller` every `repeat_s` seconds until a message of `kind` answers it; return the
        answer's future at once.

        With `until`, ask again until an answer satisfies it; when time is up, the last answer counts. The future fails
        with PeerLost after `timeout_s` (default: `connect_timeout_s`) without any answer, and with RequestFailed when
        the controller refuses. Raises ConfigError when `make` rejects its arguments.
        """
        check_question(make, timeout_s)
        answer: Future[A] = Future()
        self._call(
            lambda: self._traffic.ask(controller, make, kind, answer, timeout_s, until, repeat_s),
            lambda: settle(answer, bug()),
        )
        return answer

    def stop(self) -> None:
        """Cancel live requests, wait for the thread and close the sockets; a second call does nothing. Every sink has
        its Result when this returns."""
        if not self.inherited:
            with self._lock:
                self._closed = True
            super().stop()

    def _call(self, function: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Run `function` on the channel's thread; run `abandon` instead if the thread fails first."""
        self.raise_if_inherited()
        with self._lock:  # the thread must not leave in between
            if self._closed:
                raise RuntimeError(CLOSED)
            self.raise_if_failed()
            self._calls.append((function, abandon))
            self.loop.call_threadsafe(lambda: self._calls.popleft()[0]())
        if self.failure is not None:  # the thread failed just now, and may have emptied the queue before
            self._failed()

    # --- the channel's thread -----------------------------------------------------------------------------------

    def _failed(self) -> None:
        with self._lock:
            self._traffic.fail()
            while self._calls:
                self._calls.popleft()[1]()

    def _leave(self) -> None:
        self._traffic.leave(RuntimeError(CLOSED))
        self.loop.stop()
