"""The loop and the sockets that the parts' own shells run on, in virtual time, and how they get there.

`installed(world)` puts them where the shells look for the real ones; nothing of a shell is replaced. A process runs one
loop: it turns when a message comes to a socket that is awake, when a timer is due, or when it is called, and a turn
takes no time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

import bus.broker.shell
import bus.embed.publisher
import bus.embed.resolver
import bus.runtime.epochs
import bus.runtime.frames
import bus.runtime.loop
import bus.runtime.service
import bus.runtime.sockets
import controller.shell
import nodes.link.host
import nodes.link.rank
from bus.rights import Known
from bus.runtime.loop import Loop
from bus.runtime.sockets import DATA_MAX, HEADER_MAX, HWM, UNREAD
from simulation.network import SimSocket

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World


class SimLoop(Loop):
    """A `Loop` that never waits: its process turns it."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.clock)
        self._wake_in.close()
        self._wake_out.close()
        self._poller: Any = _Awake()
        self._process = process

    @property
    def due(self) -> float:
        """When it wants to turn next, if nothing comes before."""
        if self._calls or self.behind or self._poller.has_ready():
            return self.clock()
        self._timeout_ms()  # drops timers that were cancelled
        return self._timers[0][0] if self._timers else float("inf")

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def awake(self, socket: SimSocket) -> bool:
        return socket in self._poller.sockets

    def close(self) -> None:
        self._handlers.clear()

    def _wake(self) -> None:
        self._process.woken()


class _Awake:
    """Stands for a `zmq.Poller`: the sockets that wake the loop."""

    def __init__(self) -> None:
        self.sockets: dict[SimSocket, None] = {}

    def register(self, socket: Any, flags: int) -> None:
        if isinstance(socket, SimSocket):  # no other has anything to read
            self.sockets[socket] = None

    def unregister(self, socket: Any) -> None:
        if isinstance(socket, SimSocket):
            del self.sockets[socket]

    def has_ready(self) -> bool:
        for socket in self.sockets:  # noqa: SIM110 - `any` takes twice as long, and this is asked most often of all
            if socket.ready:
                return True
        return False

    def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
        return [(socket, zmq.POLLIN) for socket in self.sockets if socket.ready]


class SimSockets:
    """What shells use of `bus.runtime.sockets.Sockets`."""

    refused: ClassVar[dict[str, int]] = {}  # the network refuses what a key may not do (`banned`)

    def __init__(self, process: Process, **settings: Any) -> None:
        self._process = process
        self._network = process.world.network
        self.keyed = process.world.spec.keyed
        process.sockets.append(self)
        self.open: list[SimSocket] = []
        self.key_revoked: Callable[[str, str], None] = lambda name, domain: None

    def __enter__(self) -> SimSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for socket in self.open:
            self._network.close(socket, 0.0)
        self.open.clear()

    def on_key_revoked(self, function: Callable[[str, str], None]) -> None:
        self.key_revoked = function

    def look(self) -> None:
        """Do nothing: the network lets go of a revoked key."""

    def close_socket(self, socket: SimSocket, *, linger_ms: int = 0) -> None:
        self.open.remove(socket)
        self._network.close(socket, linger_ms / 1000)

    def release(self, socket: SimSocket) -> SimSocket:
        return socket

    def pub(self, connect: str) -> SimSocket:
        return self._connected(zmq.PUB, connect)

    def sub(self, connect: str, topics: tuple[bytes, ...]) -> SimSocket:
        return self._connected(zmq.SUB, connect, topics=topics)

    def dealer(self, connect: str, *, maximum: int = HEADER_MAX, hwm: int = HWM, role: str = "brokers") -> SimSocket:
        return self._connected(zmq.DEALER, connect, hwm)

    def bus_in(self, topics: tuple[bytes, ...], *bind: str) -> SimSocket:
        return self._bound(zmq.SUB, bind, topics=topics)

    def bus_out(self, *bind: str) -> SimSocket:
        return self._bound(zmq.PUB, bind)

    def router(self, *bind: str, maximum: int = HEADER_MAX, hwm: int = HWM, unread: int = UNREAD, domain: str = "data",
               answers_one_frame: bool = False) -> SimSocket:  # fmt: skip
        return self._bound(zmq.ROUTER, bind, hwm, unread)

    def ephemeral_router(self, host: str, *, maximum: int = DATA_MAX, hwm: int = HWM,
                         answers_one_frame: bool = False) -> tuple[SimSocket, str]:  # fmt: skip
        endpoint = host if host.startswith("ipc:") else f"{host}:{self._process.world.free_port()}"
        return self.router(endpoint, hwm=hwm), endpoint

    def connections(self, socket: SimSocket) -> Callable[[], bool]:
        seen = 0

        def made() -> bool:
            nonlocal seen
            before, seen = seen, socket.handshakes
            return before != seen

        return made

    def _new(self, kind: int, hwm: int, unread: int, topics: tuple[bytes, ...]) -> SimSocket:
        most = self._process.world.hwm
        socket = SimSocket(self._network, self._process, kind, min(hwm, most), min(unread, hwm, most))
        socket.topics = topics
        self.open.append(socket)
        return socket

    def _connected(self, kind: int, endpoint: str, hwm: int = HWM, topics: tuple[bytes, ...] = ()) -> SimSocket:
        socket = self._new(kind, hwm, hwm, topics)
        self._network.connect(socket, self._inside(endpoint))
        return socket

    def _bound(self, kind: int, endpoints: Sequence[str], hwm: int = HWM, unread: int = HWM,
               topics: tuple[bytes, ...] = ()) -> SimSocket:  # fmt: skip
        socket = self._new(kind, hwm, unread, topics)
        for endpoint in endpoints:
            self._network.bind(socket, self._inside(endpoint))
        return socket

    def _inside(self, endpoint: str) -> str:
        return f"{endpoint}@{id(self._process)}" if endpoint.startswith("inproc:") else endpoint


def send(socket: SimSocket, frames: Sequence[Any]) -> None:
    socket.put(list(frames))


def receive_known(socket: SimSocket) -> list[Any]:
    """Return a message whose first frame says whose key its sender proved."""
    first, *others = socket.get()
    known = Known(first)
    known.key = socket.key
    return [known, *others]


def _receive(socket: SimSocket, copied: int = 1 << 30, keyed: bool = False, routed: bool = False) -> list[Any]:
    frames: list[Any] = receive_known(socket) if keyed else socket.get()
    for number in range(copied, len(frames)):
        frames[number] = zmq.Frame(frames[number])
    return frames


def _has_message(socket: SimSocket) -> bool:
    return bool(socket.ready)


class _Proxy:
    """Stands for the thread on which a broker forwards publications in C: it does so the moment they come."""

    def __init__(self, *, target: Any, args: tuple[SimSocket, SimSocket], **settings: Any) -> None:
        self._into, self._out = args

    def start(self) -> None:
        self._into.proxy = self._out.put

    def is_alive(self) -> bool:
        return True


@contextmanager
def installed(world: World) -> Iterator[None]:
    """All parts that are made meanwhile belong to `world.current`, and live in its time."""
    changed: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, value: Any) -> None:
        changed.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    replaced = {
        bus.runtime.frames.send: send,
        bus.runtime.frames.receive: _receive,
        bus.runtime.frames.has_message: _has_message,
    }
    roots = ("bus", "controller", "nodes", "pdbus")
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in roots]:
        for name, value in list(vars(module).items()):
            if callable(value) and type(value) is type(send) and value in replaced:
                put(module, name, replaced[value])
    for module in (bus.broker.shell, bus.embed.publisher, bus.embed.resolver, controller.shell, nodes.link.host):
        put(module, "Sockets", lambda **settings: SimSockets(world.running, **settings))
        put(module, "load_keys", lambda *_, **settings: SimpleNamespace(name=world.running.key))
    put(bus.runtime.service, "Loop", lambda **settings: SimLoop(world.running))
    put(bus.broker.shell, "threading", SimpleNamespace(Thread=_Proxy))
    drawn = random.Random(world.spec.seed)
    put(bus.runtime.epochs, "secrets", SimpleNamespace(randbelow=drawn.randrange))
    wall = SimpleNamespace(time=world.wall, time_ns=lambda: round(world.wall() * 1e9))
    put(bus.runtime.epochs, "time", wall)
    put(nodes.link.rank, "time", wall)
    try:
        yield
    finally:
        for module, name, value in reversed(changed):
            setattr(module, name, value)
