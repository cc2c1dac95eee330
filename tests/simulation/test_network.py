"""The rules of the simulated network, each as a scene played with libzmq's sockets and with ours: the same is seen."""

from __future__ import annotations

import errno
import random
import socket as unix
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import zmq
from virtual_time import VirtualTime

from bus.runtime import frames
from bus.runtime.sockets import Sockets
from simulation.network import Network, SimSocket

WAIT_S = 5.0
HWM = 30


class Stage(Protocol):
    """Two processes and the connections between them. What is bound is bound at one place, where the others connect."""

    def router(self) -> Any: ...
    def dealer(self) -> Any: ...
    def bus_in(self) -> Any: ...
    def bus_out(self) -> Any: ...
    def pub(self) -> Any: ...
    def sub(self, *topics: bytes) -> Any: ...
    def close(self, socket: Any) -> None: ...
    def send(self, socket: Any, *message: bytes) -> None: ...
    def read(self, socket: Any) -> list[bytes]:
        """The next message, which will come."""
        ...

    def empty(self, socket: Any) -> bool:
        """Whether nothing has come, though it has had time to."""
        ...

    def settle(self) -> None:
        """Let all arrive that is on its way."""
        ...

    def cut(self) -> None:
        """All connections end, with what is on its way."""
        ...

    def met(self, socket: Any) -> None:
        """Wait until a connection of it, made after the last call, is up."""
        ...


class Real:
    """libzmq's, over ipc through a go-between that can drop all it carries."""

    def __init__(self, directory: Path, exits: ExitStack) -> None:
        self._far, self._near = directory / "far", directory / "near"
        self._between: list[unix.socket] = []
        self._sockets = exits.enter_context(Sockets())
        self._made: dict[Any, Callable[[], bool]] = {}
        self._carried = 0  # bytes
        self._listener = unix.socket(unix.AF_UNIX)
        self._listener.bind(str(self._near))
        self._listener.listen()
        exits.callback(self._shut)
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()

    def router(self) -> Any:
        return self._sockets.router(f"ipc://{self._far}", hwm=HWM, unread=HWM)

    def dealer(self) -> Any:
        return self._connected(self._sockets.dealer(f"ipc://{self._near}", hwm=HWM))

    def bus_in(self) -> Any:
        return self._sockets.bus_in((b"a", b"b"), f"ipc://{self._far}")

    def bus_out(self) -> Any:
        return self._sockets.bus_out(f"ipc://{self._far}")

    def pub(self) -> Any:
        return self._connected(self._sockets.pub(f"ipc://{self._near}"))

    def sub(self, *topics: bytes) -> Any:
        return self._connected(self._sockets.sub(f"ipc://{self._near}", topics))

    def close(self, socket: Any) -> None:
        self._sockets.close_socket(socket)
        self._far.unlink(missing_ok=True)

    def send(self, socket: Any, *message: bytes) -> None:
        frames.send(socket, message)

    def read(self, socket: Any) -> list[bytes]:
        assert socket.poll(WAIT_S * 1000), "nothing came"
        return frames.receive(socket)

    def empty(self, socket: Any) -> bool:
        return not socket.poll(100)

    def settle(self) -> None:
        carried, still = -1, 0
        while still < 4:
            still = still + 1 if carried == self._carried else 0
            carried = self._carried
            threading.Event().wait(0.05)

    def cut(self) -> None:
        for each in self._between:
            with suppress(OSError):
                each.shutdown(unix.SHUT_RDWR)
            each.close()
        self._between.clear()

    def met(self, socket: Any) -> None:
        for _ in range(int(WAIT_S / 0.01)):
            if self._made[socket]():
                threading.Event().wait(0.05)  # for what a subscriber says behind its handshake, and a router's new peer
                return
            threading.Event().wait(0.01)
        raise AssertionError("no connection was made")

    def _connected(self, socket: Any) -> Any:
        self._made[socket] = self._sockets.connections(socket)
        return socket

    def _shut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(unix.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = unix.socket(unix.AF_UNIX)
                try:
                    there.connect(str(self._far))
                except OSError:
                    here.close()
                    there.close()
                    continue
                self._between += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: unix.socket, target: unix.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._carried += len(data)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(unix.SHUT_RDWR)


class Simulated:
    """Ours."""

    def __init__(self, seed: int) -> None:
        self._time = VirtualTime()
        self._network = Network(self._time.clock, self._at, random.Random(seed))
        self._sockets: list[SimSocket] = []
        self._network.sockets = lambda: [each for each in self._sockets if not each.closed]
        self._seen: dict[SimSocket, int] = {}
        self._here, self._there = (self._process(name) for name in ("here", "there"))

    def router(self) -> SimSocket:
        return self._bound(zmq.ROUTER, HWM)

    def dealer(self) -> SimSocket:
        return self._connected(zmq.DEALER, HWM)

    def bus_in(self) -> SimSocket:
        return self._bound(zmq.SUB, 10_000, b"a", b"b")

    def bus_out(self) -> SimSocket:
        return self._bound(zmq.PUB, 10_000)

    def pub(self) -> SimSocket:
        return self._connected(zmq.PUB, 10_000)

    def sub(self, *topics: bytes) -> SimSocket:
        return self._connected(zmq.SUB, 10_000, *topics)

    def close(self, socket: SimSocket) -> None:
        self._network.close(socket, 0.0)

    def send(self, socket: SimSocket, *message: bytes) -> None:
        socket.put(list(message))

    def read(self, socket: SimSocket) -> list[bytes]:
        self._pass(WAIT_S, lambda: bool(socket.ready))
        return socket.get()

    def empty(self, socket: SimSocket) -> bool:
        self._pass(0.1, lambda: False)
        return not socket.ready

    def settle(self) -> None:
        self._pass(0.1, lambda: False)

    def cut(self) -> None:
        for pipe in self._network.connections():
            self._network.reset(pipe)

    def met(self, socket: SimSocket) -> None:
        seen = self._seen[socket]
        self._pass(WAIT_S, lambda: socket.handshakes > seen)
        assert socket.handshakes > seen, "no connection was made"
        self._seen[socket] = socket.handshakes
        self._pass(0.05, lambda: False)

    def _process(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            key="",
            host=name,
            paused_until=0.0,
            woken=lambda: None,
            readable=lambda socket: None,
            now=self._time,
        )

    def _at(self, when: float, function: Callable[[], None]) -> None:
        self._time.call_later(when - self._time.now, function)

    def _pass(self, seconds: float, until: Callable[[], bool]) -> None:
        end = self._time.now + seconds
        while not until() and self._time.next_due <= end:
            self._time.fire()

    def _bound(self, kind: int, hwm: int, *topics: bytes) -> SimSocket:
        socket = SimSocket(self._network, self._there, kind, hwm, hwm)
        socket.topics = topics
        self._network.bind(socket, "there")
        self._sockets.append(socket)
        return socket

    def _connected(self, kind: int, hwm: int, *topics: bytes) -> SimSocket:
        socket = SimSocket(self._network, self._here, kind, hwm, hwm)
        socket.topics = topics
        self._network.connect(socket, "there")
        self._sockets.append(socket)
        self._seen[socket] = 0
        return socket


@pytest.fixture(params=["libzmq", "simulated"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if request.param == "simulated":
        yield Simulated(7)
        return
    with ExitStack() as exits:
        yield Real(tmp_path_factory.mktemp("z"), exits)


def test_what_is_said_before_anybody_listens_arrives(stage: Stage) -> None:
    dealer = stage.dealer()
    stage.send(dealer, b"one")
    stage.send(dealer, b"two", b"frames")
    router = stage.router()
    assert [stage.read(router)[1:] for _ in range(2)] == [[b"one"], [b"two", b"frames"]]


def test_who_connects_keeps_what_it_says_while_there_is_no_connection(stage: Stage) -> None:
    router, dealer = stage.router(), stage.dealer()
    stage.send(dealer, b"one")
    first = stage.read(router)[0]
    stage.met(dealer)
    stage.close(router)
    stage.cut()
    assert stage.empty(dealer)
    stage.send(dealer, b"while it was away")
    router = stage.router()
    second, *message = stage.read(router)
    assert message == [b"while it was away"]
    stage.send(router, second, b"back")
    assert stage.read(dealer) == [b"back"]
    assert len(first) == len(second) == 5


def test_a_router_has_no_such_peer_once_its_connection_has_ended(stage: Stage) -> None:
    router, dealer = stage.router(), stage.dealer()
    stage.send(dealer, b"one")
    peer = stage.read(router)[0]
    stage.met(dealer)
    stage.cut()
    stage.met(dealer)
    with pytest.raises(zmq.ZMQError) as error:
        stage.send(router, peer, b"to nobody")
    assert error.value.errno == errno.EHOSTUNREACH
    stage.send(dealer, b"again")
    other, *message = stage.read(router)
    assert (other != peer, message) == (True, [b"again"])


def test_what_had_come_before_a_connection_ended_is_read(stage: Stage) -> None:
    router, dealer = stage.router(), stage.dealer()
    stage.send(dealer, b"zero")
    peer = stage.read(router)[0]
    stage.met(dealer)
    for number in range(5):
        stage.send(dealer, b"%d" % number)
    stage.send(router, peer, b"back")
    stage.settle()
    stage.cut()
    stage.met(dealer)
    assert [stage.read(router) for _ in range(5)] == [[peer, b"%d" % number] for number in range(5)]
    assert stage.read(dealer) == [b"back"]


def test_a_dealer_whose_queue_is_full_is_told_so(stage: Stage) -> None:
    dealer = stage.dealer()
    for number in range(HWM):
        stage.send(dealer, b"%d" % number)
    with pytest.raises(zmq.Again):
        stage.send(dealer, b"one too many")
    router = stage.router()
    assert [stage.read(router)[1] for _ in range(HWM)] == [b"%d" % number for number in range(HWM)]
    stage.send(dealer, b"now")
    assert stage.read(router)[1:] == [b"now"]


def test_a_router_is_told_that_a_peer_does_not_read(stage: Stage) -> None:
    """And what it could send arrives, in order, without a gap."""
    router, dealer = stage.router(), stage.dealer()
    stage.send(dealer, b"one")
    peer = stage.read(router)[0]
    sent = 0
    with suppress(zmq.Again):
        while sent < 100_000:
            stage.send(router, peer, sent.to_bytes(4, "big") + bytes(60_000))
            sent += 1
            if sent % 10 == 0:
                stage.empty(router)
    assert HWM <= sent < 100_000
    assert [stage.read(dealer)[0][:4] for _ in range(sent)] == [n.to_bytes(4, "big") for n in range(sent)]


def test_no_connection_is_starved_by_others(stage: Stage) -> None:
    router, dealers = stage.router(), [stage.dealer() for _ in range(3)]
    for dealer in dealers:
        stage.met(dealer)
    for number, dealer in enumerate(dealers):
        for _ in range(20):
            stage.send(dealer, b"%d" % number)
    stage.settle()
    first = Counter(stage.read(router)[1] for _ in range(45))
    assert all(first[b"%d" % number] >= 10 for number in range(3)), first


def test_a_publication_reaches_who_has_asked_for_it_alone(stage: Stage) -> None:
    out = stage.bus_out()
    stage.send(out, b"a", b"nobody listens")
    early, other = stage.sub(b"a"), stage.sub(b"b", b"ac")
    stage.met(early)
    stage.met(other)
    stage.settle()
    for topic in (b"a", b"ab", b"b", b"c", b"ac"):
        stage.send(out, topic, b"x")
    assert [stage.read(early)[0] for _ in range(3)] == [b"a", b"ab", b"ac"]
    assert [stage.read(other)[0] for _ in range(2)] == [b"b", b"ac"]
    assert stage.empty(early)
    assert stage.empty(other)


def test_a_publisher_is_not_heard_before_it_knows_what_is_wanted(stage: Stage) -> None:
    pub = stage.pub()
    stage.send(pub, b"a", b"too early")
    into = stage.bus_in()
    stage.met(pub)
    while stage.empty(into):  # what is wanted is told behind the handshake
        stage.send(pub, b"c", b"not wanted")
        stage.send(pub, b"a", b"heard")
    assert stage.read(into) == [b"a", b"heard"]


def test_a_publisher_keeps_what_it_says_while_there_is_no_connection(stage: Stage) -> None:
    """It knows from before what is wanted: what a broker that was away missed by this reaches the next one."""
    pub, into = stage.pub(), stage.bus_in()
    stage.met(pub)
    while stage.empty(into):
        stage.send(pub, b"a", b"before")
    stage.settle()
    stage.close(into)
    stage.cut()
    assert stage.empty(pub)
    stage.send(pub, b"a", b"meanwhile")
    into = stage.bus_in()
    assert stage.read(into) == [b"a", b"meanwhile"]
