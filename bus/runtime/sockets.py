"""Sockets, and the only place that sets their options.

Every queue is bounded (HWM), nothing lingers, no frame may exceed `MAXMSGSIZE`, connections are counted
(`bus.runtime.connection_limiter`), dead TCP peers are found by ZMTP heartbeats. A part has one `Sockets` object (one
Context) and closes it in the same `with`; the thread that made a socket owns it. Must not send, receive or decide.
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

# To take a topic back libzmq recurses once a byte, and overran its stack. A CURVE handshake needs 300 bytes.
TOPIC_MAX = 512
DATA_MAX = 4096  # frames to a node's data port: attaches, pulls
HEADER_MAX = 1 << 20  # frames on control sockets that carry no payload
PAYLOAD_MAX = 16 << 20  # prompts
KV_MAX = 256 << 20  # KV blocks
HWM = 10_000
UNREAD = 256  # messages of a connection that a ROUTER reads ahead; the rest wait with their sender
SUBSCRIPTIONS_READ = 100  # ahead of what is taken in: a byte of a topic takes some 40 in the broker
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
    """Makes, binds, connects and closes the sockets of one part."""

    def __init__(self, *, keys: Keys | None = None, io_threads: int = 1, max_sockets: int = 4096) -> None:
        """With `keys`, every connection is CURVE-encrypted and every port takes listed keys alone."""
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
        """Close and unlink what is open. In a forked child all of it is the parent's, and left alone."""
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

    @property
    def refused(self) -> dict[str, int]:
        """How many peers were turned away at the handshake, by domain."""
        return dict(self.gatekeeper.refused) if self.gatekeeper is not None else {}

    def look(self) -> None:
        """Let go of ports whose key is no longer listed, and meet those that have another: each LOOK_S of
        `bus.runtime.peer_keys`, by the thread that owns the connecting sockets."""
        if self._peer_keys is not None:
            self._peer_keys.look()

    def check(self, endpoint: str) -> None:
        """ConfigError where another user could pass for whom we look for at `endpoint`; with keys a port proves whose
        it is."""
        if self._keys is None and endpoint.startswith("ipc://"):
            check_dir(Path(split_owner(endpoint)[0].removeprefix("ipc://")).parent)

    def close_socket(self, socket: Socket, *, linger_ms: int = 0) -> None:
        self._forget(socket)
        socket.close(linger=linger_ms)

    def release(self, socket: Socket) -> Socket:
        """Hand `socket` to another thread, which closes it when it meets ContextTerminated; `close` waits for that."""
        self._forget(socket)
        return socket

    def _forget(self, socket: Socket) -> None:
        self._open.remove(socket)
        if self._peer_keys is not None:
            self._peer_keys.closed(socket)

    # --- kinds ------------------------------------------------------------------------------------------------

    def pub(self, connect: str) -> Socket:
        return self._connect(self._new(zmq.PUB, HEADER_MAX), connect)

    def sub(self, connect: str, topics: tuple[bytes, ...]) -> Socket:
        socket = self._new(zmq.SUB, HEADER_MAX)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return self._connect(socket, connect)

    def bus_in(self, topics: tuple[bytes, ...], *bind: str) -> Socket:
        """Where publishers connect. What is under none of `topics` stays with them."""
        socket = self._new(zmq.SUB, HEADER_MAX)
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return self._bind_all(socket, bind, "publish")

    def bus_out(self, *bind: str) -> Socket:
        """Where subscribers connect: all they may send is subscriptions, which go no further."""
        socket = self._new(zmq.PUB, TOPIC_MAX)
        socket.setsockopt(zmq.RCVHWM, SUBSCRIPTIONS_READ)
        return self._bind_all(socket, bind, "subscribe", listeners=True)

    def dealer(self, connect: str, *, maximum: int = HEADER_MAX, hwm: int = HWM, role: KeyRole = "brokers") -> Socket:
        """`role` says whose port it is, where there are keys."""
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
        """`ROUTER_MANDATORY`: sending to a peer that is gone raises EHOSTUNREACH, to a full one EAGAIN.

        Of each connection `unread` messages are read ahead: times `maximum`, the memory that it may take. `domain` says
        whose keys may connect where there are keys. Where all messages sent here have one frame
        (`answers_one_frame`), no peer chooses its routing id (`_number_all`).
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
        """A ROUTER of one process: `host` is `ipc:///path` or `tcp://address:port` (used as they are), or `tcp://address`
        (any port).

        A path `.../node-1f` is taken to be used once, so what dead processes left as `.../node-*` is removed. With
        keys, the end of the endpoint says which one this port proves.
        """
        if host.startswith("ipc://"):
            _remove_dead(Path(host.removeprefix("ipc://")))
        named = host.startswith("ipc://") or split_port(host.removeprefix("tcp://"))[1]
        bind = host if named else f"{host}:*"
        socket = self.router(bind, maximum=maximum, hwm=hwm, domain="data", answers_one_frame=answers_one_frame)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, f"{endpoint}{MARK}{self._keys.public.decode()}" if self._keys is not None else endpoint

    def connections(self, socket: Socket) -> Callable[[], bool]:
        """For a socket that connects: asks whether a connection was made since the last call; the first one counts."""
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
                    risk="whoever reaches this port can use it, unencrypted; give --keys DIR (pdbus keys new DIR)",
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
    """A ROUTER numbers its peers from libc's `rand()` on, which libzmq (4.3.5) does not seed, and aborts when it comes
    to a number that a peer has chosen for itself: so nobody shall know where it begins."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


def _number_all(socket: Socket) -> None:
    """Have a bound ROUTER number every peer, whatever id the peer claims.

    ROUTER_RAW makes it do so, and send each frame as a message of its own; connections still speak ZMTP, because each
    endpoint keeps the options the socket had when it was bound. Set back, so that an empty frame hangs up on nobody.
    """
    socket.setsockopt(zmq.ROUTER_RAW, 1)
    socket.setsockopt(zmq.ROUTER_RAW, 0)


def _watch_peers(socket: Socket, endpoint: str, *, binds: bool) -> None:
    """Over tcp a dead peer's silence looks like any other; on one machine the kernel closes what a process leaves.

    Who connects pings, and says with each ping how long its silence may last. Who binds only answers, and the kernel
    looks after peers that do not ping: libzmq (4.3.5) aborts when it is to ping a peer that left with its queue full.
    It forgets how long a peer's silence may last when another message comes before the next ping, so the kernel looks
    after all that do not take what is sent.
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
    """ZeroMQ would silently steal an ipc path from a live process: look whether somebody answers there first."""
    if path.exists() and not _is_dead(path):
        raise StartError(f"{endpoint} is taken: stop what runs there or choose another address")


def _remove_dead(fresh: Path) -> None:
    """Remove the sockets beside `fresh` that are named like it and have lost their process."""
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
    """Whether no process listens at `path` any more. One whose queue of connections is full lives."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            pass
    return False
