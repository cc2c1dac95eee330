"""Addresses. A user names one base address a part; this module derives the endpoints of the part's sockets from it.

`ipc:///dir/bus` gives `ipc:///dir/bus.pub`, ...; `tcp://host:5550` gives that port and the ones after it. This module
owns the rules for directories and loopback, and the reasons why an address may not answer; it must not open sockets.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bus.errors import ConfigError

MARK = "#"  # separates the owner's key: its name in a controller's address, the key itself in a rank's endpoint
KEY_CHARS = 40  # of Z85
_OWNER = re.compile(MARK + r"[A-Za-z0-9._-]{1,64}")
_DATA_DIR = re.compile(r"/[!-~]{0,79}")  # with a socket's name behind it, it is an endpoint on the wire
_IPC_PATH_MAX = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux
_LONGEST_SUFFIX = len(".bootstrap")
WILDCARDS = ("", "*", "0.0.0.0", "::")


def runtime_dir() -> Path:
    """Return the default directory of ipc sockets: `$PDBUS_DIR`, else one under the user's runtime or temp directory.
    It may not exist yet."""
    if chosen := os.environ.get("PDBUS_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pdbus" if base else Path(tempfile.gettempdir()) / f"pdbus-{os.getuid()}"


def private_dir(path: Path) -> Path:
    """Make the directory `path` with mode 0700 and return it. ConfigError when it cannot be made, belongs to another
    user or is open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot use {path} for sockets: {error.strerror}") from None
    if info.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user; choose another directory with PDBUS_DIR")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"{path} is open to other users; run: chmod 700 {path}")
    return path


def check_dir(path: Path) -> None:
    """Raise ConfigError where another user may listen at the sockets in `path`: the directory is neither ours nor
    root's, or others may put files there (allowed beside a sticky bit, as in /tmp). A group may write to what is
    root's, as Kubernetes' `fsGroup` does. Our own default directory is made first, before another user can make it. A
    path that does not exist passes."""
    if path == runtime_dir():
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        info = path.stat()
    except OSError:  # the folder does not exist, so connecting will fail
        return
    if info.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"{path} belongs to another user, who could listen there; use a directory of your own (PDBUS_DIR) or --keys"
        )
    if info.st_mode & (0o002 if info.st_uid == 0 else 0o022) and not info.st_mode & stat.S_ISVTX:
        raise ConfigError(f"others may write to {path}, and could listen there; run: chmod go-w {path}")


def split_owner(endpoint: str) -> tuple[str, str]:
    """Split an address or endpoint into the address itself and its owner: a key, the name of a key, or nothing."""
    if endpoint[-KEY_CHARS - 1 : -KEY_CHARS] == MARK:  # a key may hold a mark
        return endpoint[: -KEY_CHARS - 1], endpoint[-KEY_CHARS:]
    at = endpoint.rfind(MARK)
    return (endpoint[:at], endpoint[at + 1 :]) if at > 0 and _OWNER.fullmatch(endpoint, at) else (endpoint, "")


def split_port(host: str) -> tuple[str, str]:
    """Split `host:port`; the port is empty where there is none. An IPv6 address stands in brackets."""
    name, colon, port = host.rpartition(":")
    return (name, port) if colon and port and "]" not in port else (host, "")


def why_no_data_dir(path: str) -> str:
    """Return why a directory cannot hold data sockets, whose paths are sent to peers; empty where it can."""
    if _DATA_DIR.fullmatch(path):
        return ""
    return "name a directory by an absolute path of at most 80 bytes, without spaces and letters beyond ASCII"


def check_base(base: str) -> str:
    """Return `base` unchanged if it is a valid base address, else raise ConfigError with what is wrong with it."""
    if not isinstance(base, str):
        raise ConfigError(f"{base!r:.60}: an address is text, like tcp://127.0.0.1:5550")
    scheme, _, rest = base.partition("://")
    if scheme == "ipc":
        if not rest.startswith("/"):
            raise ConfigError(f"{base!r}: an ipc address needs an absolute path, like ipc:///tmp/pdbus/bus")
        try:
            length = len(rest.encode())
        except UnicodeEncodeError:
            why = "the path has letters that this locale cannot read; set LC_ALL=C.UTF-8, or name another directory"
            raise ConfigError(f"{base!r}: {why}") from None
        if length + _LONGEST_SUFFIX > _IPC_PATH_MAX:
            raise ConfigError(f"{base!r}: the path is too long for a socket (at most {_IPC_PATH_MAX} bytes)")
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65530:
            raise ConfigError(f"{base!r}: a tcp address needs a host and a port, like tcp://127.0.0.1:5550")
    else:
        raise ConfigError(f"{base!r}: an address starts with ipc:// or tcp://")
    return base


def is_exposed(endpoint: str) -> bool:
    """Return true if `endpoint` can be reached from another machine: tcp, and no loopback address. A host name counts
    as reachable."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return False
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def advertised(host: str, port: int, base: str) -> str:
    """Return the `host:port` by which others reach a port of the part that serves at `base`; empty for port 0. Where
    the part listens on all addresses of its machine, take the host in `base`, if there is one, else the machine's
    name."""
    if not port:
        return ""
    if host.strip("[]") in WILDCARDS:
        scheme, _, rest = split_owner(base)[0].partition("://")
        named = rest.rpartition(":")[0] if rest.rpartition(":")[2].isdecimal() else rest
        host = named if scheme == "tcp" and named.strip("[]") not in WILDCARDS else socket.gethostname()
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def unresolved(base: str) -> str:
    """Return why the host in `base` cannot be resolved now; empty when it can, or none is needed. It may take
    seconds."""
    scheme, _, rest = base.partition("://")
    if scheme != "tcp":
        return ""
    host = rest.rpartition(":")[0].rpartition(";")[2].strip("[]")  # before a ";" ZeroMQ takes the source address
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"cannot resolve host {host!r} ({error.strerror})"
    except UnicodeError:
        return f"cannot resolve host {host!r}"
    return ""


def why_silent(base: str, keys: str) -> str:
    """Return what to check when no part answers at `base`, for a caller with the keys in `keys` (empty: none)."""
    if reason := unresolved(base):
        return reason
    if keys:
        return f"is it running there, and does it list the keys in {keys}?"
    if not base.startswith("tcp:"):
        return "is it running there?"
    return "is it running there? if it uses keys, pass --keys DIR"


def _derive(base: str, suffix: str, step: int) -> str:
    if base.startswith("ipc://"):
        return f"{base}.{suffix}"
    host, _, port = base.rpartition(":")
    return f"{host}:{int(port) + step}"


@dataclass(frozen=True)
class BusAddress:
    """The endpoints of the broker's three sockets, from a base address (tcp: three ports from the base on). ConfigError
    if it is invalid."""

    base: str

    def __post_init__(self) -> None:
        check_base(self.base)

    @property
    def publish(self) -> str:
        """The endpoint of the SUB socket to which publishers connect."""
        return _derive(self.base, "pub", 0)

    @property
    def subscribe(self) -> str:
        """The endpoint of the PUB socket to which subscribers connect."""
        return _derive(self.base, "sub", 1)

    @property
    def bootstrap(self) -> str:
        """The endpoint of the ROUTER socket for queries and watches."""
        return _derive(self.base, "bootstrap", 2)


@dataclass(frozen=True)
class ControllerAddress:
    """The endpoints of a controller's two ROUTER sockets, from a base address (tcp: two ports from the base on).
    `tcp://host:5560#NAME` names the controller's key that this address must prove, where there are several. ConfigError
    if it is invalid."""

    base: str

    def __post_init__(self) -> None:
        check_base(split_owner(self.base)[0] if isinstance(self.base, str) else self.base)

    @property
    def clients(self) -> str:
        """The endpoint of the ROUTER socket to which clients connect."""
        return self._derive("clients", 0)

    @property
    def nodes(self) -> str:
        """The endpoint of the ROUTER socket to which ranks connect."""
        return self._derive("nodes", 1)

    def _derive(self, suffix: str, step: int) -> str:
        base, owner = split_owner(self.base)
        return _derive(base, suffix, step) + (MARK + owner if owner else "")


def default_bus() -> str:
    """Return the broker's default base address: ipc, in `runtime_dir`."""
    return f"ipc://{runtime_dir()}/bus"


def default_controller() -> str:
    """Return a controller's default base address: ipc, in `runtime_dir`."""
    return f"ipc://{runtime_dir()}/controller"
