"""CURVE keys on disk, and the allowlist that decides who may connect (ZeroMQ RFC 26/CURVEZMQ, 27/ZAP).

A key directory holds, as Z85 text: `server.key` and `server.secret` (every part that binds), `client.key` and
`client.secret` (whoever connects), and `allow/nodes/*.key`, `allow/clients/*.key`: the public keys that may connect.
Ports of the bus and the nodes' port of a controller take the former only; ports for clients take both. Owns keys and
that decision; sockets are configured in `bus.sockets`.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import zmq
import zmq.utils.z85

from bus.errors import ConfigError

Domain = Literal["nodes", "clients"]
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_STOP = b"stop"

log = structlog.get_logger("bus")


@dataclass(frozen=True)
class Keys:
    """One part's keys; `server_secret` is None for a part that only connects."""

    directory: Path
    server_public: bytes
    server_secret: bytes | None
    client_public: bytes
    client_secret: bytes

    def allowed(self, domain: str) -> frozenset[bytes]:
        """The public keys that may connect to `domain` now: the directory is read each time, so edits take effect."""
        folders = ("nodes",) if domain == "nodes" else ("nodes", "clients")
        return frozenset(
            _read(path) for folder in folders for path in sorted((self.directory / "allow" / folder).glob("*.key"))
        )


def load_keys(directory: Path | str, *, server: bool) -> Keys:
    """The keys in `directory`; ConfigError when one is missing, malformed or readable by others."""
    path = Path(directory)
    return Keys(
        directory=path,
        server_public=_read(path / "server.key"),
        server_secret=_read_secret(path / "server.secret") if server else None,
        client_public=_read(path / "client.key"),
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
    server_public = _read(cluster / "server.key")
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
        self._keys = keys
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._stop = context.socket(zmq.PAIR)
        self._stop.setsockopt(zmq.LINGER, 0)
        self._stop.bind(f"inproc://gatekeeper-stop-{id(self)}")
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._context.socket(zmq.PAIR) as caller:
            caller.setsockopt(zmq.LINGER, 1000)
            caller.connect(f"inproc://gatekeeper-stop-{id(self)}")
            caller.send(_STOP)
            self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                self._socket.send_multipart([frames[0], b"", *self.answer(frames[2:])])
            if self._stop in ready:
                self._socket.close()
                self._stop.close()
                return

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request (RFC 27): 200 for an allowed CURVE key, 400 for anything else."""
        version, number, domain, address, _, mechanism = (request + [b""] * 6)[:6]
        verdict = (b"400", b"not on the allowlist", b"")
        if mechanism == b"CURVE" and len(request) == 7:
            key = zmq.utils.z85.encode(request[6])
            try:
                if key in self._keys.allowed(domain.decode(errors="replace")):
                    verdict = (b"200", b"OK", key)
            except (ConfigError, OSError) as error:
                log.error("allowlist.unreadable", error=str(error))
        if verdict[0] != b"200":
            self.refused[domain.decode(errors="replace")] += 1
            log.warning(
                "peer.refused", domain=domain.decode(errors="replace"), address=address.decode(errors="replace")
            )
        return [version or b"1.0", number, *verdict, b""]


def _read(path: Path) -> bytes:
    try:
        key = path.read_text("ascii").strip().encode()
        zmq.utils.z85.decode(key)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; make keys with: pdbus keys new {path.parent}") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} does not hold a key ({type(error).__name__})") from None
    if len(key) != 40:
        raise ConfigError(f"{path} does not hold a key (40 characters of Z85)")
    return key


def _read_secret(path: Path) -> bytes:
    key = _read(path)
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
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
