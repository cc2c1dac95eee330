"""CURVE keys on disk, and an operator's operations on them.

A key directory has three folders of Z85 text files. `allow/<role>/<name>.key` has the public keys that may connect.
`secrets/<role>/<name>.secret` has the secrets that the directory's owner needs: all of them where the keys are made,
one in a directory for another machine. `revoked/<role>/<name>.key` has revoked keys, which are not made again unless
asked for. A part proves its identity with its own key, whether it binds or connects.

This module owns making and reading these files; `bus.runtime.security` judges connections.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.errors import ConfigError
from bus.rights import ROLES, KeyRole
from bus.runtime.allowlist import read_key
from bus.wire.messages import NAME

EDGE = "edge"  # the key of an HTTP edge, a client's, where no other is chosen


@dataclass(frozen=True)
class Keys:
    """The key of one part, and the directory whose lists judge the keys of its peers. `name` is `<role>/<name>`;
    `public` and `secret` are 40 characters of Z85."""

    directory: Path
    name: str
    public: bytes
    secret: bytes

    def of_port(self, role: KeyRole, name: str) -> bytes:
        """Return the public key that a broker or controller must prove when we connect to it: that of `name`, or for an
        empty name the only listed key of `role`. ConfigError if there is none, or `name` is empty and several are
        listed."""
        folder = self.directory / "allow" / role
        if name:
            return read_key(folder / f"{name}.key")
        names = sorted(path.stem for path in folder.glob("*.key"))
        if len(names) == 1:
            return read_key(folder / f"{names[0]}.key")
        if not names:
            raise ConfigError(f"{folder} lists no key: copy allow/ from where the keys were made")
        raise ConfigError(f"{folder} lists {', '.join(names)}: write which at the end of the address, as #{names[0]}")


def load_keys(directory: Path | str, *roles: KeyRole, name: str = "", default: str = "") -> Keys:
    """Return the key of this part in `directory`: that of `name`, else of `default` if it is there, else the only
    key of the first of these roles that has any.

    ConfigError when there is no such key, when it is malformed or other users may read it, or when other users may
    write to the lists.
    """
    path = Path(directory)
    try:
        path.stat()
    except FileNotFoundError:
        pass  # it has no key, which is said below
    except OSError as error:
        raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}") from None
    _check_lists(path)
    role = roles[-1].removesuffix("s")
    chosen, names = roles[0], [name]
    if not name:
        here = {each: sorted(secret.stem for secret in (path / "secrets" / each).glob("*.secret")) for each in roles}
        chosen = next((each for each in roles if here[each]), chosen)
        names = [default] if default in here[chosen] else here[chosen]
    if not names and default and (path / "allow" / chosen).is_dir():  # where keys are made
        raise ConfigError(f"{path} has no secret of a {role}; make it one: pdbus keys add {path} {role} {default}")
    if not names:
        raise ConfigError(f"{path} has no secret of a {role}; give it one: pdbus keys give KEYS {role} NAME {path}")
    if len(names) > 1:
        how = "choose one with --key-name" if default else "take one away with: pdbus keys give"
        raise ConfigError(f"{path} has secrets of {', '.join(names)}: {how}")
    name = names[0]
    secret = path / "secrets" / chosen / f"{name}.secret"
    if not secret.exists():
        raise ConfigError(f"{secret} is missing; make it with: pdbus keys add {path} {role} {name}")
    key = _read_secret(secret)
    return Keys(path, f"{chosen}/{name}", zmq.curve_public(key), key)


def any_key(directory: Path | str) -> Keys | None:
    """Return the key in `directory` that shows most: an admin's, else a viewer's, else a client's; None for an empty
    path. Errors are those of `load_keys`."""
    return load_keys(directory, "admins", "viewers", "clients") if directory else None


def new_keys(directory: Path, nodes: Sequence[str] = ()) -> None:
    """Make the directory and keys of a new cluster: of its broker, one controller, an operator, an HTTP edge, and these
    nodes. ConfigError if it holds keys already, or one of the names is invalid; then no key is made."""
    if (directory / "secrets").exists():
        raise ConfigError(f"{directory} already holds keys; choose an empty directory")
    for name in nodes:
        _check_name(name)
    if twice := next((name for name in nodes if nodes.count(name) > 1), ""):
        raise ConfigError(f"{twice} is named twice: a node's key is its instance's")
    for role in ROLES:
        _make_dirs(directory, f"allow/{role}")
    add_key(directory, "brokers", "broker")
    add_key(directory, "controllers", "controller-0")
    add_key(directory, "admins", "operator")
    add_key(directory, "clients", EDGE)
    for name in nodes:
        add_key(directory, "nodes", name)


def add_key(directory: Path, role: KeyRole, name: str) -> None:
    """Make the key `name` of `role`, and list it. Its secret stays in this directory until `give_key`. A revoked key of
    that name is forgotten. ConfigError if the name is invalid or listed already."""
    _check_name(name)
    listed = directory / "allow" / role / f"{name}.key"
    if listed.exists():
        raise ConfigError(f"{listed} exists: a {role.removesuffix('s')} of that name is already allowed")
    if not listed.parent.is_dir():
        raise ConfigError(f"{directory} holds no list of keys; make one with: pdbus keys new {directory}")
    public, secret = zmq.curve_keypair()
    _make_dirs(directory, f"secrets/{role}")
    mine = directory / "secrets" / role / f"{name}.secret"
    _remove(mine)  # of a key that never came to be listed
    _write(mine, secret, 0o600)
    _write(listed, public, 0o644)
    _remove(directory / "revoked" / role / listed.name)


def give_key(directory: Path, role: KeyRole, name: str, out: Path) -> None:
    """Move the secret of a listed key from `directory` to the directory `out`, and copy there the public keys that its
    holder needs. Where `out` has the secret already, only its public keys are renewed; the secret of an earlier key of
    that name is replaced. ConfigError if the secret is not here any more."""
    listed = read_key(_listed(directory, role, name))
    here, there = (each / "secrets" / role / f"{name}.secret" for each in (directory, out))
    if not there.exists() or zmq.curve_public(_read_secret(there)) != listed:
        if not there.exists() and (out / "secrets").exists():
            raise ConfigError(f"{out} holds the secret of another; choose an empty directory")
        if not here.exists():
            raise ConfigError(f"{here} was given away; to make another key of that name, revoke this one first")
        secret = _read_secret(here)
        _make_dirs(out, f"secrets/{role}")
        _remove(there)
        _write(there, secret, 0o600)
        _remove(here)
    for each in _lists_of(role):
        _make_dirs(out, f"allow/{each}")
        theirs = {path.name: read_key(path) for path in (directory / "allow" / each).glob("*.key")}
        for path in (out / "allow" / each).glob("*.key"):
            if path.read_bytes().strip() == theirs.get(path.name):
                del theirs[path.name]
            else:
                _remove(path)
        for file, key in theirs.items():
            _write(out / "allow" / each / file, key, 0o644)


def files_of(keys: Keys) -> dict[str, bytes]:
    """Return the files that the part with these keys needs on another machine: their contents, by their path in its
    directory there."""
    role, name = keys.name.split("/")
    files = {f"secrets/{role}/{name}.secret": keys.secret}
    for each in _lists_of(role):
        for path in sorted((keys.directory / "allow" / each).glob("*.key")):
            files[f"allow/{each}/{path.name}"] = read_key(path)
    return files


def ensure_keys(directory: Path, controllers: Sequence[str], nodes: Sequence[str], *, edge: bool = False) -> None:
    """Make the missing keys of these controllers and nodes, and of an HTTP edge if `edge`. Keys that exist stay; a
    revoked key is made again by `add_key` only."""
    wanted: dict[KeyRole, Sequence[str]] = {
        "controllers": controllers, "nodes": nodes, "clients": (EDGE,) if edge else (),
    }  # fmt: skip
    for role, names in wanted.items():
        for name in names:
            if not any((directory / known / role / f"{name}.key").exists() for known in ("allow", "revoked")):
                add_key(directory, role, name)


def revoke_key(directory: Path, role: KeyRole, name: str) -> None:
    """Take a key off the list, delete its secret here, and remember it as revoked. Parts that read this directory cut
    its connections within a second. ConfigError if it is not listed."""
    listed = _listed(directory, role, name)
    public = listed.read_bytes().strip()
    _remove(listed)
    _remove(directory / "secrets" / role / f"{name}.secret")
    _make_dirs(directory, f"revoked/{role}")
    _remove(directory / "revoked" / role / listed.name)
    _write(directory / "revoked" / role / listed.name, public, 0o644)


def listed_keys(directory: Path) -> Iterator[tuple[KeyRole, str, bytes]]:
    """Give role, name and public key of every listed key. ConfigError where there is no list."""
    if not (directory / "allow").is_dir():
        raise ConfigError(f"{directory} holds no list of keys; make one with: pdbus keys new {directory}")
    for role in ROLES:
        for path in sorted((directory / "allow" / role).glob("*.key")):
            yield role, path.stem, read_key(path)


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None or name.startswith("."):
        raise ConfigError(f"{name!r}: the name of a key has 1 to 64 letters, digits, '.', '_' and '-'")


def _lists_of(role: str) -> tuple[KeyRole, ...]:
    """Return the roles whose public keys the holder of such a key needs."""
    return ("brokers", "controllers") if role in ("clients", "viewers", "admins") else ROLES


def _listed(directory: Path, role: KeyRole, name: str) -> Path:
    path = directory / "allow" / role / f"{name}.key"
    if not path.exists():
        raise ConfigError(f"{path} is missing: no {role.removesuffix('s')} of that name is allowed")
    return path


def check_private(path: Path) -> None:
    """Raise ConfigError when other users may read the file; OSError when it cannot be examined."""
    status = path.stat()
    if _is_open(stat.S_IMODE(status.st_mode), status.st_uid, os.getuid()):
        raise ConfigError(f"{path} is readable by others; run: chmod 600 {path}")


def _is_open(mode: int, owner: int, we: int) -> bool:
    """Return true if other users may read the file. The group may read a file of root: so Kubernetes (`fsGroup`) and
    systemd (`LoadCredential`) hand a secret to a process that is not root's."""
    return bool(mode & (0o037 if owner == 0 != we else 0o077))


def _check_lists(directory: Path) -> None:
    """ConfigError where other users may add or change a listed key. Any mode is allowed on a read-only mount: the
    folder of a ConfigMap has 0777. A group may write to what is root's, as Kubernetes' `fsGroup` does."""
    lists = [directory, *((directory / "allow").joinpath(each) for each in ("", *ROLES))]
    for path in (*lists, *(file for folder in lists[2:] for file in folder.glob("*.key"))):
        with suppress(OSError):  # a list that does not exist admits no key
            info = path.stat()
            others = 0o002 if info.st_uid == 0 else 0o022
            if info.st_mode & others and not os.statvfs(path).f_flag & os.ST_RDONLY:
                raise ConfigError(f"others may write to {path}, and let themselves in; run: chmod go-w {path}")


def _read_secret(path: Path) -> bytes:
    key = read_key(path)
    check_private(path)
    return key


def _make_dirs(base: Path, inside: str) -> None:
    """Make `base` and the folders inside it, each for its owner alone. ConfigError where another user may add a key,
    too."""
    path = base
    try:
        for parent in reversed(base.absolute().parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)
        for name in ("", *inside.split("/")):
            path /= name
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.stat()
            if info.st_uid not in (0, os.getuid()):
                raise ConfigError(f"{path} belongs to another user: keep keys in a directory of your own")
            if stat.S_IMODE(info.st_mode) & 0o022:
                raise ConfigError(f"others may write to {path}; run: chmod go-w {path}")
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from None


def _write(path: Path, key: bytes, mode: int) -> None:
    """Write a whole file at once (a part may be reading the list), never over an existing one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")  # not named .key: it is not read as one
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(key + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)  # unlike a rename it fails where there is one
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            fresh.unlink()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # a read-only file system refuses this of a file that does not exist, too
        if os.path.lexists(path):
            raise ConfigError(f"cannot remove {path}: {error.strerror}") from None
