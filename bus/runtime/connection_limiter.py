"""The connections to a part's bound sockets: it counts them, bounds them and cuts off peers that take too much.

ZeroMQ accepts every connection while the process has descriptors. So a thread here reads the monitor of each bound
socket, which reports connections that open and close. This module owns that thread and the counts. Keys are judged in
`bus.runtime.security`, messages elsewhere. A connection is cut off by shutting down its descriptor, which ZeroMQ sees
as a peer that left. Before that the descriptor is checked again, because it may belong to another connection by now.
"""

from __future__ import annotations

import fcntl
import itertools
import select
import socket as unix
import struct
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from bus.runtime.file_limit import file_limit
from bus.runtime.logs import get_logger

EACH_MAX = 8192  # twice as many ranks as there may be
TALK_MAX = 1 << 16  # bytes a listener may send: some 2,000 subscriptions
TALK_PER_S = 256  # heartbeats, encrypted
LOOK_S = 1.0  # between looks at what listeners leave unread
UNREAD_S = 10.0  # a listener that reads nothing for this long, although messages wait, is taken for gone
CUTS_LOGGED = 1000
_STOP, _WATCH = b"stop", b"watch"
_NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CAME, _LEFT = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_EVENTS = _CAME | _LEFT
_EVENT = struct.Struct("=Hi")  # an event and its descriptor
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # where struct tcp_info has tcpi_bytes_acked and tcpi_bytes_received
_SO_PEEK_OFF, _PEEK_FROM = 42, (1 << 31) - 1  # socket(7); far beyond what a connection sends in its life

log = get_logger("bus")


@dataclass(slots=True)
class _Peer:
    source: str  # the process (ipc) or the host (tcp) it belongs to
    began: float
    sent_bytes: int = 0
    took_bytes: int = 0  # a listener, when it was looked at last
    took_at: float = 0.0  # when that was another number, or nothing was left for it to take


@dataclass(slots=True, eq=False)
class _Bound:
    """A bound socket. Peers of a socket with `listeners` send little (their subscriptions) and read much."""

    domain: str
    listeners: bool
    peers: dict[int, _Peer] = field(default_factory=dict)  # by descriptor, the newest last
    by_source: Counter[str] = field(default_factory=Counter)


class ConnectionLimiter:
    """The limiter of one Context; `Sockets` makes it with the first socket that is bound. It calls `on_refused(domain,
    endpoint)`, on its thread, for each peer that broke off the handshake. `cut` counts connections cut off, by reason.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], on_refused: Callable[[str, str], None] | None = None
    ) -> None:
        limit = file_limit()
        self.most_each, self._most = min(EACH_MAX, limit // 4), limit * 3 // 8
        self.cut: Counter[str] = Counter()  # by reason
        self._on_refused = on_refused
        self._context = context
        self._bound: dict[zmq.Socket[bytes], _Bound] = {}  # by their monitors
        self._coming: deque[tuple[zmq.Socket[bytes], _Bound]] = deque()  # on their way to the thread
        self._leaving: deque[tuple[str, set[str] | None]] = deque()  # to be cut off by the thread
        self._numbers = itertools.count()
        self._orders = context.socket(zmq.PULL)
        self._orders.setsockopt(zmq.LINGER, 0)
        self._orders.bind(f"inproc://connections-{id(self)}")
        self._talk = select.epoll()  # edge-triggered: no work while no peer sends
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def watch(self, socket: zmq.Socket[bytes], domain: str, *, listeners: bool = False) -> None:
        """Watch the connections of `socket` from now on; call this before the socket is bound. `domain` names the kind
        of socket in logs. `listeners`: its peers send subscriptions only and must read what they get, so they are also
        cut off if they send much or read nothing."""
        events = _EVENTS | (_NO_HANDSHAKE if self._on_refused is not None else 0)
        endpoint = f"inproc://bound-{id(self)}-{next(self._numbers)}"
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 1)  # some 1,000 events with ZeroMQ's own end: it accepts so many ahead of us
        monitor.connect(endpoint)
        self._coming.append((monitor, _Bound(domain, listeners)))
        self._wake(_WATCH)

    def hang_up_on(self, domain: str, sources: set[str] | None) -> None:
        """Cut off all connections to `domain` from these sources (hosts, or processes over ipc; None: from all). It
        returns at once: the limiter's thread does it."""
        self._leaving.append((domain, sources))
        self._wake(_WATCH)

    def close(self) -> None:
        """Stop the thread and wait for it, up to 5 s. Connections stay."""
        self._wake(_STOP)
        self._thread.join(5)
        self._talk.close()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _wake(self, what: bytes) -> None:
        with self._context.socket(zmq.PUSH) as caller:
            caller.setsockopt(zmq.LINGER, 1000)
            caller.connect(f"inproc://connections-{id(self)}")
            caller.send(what)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._orders, zmq.POLLIN)
        poller.register(self._talk.fileno(), zmq.POLLIN)
        look_at = 0.0
        while True:
            listened = any(bound.listeners and bound.peers for bound in self._bound.values())
            ready = dict(poller.poll(int(1000 * LOOK_S) if listened else None))
            if self._orders in ready and self._orders.recv() == _STOP:
                break
            while self._coming:
                monitor, bound = self._coming.popleft()
                self._bound[monitor] = bound
                poller.register(monitor, zmq.POLLIN)
            try:
                while self._leaving:
                    self._revoke(*self._leaving.popleft())
                for monitor in self._bound.keys() & ready.keys():
                    self._read(monitor)
                if self._talk.fileno() in ready:
                    self._listen()
                if listened and (now := time.monotonic()) >= look_at:
                    look_at = now + LOOK_S
                    self._look(now)
            except Exception:  # a bug of ours; if the monitors were not read, ZeroMQ would block
                log.exception("connections.failed")
        for monitor in (*self._bound, *(monitor for monitor, _ in self._coming), self._orders):
            monitor.close(linger=0)

    def _read(self, monitor: zmq.Socket[bytes]) -> None:
        bound = self._bound[monitor]
        with suppress(zmq.Again):
            while True:
                event, endpoint = monitor.recv_multipart(zmq.NOBLOCK)
                kind, number = _EVENT.unpack(event)  # under attack these come by the thousand
                if kind == _LEFT:
                    self._left(bound, number)
                elif kind == _CAME:
                    self._came(bound, number, endpoint.decode(errors="replace"))
                elif self._on_refused is not None:
                    self._on_refused(bound.domain, endpoint.decode(errors="replace"))

    def _came(self, bound: _Bound, number: int, endpoint: str) -> None:
        source = _source(number, endpoint)
        if source is None:
            return  # gone already
        self._left(bound, number)
        bound.peers[number] = _Peer(source, time.monotonic())
        bound.by_source[source] += 1
        if len(bound.peers) > self.most_each or sum(len(each.peers) for each in self._bound.values()) > self._most:
            self._cut_newest_of_most(bound, endpoint)
        elif bound.listeners:
            with suppress(OSError):
                _count_reads(number)
                self._talk.register(number, select.EPOLLIN | select.EPOLLET)

    def _left(self, bound: _Bound, number: int) -> None:
        peer = bound.peers.pop(number, None)
        if peer is not None:
            bound.by_source[peer.source] -= 1
            if not bound.by_source[peer.source]:
                del bound.by_source[peer.source]

    def _cut_newest_of_most(self, bound: _Bound, endpoint: str) -> None:
        """Cut off the newest connection of the source that has most: connections of all other sources stay."""
        most = max(bound.by_source, key=lambda source: bound.by_source[source])
        number = next(number for number in reversed(bound.peers) if bound.peers[number].source == most)
        self._cut(bound, number, endpoint, "too_many_connections")

    def _revoke(self, domain: str, sources: set[str] | None) -> None:
        for bound in self._bound.values():
            for number, peer in list(bound.peers.items()) if bound.domain == domain else ():
                if sources is None or peer.source in sources:
                    self._cut(bound, number, peer.source, "key_revoked")

    def _listen(self) -> None:
        """Count the bytes that peers of listening sockets have sent."""
        now = time.monotonic()
        for number, _ in self._talk.poll(0):
            for bound in self._bound.values():
                peer = bound.peers.get(number) if bound.listeners else None
                if peer is not None:
                    peer.sent_bytes = _bytes_received(number, peer.sent_bytes)
                    if peer.sent_bytes > TALK_MAX + TALK_PER_S * (now - peer.began):
                        self._cut(bound, number, peer.source, "too_many_subscriptions")

    def _look(self, now: float) -> None:
        """Cut off peers that read nothing: ZeroMQ would keep up to ten thousand messages of any size for each of
        them."""
        for bound in self._bound.values():
            for number, peer in list(bound.peers.items()) if bound.listeners else ():
                took, left = _taken(number)
                if not left or took != peer.took_bytes:
                    peer.took_bytes, peer.took_at = took, now
                elif now - peer.took_at >= UNREAD_S:
                    self._cut(bound, number, peer.source, "reads_nothing")

    def _cut(self, bound: _Bound, number: int, at: str, why: str) -> None:
        self.cut[why] += 1
        if self.cut[why] <= CUTS_LOGGED:
            log.warning("peer.cut_off", domain=bound.domain, peer=bound.peers[number].source, why=why, endpoint=at)
        source = bound.peers[number].source
        self._left(bound, number)
        hang_up(number, source)


def hang_up(number: int, source: str) -> None:
    """Shut down the connection with the file descriptor `number`, if it still belongs to `source`; else do nothing."""
    with suppress(OSError, ValueError):  # ValueError: -1
        socket = unix.socket(fileno=number)
        try:
            if _origin(socket) == source:
                socket.shutdown(unix.SHUT_RDWR)
        finally:
            socket.detach()


def _origin(socket: unix.socket) -> str:
    """Return the other side of a connection, in the form of a ZeroMQ message's Peer-Address."""
    if socket.family == unix.AF_UNIX:
        pid, uid, gid = struct.unpack("3i", socket.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, 12))
        return f"localhost:{uid}:{gid}:{pid}"
    return str(socket.getpeername()[0])


def _source(number: int, endpoint: str) -> str | None:
    """Return the source of a connection to `endpoint`; None when the descriptor is no such connection (any more)."""
    try:
        socket = unix.socket(fileno=number)
        try:
            at = socket.getsockname()
            here = f"ipc://{at}" if socket.family == unix.AF_UNIX else f":{at[1]}"
            return _origin(socket) if endpoint.endswith(here) else None
        finally:
            socket.detach()
    except OSError:
        return None


def _count_reads(number: int) -> None:
    """Make the kernel count the bytes that are read from this connection, where it is ipc. A unix socket has no such
    count, but each byte that is read moves its peek offset towards the front (socket(7))."""
    socket = unix.socket(fileno=number)
    try:
        if socket.family == unix.AF_UNIX:
            socket.setsockopt(unix.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_FROM)
    finally:
        socket.detach()


def _bytes_received(number: int, so_far: int) -> int:
    """Return the bytes received over this connection; over ipc those since `_count_reads`, read or not."""
    try:
        socket = unix.socket(fileno=number)
        try:
            if socket.family == unix.AF_UNIX:
                read = _PEEK_FROM - socket.getsockopt(unix.SOL_SOCKET, _SO_PEEK_OFF)
                unread = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0" * 4))[0]
                return read + int(unread)
            info = socket.getsockopt(unix.IPPROTO_TCP, unix.TCP_INFO, _BYTES_RECEIVED + 8)
            return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])
        finally:
            socket.detach()
    except (OSError, struct.error):
        return so_far


def _taken(number: int) -> tuple[int, int]:
    """Return the bytes that the peer's kernel has acknowledged, and those that still wait. Over ipc they are not
    counted: 0, 0."""
    try:
        socket = unix.socket(fileno=number)
        try:
            info = socket.getsockopt(unix.IPPROTO_TCP, unix.TCP_INFO, _BYTES_ACKED + 8)
            left = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0]
            return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0]), int(left)
        finally:
            socket.detach()
    except (OSError, struct.error):
        return 0, 0
