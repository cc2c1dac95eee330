"""The sockets of a part. Only this module sets socket options.

Every queue is bounded (HWM), nothing lingers, no frame may exceed `MAXMSGSIZE`, connections are counted
(`bus.runtime.connection_limiter`), and ZMTP heartbeats find dead TCP peers. A part has one `Sockets` object (one
Context), which one `with` opens and closes; the thread that made a socket owns it. This module must not send, receive
or decide.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket as unix
import stat
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType

import zmq

from bus.endpoints import KEY_CHARS, MARK, check_dir, is_exposed, private_dir, split_owner, split_port
from bus.errors import ConfigError, StartError
from bus.rights import Domain, KeyRole
from bus.runtime.connection_limiter import ConnectionLimiter
from bus.runtime.keys import Keys
from bus.runtime.logs import get_logger
from bus.runtime.peer_keys import PeerKeys
from bus.runtime.security import Gatekeeper

# To end a subscription, libzmq recurses once for each byte of the topic; long topics overflowed its stack. A CURVE
# handshake needs 300 bytes.
TOPIC_MAX = 512
DATA_MAX = 4096  # frames to a node's data port: attaches, pulls
HEADER_MAX = 1 << 20  # frames on control sockets that carry no payload
PAYLOAD_MAX = 16 << 20  # prompts
KV_MAX = 256 << 20  # KV blocks
HWM = 10_000
UNREAD = 256  # messages of a connection that a ROUTER reads ahead; the rest wait with their sender
SUBSCRIPTIONS_READ = 100  # before earlier ones are handled: a byte of a topic needs about 40 bytes in the broker
HANDSHAKE_MS = 5_000
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 3_000
CONNECT_MS = 2_000  # for an answer from a host; the kernel tries ever less often, a minute apart in the end
UNACKNOWLEDGED_MS = 4_000  # as long as KEEPALIVE takes, which looks after connections over which nothing is sent
KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 1), (zmq.TCP_KEEPALIVE_INTVL, 1), (zmq.TCP_KEEPALIVE_CNT, 3),
)  # fmt: skip
YOUNG_S = 5.0  # a socket file as young as this may not listen yet

log = get_logger("bus")
Socket = zmq.Socket[bytes]


class Sockets:
    """The ZeroMQ sockets of one part: it makes, binds, connects and closes them, all in one Context. `with` closes
    it."""

    def __init__(self, *, keys: Keys | None = None, io_threads: int = 1, max_sockets: int = 4096) -> None:
        """Make the Context. With `keys`, every connection is CURVE-encrypted and every port accepts listed keys
        only."""
        self.context: zmq.Context[Socket] = zmq.Context(io_threads=io_threads)
        self.context.set(zmq.MAX_SOCKETS, max_sockets)
        self._pid = os.getpid()
        self._open: list[Socket] = []
        self._bound: list[tuple[Path, int]] = []  # ipc sockets of ours: path and inode
        self._keys = keys
        self._peer_keys = PeerKeys(keys.directory) if keys is not None else None
        self.keyed = keys is not None
        self.gatekeeper: Gatekeeper | None = None  # both once something is bound
        self.limiter: ConnectionLimiter | None = None

    def __enter__(self) -> Sockets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove our ipc files, close all sockets and end the Context. It blocks until released sockets are closed, and
        does nothing in a forked child, where everything is the parent's."""
        if os.getpid() != self._pid:
            return
        for path, inode in self._bound:  # ZeroMQ leaves them behind
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
        self._bound.clear()
        for socket in self._open:
            socket.close(linger=0)
        self._open.clear()
        if self.limiter is not None:
            self.limiter.close()
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        self.context.term()

    def on_key_revoked(self, function: Callable[[str, str], None]) -> None:
        """Have `function(key, domain)` called, on another thread, when a connected peer's key is no longer listed."""
        if self.gatekeeper is not None:
            self.gatekeeper.on_key_revoked = function

    @property
    def refused(self) -> dict[str, int]:
        """The number of refused handshakes (an unlisted or revoked key, a wrong role, too many connections, no CURVE)
        by domain. Empty without keys."""
        return dict(self.gatekeeper.refused) if self.gatekeeper is not None else {}

    def look(self) -> None:
        """Disconnect from ports whose key is not in the list at this call and was not at the last one, and reconnect
        where the list has a new key. Call it every LOOK_S (`bus.runtime.peer_keys`) on the thread that owns the
        connecting sockets. Without keys it does nothing."""
        if self._peer_keys is not None:
            self._peer_keys.look()

    def check(self, endpoint: str) -> None:
        """Raise ConfigError where another user could take the place of the peer at `endpoint`: an ipc socket in a
        directory where others may write. With keys a port proves its identity, and nothing is checked."""
        if self._keys is None and endpoint.startswith("ipc://"):
            check_dir(Path(split_owner(endpoint)[0].removeprefix("ipc://")).parent)

    def close_socket(self, socket: Socket, *, linger_ms: int = 0) -> None:
        """Close one socket; for up to `linger_ms` it still sends what is queued."""
        self._forget(socket)
        socket.close(linger=linger_ms)

    def release(self, socket: Socket) -> Socket:
        """Give `socket` to another thread, which must close it when a call on it raises ContextTerminated: `close`
        waits for that. Return `socket`."""
        self._forget(socket)
        return socket

    def _forget(self, socket: Socket) -> None:
        self._open.remove(socket)
        if self._peer_keys is not None:
            self._peer_keys.closed(socket)

    # --- kinds ------------------------------------------------------------------------------------------------

    def pub(self, connect: str) -> Socket:
        """Return a PUB connected to the broker's endpoint. Like every method that connects, it raises StartError for a
        wrong address, and ConfigError as `check` does."""
        return self._connect(self._new(zmq.PUB, HEADER_MAX), connect)

    def sub(self, connect: str, topics: tuple[bytes, ...]) -> Socket:
        """Return a SUB connected to the broker's endpoint, subscribed to `topics`."""
        socket = self._new(zmq.SUB, HEADER_MAX)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return self._connect(socket, connect)

    def bus_in(self, topics: tuple[bytes, ...], *bind: str) -> Socket:
        """Return a bound SUB, to which publishers connect: the broker's, or a node's for its engine's events. Only
        messages under one of `topics` come here. StartError where an endpoint is taken."""
        socket = self._new(zmq.SUB, HEADER_MAX)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return self._bind_all(socket, bind, "publish")

    def bus_out(self, *bind: str) -> Socket:
        """Return the broker's bound PUB, to which subscribers connect: they can send only subscriptions, and these
        are not passed on to publishers. StartError where an endpoint is taken."""
        socket = self._new(zmq.PUB, TOPIC_MAX)
        socket.setsockopt(zmq.RCVHWM, SUBSCRIPTIONS_READ)
        return self._bind_all(socket, bind, "subscribe", listeners=True)

    def dealer(self, connect: str, *, maximum: int = HEADER_MAX, hwm: int = HWM, role: KeyRole = "brokers") -> Socket:
        """Return a connecting DEALER. A frame has at most `maximum` bytes, a queue at most `hwm` messages. With keys,
        the port's key must be one of `role`. Raises StartError for a wrong address, and ConfigError as `check` does."""
        return self._connect(self._new(zmq.DEALER, maximum, hwm), connect, role)

    def router(
        self,
        *bind: str,
        maximum: int = HEADER_MAX,
        hwm: int = HWM,
        unread: int = UNREAD,
        domain: Domain = "data",
        answers_one_frame: bool = False,
    ) -> Socket:
        """Return a bound ROUTER. A send raises EHOSTUNREACH if the peer has gone, EAGAIN if its queue is full. Raises
        StartError where an endpoint is taken.

        A connection may use `unread` x `maximum` bytes of memory. `domain` gives the keys that may connect, where there
        are keys. Set `answers_one_frame` if every message that this socket sends has one frame; peers then cannot
        choose their routing ids (`_number_all`).
        """
        _seed_routing_ids()
        socket = self._new(zmq.ROUTER, maximum, hwm)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, min(hwm, unread))
        self._bind_all(socket, bind, domain)
        if answers_one_frame:
            _number_all(socket)
        return socket

    def ephemeral_router(
        self, host: str, *, maximum: int = DATA_MAX, hwm: int = HWM, answers_one_frame: bool = False
    ) -> tuple[Socket, str]:
        """Return a node's bound ROUTER for its data, and its endpoint as peers must connect to it. `host` is
        `ipc:///path` or `tcp://address:port` (used as they are), or `tcp://address` (any port).

        Each process binds a new path `.../node-<number>`; files of dead processes are removed. With keys, the
        endpoint ends with the name of the key that this port proves.
        """
        if host.startswith("ipc://"):
            _remove_dead(Path(host.removeprefix("ipc://")))
        named = host.startswith("ipc://") or split_port(host.removeprefix("tcp://"))[1]
        bind = host if named else f"{host}:*"
        socket = self.router(bind, maximum=maximum, hwm=hwm, domain="data", answers_one_frame=answers_one_frame)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, f"{endpoint}{MARK}{self._keys.public.decode()}" if self._keys is not None else endpoint

    def connections(self, socket: Socket) -> Callable[[], bool]:
        """Return a function for a connecting socket: it returns true if a handshake has succeeded since its last call;
        the first connection counts too."""
        monitor: Socket = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        monitor.setsockopt(zmq.LINGER, 0)
        self._open.append(monitor)

        def made() -> bool:
            any_made = False
            while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                monitor.recv_multipart(zmq.NOBLOCK)
                any_made = True
            return any_made

        return made

    # --- options ----------------------------------------------------------------------------------------------

    def _new(self, kind: int, maximum: int, hwm: int = HWM) -> Socket:
        socket = self.context.socket(kind)
        self._open.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, maximum)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def _connect(self, socket: Socket, endpoint: str, role: KeyRole = "brokers") -> Socket:
        at, owner = split_owner(endpoint)
        if role == "nodes" and self.keyed and len(owner) != KEY_CHARS:
            raise StartError(f"{endpoint} does not say which key its port has")
        try:
            self.check(at)
        except ConfigError as error:
            if role != "nodes":
                raise
            raise StartError(str(error)) from None  # a peer named this endpoint, not the user
        _watch_peers(socket, at, binds=False)
        try:
            if self._keys is not None and self._peer_keys is not None and not at.startswith("inproc:"):
                of_port = owner.encode() if role == "nodes" else self._keys.of_port(role, owner)
                self._peer_keys.connected(socket, at, role, "" if role == "nodes" else owner, of_port)
                socket.setsockopt(zmq.CURVE_SERVERKEY, of_port)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.connect(at)
        except zmq.ZMQError as error:
            raise StartError(f"cannot connect to {endpoint}: {error.strerror}") from None
        return socket

    def _bind_all(
        self, socket: Socket, endpoints: tuple[str, ...], domain: Domain, *, listeners: bool = False
    ) -> Socket:
        if self.limiter is None:
            self._limit_connections()
        assert self.limiter is not None
        self.limiter.watch(socket, domain, listeners=listeners)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
            if self.gatekeeper is not None:
                self.gatekeeper.guards(domain)
        for endpoint in (split_owner(endpoint)[0] for endpoint in endpoints):
            _watch_peers(socket, endpoint, binds=True)
            if endpoint.startswith("ipc://"):
                path = Path(endpoint.removeprefix("ipc://"))
                private_dir(path.parent)
                _refuse_taken(endpoint, path)
            if is_exposed(endpoint) and not self.keyed:
                log.warning(
                    "endpoint.exposed",
                    endpoint=endpoint,
                    risk="anyone who reaches this port can use it, unencrypted; give --keys DIR (pdbus keys new DIR)",
                )
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    raise StartError(f"{endpoint} is taken: stop what runs there or choose another address") from None
                raise StartError(f"cannot bind {endpoint}: {error.strerror}") from None
            if endpoint.startswith("ipc://"):
                self._bound.append((path, path.stat().st_ino))
        return socket

    def _limit_connections(self) -> None:
        if self._keys is None:
            self.limiter = ConnectionLimiter(self.context)
            return
        self.gatekeeper = Gatekeeper(self.context, self._keys)
        self.limiter = ConnectionLimiter(self.context, self.gatekeeper.no_handshake)
        self.gatekeeper.on_revoked = self.limiter.hang_up_on


@cache
def _seed_routing_ids() -> None:
    """Seed libc's `rand()`, from which a ROUTER numbers its peers. libzmq (4.3.5) does not seed it, and aborts when
    it comes to a number that a peer has chosen for itself. So no peer may know where the numbers begin."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


def _number_all(socket: Socket) -> None:
    """Make a bound ROUTER number every peer, whatever id the peer claims.

    ROUTER_RAW does so, and sends each frame as a message of its own; connections still speak ZMTP, because each
    endpoint keeps the options that the socket had when it was bound. The option is set back afterwards, so that an
    empty frame closes no connection.
    """
    socket.setsockopt(zmq.ROUTER_RAW, 1)
    socket.setsockopt(zmq.ROUTER_RAW, 0)


def _watch_peers(socket: Socket, endpoint: str, *, binds: bool) -> None:
    """Set heartbeats. Over tcp a dead peer looks like a silent one; on one machine the kernel closes what a process
    leaves.

    The connecting side pings, and states with each ping how long its silence may last. The bound side only answers,
    and the kernel watches peers that do not ping: libzmq (4.3.5) aborts when it must ping a peer that left with its
    queue full. It forgets the stated silence when another message comes before the next ping, so the kernel also
    watches all peers that do not read.
    """
    if not endpoint.startswith("tcp://"):
        return
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if binds:
        for option, value in KEEPALIVE:
            socket.setsockopt(option, value)
        if socket.type != zmq.PUB:  # a subscriber may be slower: `bus.runtime.connection_limiter`
            socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    else:
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


def _refuse_taken(endpoint: str, path: Path) -> None:
    """StartError if a live process answers at this ipc path: ZeroMQ would take the path from it without an error."""
    if path.exists() and not _is_dead(path):
        raise StartError(f"{endpoint} is taken: stop what runs there or choose another address")


def _remove_dead(fresh: Path) -> None:
    """Remove the sockets beside `fresh` with similar names whose process is dead."""
    kind, dash, _ = fresh.name.rpartition("-")
    if not dash or not fresh.parent.is_dir():
        return
    for path in fresh.parent.glob(f"{kind}-*"):
        try:
            info = path.lstat()
            if stat.S_ISSOCK(info.st_mode) and time.time() - info.st_mtime > YOUNG_S and _is_dead(path):
                path.unlink()
        except OSError:
            continue  # another node removes them too, or it is not ours


def _is_dead(path: Path) -> bool:
    """Return true if no process listens at `path` any more. A process whose queue of connections is full lives."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            pass
    return False
