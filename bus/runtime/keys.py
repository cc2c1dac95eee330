"""CURVE keys on disk.

A key directory holds, as Z85 text: `server.key` and `server.secret` (every part that binds), `client.key` and
`client.secret` (whoever connects), and `allow/nodes/*.key`, `allow/clients/*.key`: the public keys that may connect.
Owns making and reading these files; who gets in is judged in `bus.runtime.security`.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.errors import ConfigError
from bus.runtime.allowlist import read_key


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
