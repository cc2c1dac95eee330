"""CURVE keys on disk, and what an operator does with them.

A key directory has the public keys of all who may connect, in `allow/<role>/<name>.key`, and in
`secrets/<role>/<name>.secret` those secrets that its owner needs: all of them where the keys are made, one in what is
taken to another machine. All are Z85 text. A part proves with its own key who it is, whether it binds or connects.
Owns making and reading these files; who gets in is judged in `bus.runtime.security`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.errors import ConfigError
from bus.rights import ROLES, KeyRole
from bus.runtime.allowlist import read_key
from bus.wire.messages import NAME


@dataclass(frozen=True)
class Keys:
    """One part's key, and the list it judges others by. `name` is `<role>/<name>`."""

    directory: Path
    name: str
    public: bytes
    secret: bytes

    def of_port(self, role: KeyRole, name: str) -> bytes:
        """The key that the port of a broker or controller must prove; `name` may be empty where one is listed."""
        folder = self.directory / "allow" / role
        if name:
            return read_key(folder / f"{name}.key")
        names = sorted(path.stem for path in folder.glob("*.key"))
        if len(names) == 1:
            return read_key(folder / f"{names[0]}.key")
        if not names:
            raise ConfigError(f"{folder} lists nobody: copy allow/ from where the keys were made")
        raise ConfigError(f"{folder} lists {', '.join(names)}: write which at the end of the address, as #{names[0]}")


def load_keys(directory: Path | str, *roles: KeyRole, name: str = "") -> Keys:
    """The key of this part in `directory`: that of `name`, or the only one there is of these roles. ConfigError when
    there is none, or one that is malformed or readable by others."""
    path = Path(directory)
    role = roles[0].removesuffix("s")
    if name:
        found = [(roles[0], name)]
    else:
        found = [(each, secret.stem) for each in roles for secret in sorted((path / "secrets" / each).glob("*.secret"))]
    if not found:
        raise ConfigError(f"{path} has no secret of a {role}; make one with: pdbus keys add {path} {role} NAME")
    if len(found) > 1:
        names = ", ".join("/".join(each) for each in found)
        raise ConfigError(f"{path} has the secrets of {names}: use a directory with one (pdbus keys add ... OUT)")
    chosen, name = found[0]
    secret = path / "secrets" / chosen / f"{name}.secret"
    if not secret.exists():
        raise ConfigError(f"{secret} is missing; make it with: pdbus keys add {path} {role} {name}")
    key = _read_secret(secret)
    return Keys(path, f"{chosen}/{name}", zmq.curve_public(key), key)


def new_keys(directory: Path, nodes: Sequence[str] = ()) -> None:
    """Make the keys of a cluster in `directory`: of its broker, one controller, an operator, and these nodes."""
    if (directory / "secrets").exists():
        raise ConfigError(f"{directory} already holds keys; choose an empty directory")
    for made in (directory, directory / "allow", *(directory / "allow" / role for role in ROLES)):
        _make_dir(made)
    add_key(directory, "brokers", "broker")
    add_key(directory, "controllers", "controller-0")
    add_key(directory, "admins", "operator")
    for name in nodes:
        add_key(directory, "nodes", name)


def add_key(directory: Path, role: KeyRole, name: str, out: Path | None = None) -> None:
    """Make a key and list it. Its secret goes to `out`, with what a part needs beside it, or stays in `directory`."""
    if NAME.fullmatch(name) is None or name.startswith("."):
        raise ConfigError(f"{name!r}: the name of a key has 1 to 64 letters, digits, '.', '_' and '-'")
    listed = directory / "allow" / role / f"{name}.key"
    if listed.exists():
        raise ConfigError(f"{listed} exists: a {role.removesuffix('s')} of that name is already allowed")
    if out is not None and (out / "secrets").exists():
        raise ConfigError(f"{out} already holds keys; choose an empty directory")
    if not listed.parent.is_dir():
        raise ConfigError(f"{directory} holds no list of keys; make one with: pdbus keys new {directory}")
    public, secret = zmq.curve_keypair()
    target = out or directory
    for made in (target, target / "secrets", target / "secrets" / role):
        _make_dir(made)
    _write(target / "secrets" / role / f"{name}.secret", secret, 0o600)
    _write(listed, public, 0o644)
    if out is not None:
        copy_list(directory, out, ("brokers", "controllers") if role in ("clients", "admins") else ROLES)


def ensure_keys(directory: Path, controllers: Sequence[str], nodes: Sequence[str]) -> None:
    """Add what keys of these parts are not listed yet."""
    wanted: dict[KeyRole, Sequence[str]] = {"controllers": controllers, "nodes": nodes}
    for role, names in wanted.items():
        for name in names:
            if not (directory / "allow" / role / f"{name}.key").exists():
                add_key(directory, role, name)


def copy_list(directory: Path, out: Path, roles: Sequence[KeyRole] = ROLES) -> None:
    """Put the public keys of these roles beside a secret that goes elsewhere."""
    _make_dir(out / "allow")
    for role in roles:
        _make_dir(out / "allow" / role)
        for path in (directory / "allow" / role).glob("*.key"):
            _write(out / "allow" / role / path.name, read_key(path), 0o644)


def revoke_key(directory: Path, role: KeyRole, name: str) -> None:
    """Take a key off the list; parts that read this directory cut its connections within a second."""
    listed = directory / "allow" / role / f"{name}.key"
    if not listed.exists():
        raise ConfigError(f"{listed} is missing: no {role.removesuffix('s')} of that name is allowed")
    listed.unlink()
    (directory / "secrets" / role / f"{name}.secret").unlink(missing_ok=True)


def listed_keys(directory: Path) -> Iterator[tuple[KeyRole, str, bytes]]:
    """Role, name and public key of all that are listed."""
    for role in ROLES:
        for path in sorted((directory / "allow" / role).glob("*.key")):
            yield role, path.stem, read_key(path)


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
