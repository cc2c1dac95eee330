"""ZeroMQ in virtual time: what libzmq does to the messages of DEALER, ROUTER, PUB and SUB sockets, by rules that
`test_network.py` compares with real sockets.

Each connection is first in, first out, each way; nothing is ordered between two. Who connects keeps what it could not
send yet over a reconnect; who is connected to loses it, and meets EHOSTUNREACH at its next send. What had arrived
before a connection ended is read all the same. Owns time on the wire and connections; what a process does with what
it reads is its shell's, which runs as it is.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

Frames = list[bytes]
KERNEL = 64  # messages of a connection that its kernel buffers hold, besides the queues at either end
RECONNECT_S, RECONNECT_MAX_S = 0.02, 0.5  # `RECONNECT_IVL`, `RECONNECT_IVL_MAX` of `bus.runtime.sockets`
SILENCE_S = 3.0  # `HEARTBEAT_TIMEOUT_MS`: over tcp both ends give up a peer that is not heard for so long


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds on the way of a message, at least and at most: within a process, on one host, between hosts."""

    inside: tuple[float, float] = (5e-6, 2e-5)
    host: tuple[float, float] = (2e-5, 1e-4)
    link: tuple[float, float] = (1e-4, 1e-3)


class Pipe:
    """One end of a connection: what its socket has still to send, and what came and was not read yet."""

    __slots__ = (
        "arrives_at",
        "away_until",
        "flight",
        "id",
        "inbox",
        "key",
        "outbox",
        "peer",
        "retry_s",
        "socket",
        "stalled_until",
        "topics",
    )

    def __init__(self, socket: SimSocket, id: bytes = b"") -> None:
        self.socket = socket
        self.id = id  # what a ROUTER calls the peer
        self.peer: Pipe | None = None  # the other end; None: not connected
        self.outbox: deque[Frames] = deque()
        self.flight: deque[tuple[float, Frames]] = deque()  # on its way to the peer, and when it is there
        self.inbox: deque[Frames] = deque()
        self.arrives_at = 0.0  # of the last one in flight
        self.topics: tuple[bytes, ...] = ()  # of a PUB: what the peer wants
        self.retry_s = RECONNECT_S
        self.stalled_until = 0.0
        self.key = ""  # that the peer has proved, where there are keys
        self.away_until = 0.0  # it can't be made before


class SimSocket:
    """What shells use of a `zmq.Socket`; without blocking, as they do."""

    def __init__(self, network: Network, process: Any, kind: int, hwm: int, unread: int) -> None:
        self.network = network
        self.process = process
        self.type = kind
        self.hwm = hwm
        self.unread = unread
        self.endpoint = ""  # where it is bound or connects
        self.bound = False
        self.closed = False
        self.topics: tuple[bytes, ...] = ()  # of a SUB
        self.pipes: dict[Pipe, None] = {}
        self.routes: dict[bytes, Pipe] = {}
        self.ready: deque[Pipe] = deque()  # with something to read, each once; they take turns
        self.handshakes = 0
        self.key = ""  # of whom the message came that was read last
        self.proxy: Callable[[Frames], None] | None = None  # takes what comes at once, as `zmq.proxy` does

    # --- as zmq.Socket ------------------------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> None:
        self.put([data])

    def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True) -> None:
        self.put(list(frames))

    # --- as bus.runtime.frames ----------------------------------------------------------------------------------

    def put(self, frames: list[Any]) -> None:
        """EAGAIN where the queue is full, EHOSTUNREACH where a ROUTER has no such peer."""
        assert not self.closed, "a closed socket was sent to"
        message = [_bytes(frame) for frame in frames]
        if self.type == zmq.ROUTER:
            pipe = self.routes.get(message.pop(0))
            if pipe is None:
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            self._queue(pipe, message)
        elif self.type == zmq.PUB:
            for pipe in self.pipes:
                if len(pipe.outbox) < self.hwm and any(map(message[0].startswith, pipe.topics)):
                    pipe.outbox.append(message)
                    self.network.push(pipe)
        else:
            self._queue(next(iter(self.pipes)), message)

    def get(self) -> Frames:
        """EAGAIN where nothing is there."""
        if not self.ready:
            raise zmq.Again()
        pipe = self.ready.popleft()
        frames = pipe.inbox.popleft()
        self.key = pipe.key
        if pipe.inbox:
            self.ready.append(pipe)
        if pipe.peer is not None and pipe.peer.outbox:
            self.network.push(pipe.peer)
        return [pipe.id, *frames] if self.type == zmq.ROUTER else list(frames)

    def _queue(self, pipe: Pipe, message: Frames) -> None:
        if len(pipe.outbox) >= self.hwm:
            raise zmq.Again()
        pipe.outbox.append(message)
        self.network.push(pipe)


class Network:
    """All hosts' sockets. `at(time, function)` and `clock()` are the world's; `rng` draws every delay."""

    def __init__(
        self, clock: Callable[[], float], at: Callable[[float, Callable[[], None]], None], rng: random.Random
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.speed = Speed()
        self.cut: dict[tuple[str, str], float] = {}  # (from, to) process: until when nothing passes
        self.slow: dict[str, tuple[float, float]] = {}  # process: seconds added to what it sends, and until when
        self.banned: set[str] = set()  # processes whose key is on no list
        self.kernel = KERNEL
        self.lost = 0  # messages that were on their way when their connection ended
        self.passes: Callable[[Pipe, Frames], Frames | None] | None = None  # what becomes of one that arrives
        self.on_message: Callable[[Pipe, Frames], None] | None = None  # who watches hears of each that arrives
        self._at = at
        self._listeners: dict[str, SimSocket] = {}
        self._names = 0

    # --- for sockets --------------------------------------------------------------------------------------------

    def bind(self, socket: SimSocket, endpoint: str) -> None:
        """One socket may be bound at several. EADDRINUSE where another is."""
        if endpoint in self._listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        socket.endpoint, socket.bound = endpoint, True
        self._listeners[endpoint] = socket

    def connect(self, socket: SimSocket, endpoint: str) -> None:
        socket.endpoint = endpoint
        pipe = Pipe(socket)
        socket.pipes[pipe] = None
        self._at(self.clock(), lambda: self._try(pipe))

    def close(self, socket: SimSocket, linger_s: float) -> None:
        """What is on its way still arrives; what has to be sent yet does so within `linger_s`, if there is a peer."""
        if socket.closed:
            return
        socket.closed = True
        for endpoint in [each for each, listener in self._listeners.items() if listener is socket]:
            del self._listeners[endpoint]
        for pipe in list(socket.pipes):
            if not pipe.outbox or not linger_s:
                self._end(pipe, graceful=True)
            else:
                self._at(self.clock() + linger_s, partial(self._end, pipe, graceful=True))

    def push(self, pipe: Pipe) -> None:
        """Send what has to be sent, as far as the other end has room."""
        peer = pipe.peer
        if peer is None:
            return
        room = peer.socket.unread + self.kernel - len(peer.inbox) - len(pipe.flight)
        now = self.clock()
        while pipe.outbox and room > 0:
            room -= 1
            arrives = max(pipe.arrives_at, now + self._delay_s(pipe.socket, peer.socket))
            if not pipe.flight:
                self._at(arrives, lambda: self._arrive(pipe, peer))
            pipe.arrives_at = arrives
            pipe.flight.append((arrives, pipe.outbox.popleft()))

    def vanish(self, sockets: Sequence[SimSocket]) -> None:
        """Their process is gone: the kernel ends their connections, behind what they had sent."""
        for socket in sockets:
            socket.closed = True
            for endpoint in [each for each, listener in self._listeners.items() if listener is socket]:
                del self._listeners[endpoint]
            for pipe in list(socket.pipes):
                self._end(pipe, graceful=self.rng.random() < 0.7)  # a RST where something was not read

    def stall(self, pipe: Pipe, until: float) -> None:
        """What either end sends from now on, or has sent, does not arrive before `until`."""
        for end in filter(None, (pipe, pipe.peer)):
            end.stalled_until = until

    def reset(self, pipe: Pipe) -> None:
        """Both ends lose the connection now, and what is on its way."""
        self._end(pipe, graceful=False)

    def sever(self, pipe: Pipe, until: float) -> None:
        """Reset the connection of a connecting end; it can't be made again before `until`."""
        pipe.away_until = max(pipe.away_until, until)
        self.reset(pipe)

    def connections(self, process: Any | None = None) -> list[Pipe]:
        """Those that are up, by their connecting end, in the order in which they were made; of a process alone."""
        return [
            pipe
            for socket in self.sockets()
            if not socket.bound
            for pipe in socket.pipes
            if pipe.peer is not None and process in (None, socket.process, pipe.peer.socket.process)
        ]

    sockets: Callable[[], list[SimSocket]]  # all that are open: the world's

    # --- inside -------------------------------------------------------------------------------------------------

    def _delay_s(self, a: SimSocket, b: SimSocket) -> float:
        speed = self.speed
        if a.process is b.process:
            low, high = speed.inside
        elif a.process.host == b.process.host:
            low, high = speed.host
        else:
            low, high = speed.link
        delay = low + (high - low) * self.rng.random()
        if self.slow:
            for name in (a.process.name, b.process.name):
                more, until = self.slow.get(name, (0.0, 0.0))
                if until > self.clock():
                    delay += more * self.rng.random()
        return delay

    def _blocked_until(self, a: SimSocket, b: SimSocket) -> float:
        return max(self.cut.get((a.process.name, b.process.name), 0.0), a.process.paused_until)

    def _try(self, pipe: Pipe) -> None:
        """One attempt to connect; the next one follows by itself."""
        socket, now = pipe.socket, self.clock()
        if socket.closed or pipe.peer is not None or pipe not in socket.pipes:
            return
        if socket.process.paused_until > now:
            self._at(socket.process.paused_until, lambda: self._try(pipe))
            return
        listener = self._listeners.get(socket.endpoint)
        away = pipe.away_until > now
        reachable = (
            listener is not None
            and not away
            and not any(self._blocked_until(a, b) > now for a, b in ((socket, listener), (listener, socket)))
        )
        if reachable and socket.process.name in self.banned:
            return  # a peer that is refused is not tried again by its socket
        if reachable and listener is not None and listener.process.name in self.banned:
            reachable = False  # its key is looked for in the list again, each second
        if listener is None or not reachable:
            self._at(now + pipe.retry_s * (0.5 + self.rng.random() / 2), lambda: self._try(pipe))
            pipe.retry_s = min(2 * pipe.retry_s, RECONNECT_MAX_S)
            return
        pipe.retry_s = RECONNECT_S
        trip_s = self._delay_s(socket, listener) + self._delay_s(listener, socket)
        self._at(now + trip_s, lambda: self._meet(pipe, listener))

    def _meet(self, pipe: Pipe, listener: SimSocket) -> None:
        """The handshake is over."""
        socket = pipe.socket
        if socket.closed or pipe.peer is not None or pipe not in socket.pipes:
            return
        if listener.closed:
            self._try(pipe)
            return
        self._names += 1
        other = Pipe(listener, b"\0" + self._names.to_bytes(4, "big"))
        pipe.peer, other.peer = other, pipe
        pipe.key, other.key = listener.process.key, socket.process.key
        pipe.arrives_at = other.arrives_at = self.clock()
        listener.pipes[other] = None
        if listener.type == zmq.ROUTER:
            listener.routes[other.id] = other
        socket.handshakes += 1
        for subscriber, publisher in ((pipe, other), (other, pipe)):
            if publisher.socket.type == zmq.PUB:
                arrives = self.clock() + self._delay_s(subscriber.socket, publisher.socket)
                publisher.arrives_at = max(publisher.arrives_at, arrives)
                self._at(arrives, partial(self._subscribe, publisher, subscriber))
        self.push(pipe)
        socket.process.woken()

    def _subscribe(self, publisher: Pipe, subscriber: Pipe) -> None:
        if publisher.peer is subscriber:
            publisher.topics = subscriber.socket.topics

    def _arrive(self, pipe: Pipe, peer: Pipe) -> None:
        if pipe.peer is not peer or not pipe.flight:
            return
        now = self.clock()
        if self.cut or pipe.stalled_until > now or pipe.socket.process.paused_until > now:
            until = max(pipe.stalled_until, self._blocked_until(pipe.socket, peer.socket))
            if until > now:  # what is sent waits in the kernel of who sends it
                delayed = until + self._delay_s(pipe.socket, peer.socket)
                first = pipe.flight[0][0]
                pipe.flight = deque((arrives - first + delayed, frames) for arrives, frames in pipe.flight)
                pipe.arrives_at = pipe.flight[-1][0]
                self._at(delayed, lambda: self._arrive(pipe, peer))
                return
        receiver = peer.socket
        while pipe.flight and pipe.flight[0][0] <= now:
            frames = pipe.flight.popleft()[1]
            if self.passes is not None:
                passed = self.passes(pipe, frames)
                if passed is None:
                    continue
                frames = passed
            if self.on_message is not None:
                self.on_message(pipe, frames)
            if receiver.closed:
                continue
            if receiver.proxy is not None:
                receiver.proxy(frames)
                continue
            if receiver.type == zmq.SUB and not any(map(frames[0].startswith, receiver.topics)):
                continue
            if not peer.inbox:
                receiver.ready.append(peer)
            peer.inbox.append(frames)
        if receiver.ready and not receiver.closed:
            receiver.process.readable(receiver)
        if pipe.flight:
            self._at(pipe.flight[0][0], lambda: self._arrive(pipe, peer))
        if pipe.outbox:
            self.push(pipe)

    def _end(self, pipe: Pipe, *, graceful: bool) -> None:
        """The connection is over. `graceful`: what `pipe`'s side had sent arrives first."""
        peer, socket = pipe.peer, pipe.socket
        if socket.closed:
            socket.pipes.pop(pipe, None)
            socket.routes.pop(pipe.id, None)
        if peer is None:
            return
        if graceful:
            if socket.closed:  # nothing comes back to it any more
                self.lost += len(peer.flight)
                peer.flight.clear()
                peer.outbox.clear() if peer.socket.bound else None
            self._at(pipe.arrives_at if pipe.flight else self.clock(), lambda: self._end_later(pipe, peer))
            return
        self.lost += len(pipe.flight) + len(peer.flight)
        pipe.flight.clear()
        peer.flight.clear()
        pipe.peer = peer.peer = None
        for end in (pipe, peer):
            self._ended(end)

    def _end_later(self, pipe: Pipe, peer: Pipe) -> None:
        if pipe.peer is not peer:
            return
        if pipe.flight:  # delayed meanwhile
            self._at(pipe.arrives_at, lambda: self._end_later(pipe, peer))
        else:
            self._end(pipe, graceful=False)

    def _ended(self, pipe: Pipe) -> None:
        socket = pipe.socket
        if socket.closed:
            socket.pipes.pop(pipe, None)
            return
        if socket.bound:
            del socket.pipes[pipe]
            socket.routes.pop(pipe.id, None)
            pipe.outbox.clear()
        else:  # it connects again, and keeps what it has to send
            self._at(self.clock() + RECONNECT_S * self.rng.random(), lambda: self._try(pipe))


def _bytes(frame: Any) -> bytes:
    if isinstance(frame, bytes):
        return bytes(frame)
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)
