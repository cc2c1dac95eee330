"""CURVE keys on disk, and the handler that asks the allowlist who may connect (ZeroMQ RFC 26/CURVEZMQ, 27/ZAP).

A key directory holds, as Z85 text: `server.key` and `server.secret` (every part that binds), `client.key` and
`client.secret` (whoever connects), and `allow/nodes/*.key`, `allow/clients/*.key`: the public keys that may connect.
Ports of the bus and the nodes' port of a controller take the former only; ports for clients take both. Owns keys and
that decision; sockets are configured in `bus.runtime.sockets`.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq
import zmq.utils.z85

from bus.errors import ConfigError
from bus.runtime.allowlist import Allowlist, read_key
from bus.runtime.logs import get_logger

Domain = Literal["nodes", "clients"]
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
REFUSALS_LOGGED = 1000  # a domain; all are counted
_STOP = b"stop"

log = get_logger("bus")


@dataclass(frozen=True)
class Keys:
    """One part's keys; `server_secret` is None for a part that only connects."""

    directory: Path
    server_public: bytes
    server_secret: bytes | None
    client_public: bytes
    client_secret: bytes


def load_keys(directory: Path | str, *, server: bool) -> Keys:
    """The keys in `directory`; ConfigError when one is missing, malformed or readable by others."""
    path = Path(directory)
    return Keys(
        directory=path,
        server_public=read_key(path / "server.key"),
        server_secret=_read_secret(path / "server.secret") if server else None,
        client_public=read_key(path / "client.key"),
        client_secret=_read_secret(path / "client.secret"),
    )


def new_keys(directory: Path) -> None:
    """Make the keys of a cluster in `directory` (0700, secrets 0600); its own client key is allowed as a node."""
    if (directory / "server.secret").exists():
        raise ConfigError(f"{directory} already holds keys; choose an empty directory")
    _make_dir(directory)
    _make_dir(directory / "allow" / "nodes")
    _make_dir(directory / "allow" / "clients")
    _write_pair(directory, "server")
    public = _write_pair(directory, "client")
    _write(directory / "allow" / "nodes" / "cluster.key", public, 0o644)


def new_client_keys(cluster: Path, name: str, directory: Path) -> None:
    """Make keys for one more client or node in `directory` and put it on the cluster's list of clients."""
    server_public = read_key(cluster / "server.key")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{name!r}: the name of a client has letters, digits, '.', '_' and '-'")
    if (directory / "client.secret").exists():
        raise ConfigError(f"{directory} already holds keys; choose an empty directory")
    listed = cluster / "allow" / "clients" / f"{name}.key"
    if listed.exists():
        raise ConfigError(f"{listed} exists: a client of that name is already allowed")
    _make_dir(directory)
    _write(directory / "server.key", server_public, 0o644)
    _write(listed, _write_pair(directory, "client"), 0o644)


class Gatekeeper:
    """The ZAP handler of one Context, on a thread of its own: CURVE keys on the list get in, all else is refused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused: Counter[str] = Counter()
        self._allowlist = Allowlist(keys.directory)
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._orders = context.socket(zmq.PULL)
        self._orders.setsockopt(zmq.LINGER, 0)
        self._orders.bind(f"inproc://gatekeeper-orders-{id(self)}")
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def no_handshake(self, domain: str, endpoint: str) -> None:
        """Count a peer that failed before there was a key to judge: plaintext, another protocol, noise."""
        self._refuse(domain, endpoint, "no CURVE handshake")

    def close(self) -> None:
        with self._context.socket(zmq.PUSH) as caller:
            caller.setsockopt(zmq.LINGER, 1000)
            caller.connect(f"inproc://gatekeeper-orders-{id(self)}")
            caller.send(_STOP)
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._orders, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                self._socket.send_multipart([frames[0], b"", *self.answer(frames[2:])])
            if self._orders in ready and self._orders.recv() == _STOP:
                for socket in (self._socket, self._orders):
                    socket.close(linger=0)
                return

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request (RFC 27): 200 for an allowed CURVE key, 400 for anything else."""
        version, number, domain, address, _, mechanism = (request + [b""] * 6)[:6]
        verdict = (b"400", b"not on the allowlist", b"")
        if mechanism == b"CURVE" and len(request) == 7:
            key = zmq.utils.z85.encode(request[6])
            if self._allowlist.allows(key, domain.decode(errors="replace")):
                verdict = (b"200", b"OK", key)
        if verdict[0] != b"200":
            self._refuse(domain.decode(errors="replace"), address.decode(errors="replace"), "not on the allowlist")
        return [version or b"1.0", number, *verdict, b""]

    def _refuse(self, domain: str, address: str, why: str) -> None:
        self.refused[domain] += 1
        if self.refused[domain] <= REFUSALS_LOGGED:
            log.warning("peer.refused", domain=domain, address=address, why=why)


def _read_secret(path: Path) -> bytes:
    key = read_key(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} is readable by others; run: chmod 600 {path}")
    return key


def _make_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None


def _write_pair(directory: Path, name: str) -> bytes:
    public, secret = zmq.curve_keypair()
    _write(directory / f"{name}.key", public, 0o644)
    _write(directory / f"{name}.secret", secret, 0o600)
    return public


def _write(path: Path, key: bytes, mode: int) -> None:
    """The whole file appears at once (a part may be reading the list), and never in the place of another."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")  # no .key: nobody reads it
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(key + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)  # unlike a rename it fails where there is one
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)
