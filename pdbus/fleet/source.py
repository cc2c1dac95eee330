"""The source of a fleet's samples: a thread that asks controller and broker regularly."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import zmq

from bus.endpoints import BusAddress
from bus.errors import PeerLost, RemoteProtocolError, RequestFailed
from bus.runtime.keys import Keys, any_key
from bus.runtime.sockets import Sockets
from bus.wire import codec
from bus.wire.messages import FROM_BROKER, BrokerStatus, BrokerStatusQuery, TraceReply
from pdbus.client import Client
from pdbus.client.channel import Channel
from pdbus.client.questions import Questions
from pdbus.fleet.figures import Sample

BROKER_WAIT_MS = 1_000
POLL_MS = 50
ASK_S = 2.0  # how long a controller may take to answer


class BrokerStatusClient:
    """Asks the broker for its counts, over one connection. `keys` is the directory of keys (empty: none), or the key to
    use. For one thread; use it in a `with` block. Raises ConfigError for invalid keys."""

    def __init__(self, address: BusAddress, keys: Keys | str = "") -> None:
        self._sockets = Sockets(keys=keys if isinstance(keys, Keys) else any_key(keys))
        self._broker = address.bootstrap
        self._dealer = self._sockets.dealer(self._broker)
        self._questions = Questions()

    def __enter__(self) -> BrokerStatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sockets.__exit__(kind, error, trace)

    def ask(self, wait_ms: int = BROKER_WAIT_MS) -> BrokerStatus | None:
        """Ask and wait up to `wait_ms` milliseconds. Return the broker's status; None when it does not answer in time,
        or does not accept our key."""
        self._sockets.look()
        answer: Future[BrokerStatus] = Future()
        self._questions.ask(self._broker, BrokerStatusQuery, BrokerStatus, answer, time.monotonic(), wait_ms / 1000)
        while True:
            try:
                for send in self._questions.tick(time.monotonic()):
                    self._dealer.send_multipart([b"", codec.encode(send.message)], zmq.NOBLOCK)
                if answer.done():
                    return answer.result()
                if self._dealer.poll(POLL_MS):
                    message = codec.decode(self._dealer.recv_multipart()[-1], FROM_BROKER)
                    self._questions.answered(self._broker, message, time.monotonic())
            except (zmq.Again, RemoteProtocolError, RequestFailed, PeerLost):
                self._questions.drop()  # Again: it refused the connection, as it does not know our key
                return None


class StatusSource:
    """Asks the controller for its status and new events, with `requests` for its lists of requests too, and the broker
    (None: none is asked) for its counts. For one thread, but for `trace`."""

    def __init__(self, client: Client, broker: BrokerStatusClient | None, *, requests: bool = False) -> None:
        self._client = client
        self._broker = broker
        self._requests = requests
        self._events_from = 0
        self._epoch = 0  # of the controller that answered last

    def ask(self) -> Sample | str:
        """Ask, and return a sample; or the reason (text) why the controller gave none. Raises what ends the client."""
        try:
            status = self._client.status(timeout_s=ASK_S, events_from=self._events_from, requests=self._requests)
        except PeerLost:
            return "the controller does not answer; what is shown is old"
        if self._epoch not in (0, status.epoch):
            self._events_from = 0  # another start numbers its own events from 1
        elif status.events:
            self._events_from = status.events[-1].number + 1
        self._epoch = status.epoch
        at, wall = time.monotonic(), time.time()
        return Sample(at, wall, status, self._broker.ask() if self._broker is not None else None)

    def trace(self, rid: str) -> TraceReply:
        """Ask what became of a request; any thread may. Raises what `Client.trace` does."""
        return self._client.trace(rid, timeout_s=ASK_S)


@contextmanager
def watching(controller: str, keys: Keys | None, bus: str = "") -> Iterator[StatusSource]:
    """Give a source of a controller's statuses, and of the counts of the broker at `bus` (empty: none is asked), for
    one thread. `keys` None: the cluster has none. Raises ConfigError for a wrong address."""
    with ExitStack() as exits:
        client = exits.enter_context(Viewer(controller, keys))
        broker = exits.enter_context(BrokerStatusClient(BusAddress(bus), keys or "")) if bus else None
        yield StatusSource(client, broker, requests=True)


class Viewer(Client):
    """A client with a key that was loaded before."""

    def __init__(self, controller: str, keys: Keys | None) -> None:
        self._own = keys
        super().__init__(controller)

    def _start(self, keys: str | Path, seed: int | None) -> None:
        self._channel = Channel(self._controllers.endpoints, self._patience, keys=self._own or "", seed=seed)


class Watcher(threading.Thread):
    """A thread that asks controller and broker each `interval_s` and puts the result into `updates`: a Sample, or the
    reason (text) why the controller gave none, or the exception that ends the thread. After each result it writes a
    byte to the descriptor `wake`."""

    def __init__(self, client: Client, broker: BrokerStatusClient, interval_s: float, wake: int) -> None:
        super().__init__(name="top", daemon=True)
        self.updates: queue.SimpleQueue[Sample | str | Exception] = queue.SimpleQueue()
        self._source = StatusSource(client, broker)
        self._interval_s = interval_s
        self._wake = wake
        self._leaving = threading.Event()

    def run(self) -> None:
        """The thread's loop; `start` runs it."""
        try:
            while not self._leaving.is_set():
                began = time.monotonic()
                self.updates.put(self._source.ask())
                os.write(self._wake, b"x")
                self._leaving.wait(max(0.0, began + self._interval_s - time.monotonic()))
        except Exception as error:
            self.updates.put(error)
            os.write(self._wake, b"x")

    def stop(self) -> None:
        """End the thread and wait until it has ended, which takes some seconds while a question is open."""
        self._leaving.set()
        self.join()
