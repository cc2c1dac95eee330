"""The list of public keys that may connect, and their names: `allow/<role>/<name>.key` of a key directory, always up
to date.

A handshake of a listed key costs one `stat`, that of an unknown key one for each file; a file is read when it has
changed. Edits, new files and deletions count from the next handshake on. While a folder cannot be listed, its keys
stay as they were; only a key whose own file no longer exists is dropped. This module owns that cache; it judges keys
and nothing else.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import zmq.utils.z85

from bus.errors import ConfigError
from bus.rights import DOMAINS, ROLES, KeyRole
from bus.runtime.logs import get_logger
from bus.wire.messages import NAME

# A file that is younger than this is read again next time: a coarse file system gives a second change the same times.
SETTLED_NS = 2_000_000_000
Stamp: TypeAlias = tuple[int, ...]

log = get_logger("bus")


class _File(NamedTuple):
    """The content of a file when it was read: `key` is None where it holds none. `stamp` is None when the file must
    be read again."""

    stamp: Stamp | None
    key: bytes | None


class Allowlist:
    """The public keys of all roles: listed ones in `allow/`, revoked ones in `revoked/`, which is for messages only (a
    revoked key is one that is no longer in `allow/`). It reads the disk when it is asked, so it is used on one thread:
    the ZAP handler's (`bus.runtime.security`). A file that holds no key is skipped, and logged once."""

    def __init__(self, directory: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._folders = {role: Folder(directory / "allow" / role, clock_ns) for role in ROLES}
        self._revoked = {role: Folder(directory / "revoked" / role, clock_ns) for role in ROLES}

    def admits(self, key: bytes, domain: str) -> str:
        """Return the name, `<role>/<name>`, under which `key` (Z85) may connect to `domain` (one kind of socket, see
        `bus.rights.DOMAINS`); empty if it may not."""
        roles = DOMAINS.get(domain, ())
        for ask in (Folder.still_holds, Folder.holds):
            for role in roles:
                if name := ask(self._folders[role], key):
                    return f"{role}/{name}"
        return ""

    def listed(self, key: bytes) -> str:
        """Return the name of `key`, `<role>/<name>`, if any role lists it, whatever that role may connect to. Empty if
        none does."""
        return _name_in(self._folders, key)

    def revoked(self, key: bytes) -> str:
        """Return the name under which `key` was revoked, `<role>/<name>`; empty if it was not."""
        return _name_in(self._revoked, key)


class Folder:
    """The keys of one role in one folder, as files `<name>.key`. `keys` has them by name, as they were read last."""

    def __init__(self, path: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.keys: dict[str, bytes] = {}
        self._path = path
        self._clock_ns = clock_ns
        self._files: dict[str, _File] = {}
        self._names: dict[bytes, str] = {}  # of the keys
        self._read = True  # by the last look; once there has been one that could

    def still_holds(self, key: bytes) -> str:
        """Return the name of `key` if its file is there and unchanged, for the cost of one `stat`. An empty string may
        also mean that the file was not read yet."""
        name = self._names.get(key, "")
        try:
            file = f"{name}.key"
            return name if name and self._files[file].stamp == _stamp((self._path / file).stat()) else ""
        except OSError:
            return ""

    def holds(self, key: bytes) -> str:
        """Return the name of `key` if it is listed, else an empty string. This looks at all files, and reads those that
        have changed."""
        self.read()
        return self._names.get(key, "")

    def read(self) -> bool:
        """Look at all files, read those that have changed, and update `keys`. Return false where the folder cannot be
        listed."""
        files: dict[str, _File] = {}
        error: OSError | None = None
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if not entry.name.endswith(".key"):
                        continue
                    if file := self._look(entry):
                        files[entry.name] = file
                    elif not self._path.exists():  # it is the folder that went away meanwhile
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as failed:
            error = failed
            files = self._files
            if self._path.exists():
                files = {name: file for name, file in files.items() if not _is_gone(self._path / name)}
        self._note(error)
        self._files = files
        self.keys = {name.removesuffix(".key"): file.key for name, file in files.items() if file.key is not None}
        self._names = {key: name for name, key in self.keys.items()}
        return error is None

    def _note(self, error: OSError | None) -> None:
        """Log when the folder can no longer be read, and when it can be read again. A folder that never existed is not
        logged."""
        if error is None:
            if not self._read:
                log.warning("allowlist.readable", path=str(self._path))
            self._read = True
        elif self._read and (self._files or not isinstance(error, FileNotFoundError)):
            log.error("allowlist.unreadable", path=str(self._path), error=error.strerror, kept=len(self._files))
            self._read = False

    def _look(self, entry: os.DirEntry[str]) -> _File | None:
        known = self._files.get(entry.name)
        now = self._clock_ns()
        try:
            status = entry.stat()
            stamp = _stamp(status)
            if known is not None and known.stamp == stamp:
                return known
            if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
                raise ConfigError(f"{entry.path} is no file")
            if NAME.fullmatch(entry.name.removesuffix(".key")) is None:
                raise ConfigError(f"{entry.path} has no name for a key: 1 to 64 letters, digits, '.', '_' and '-'")
            settled = now - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS
            return _File(stamp if settled else None, read_key(Path(entry.path)))
        except FileNotFoundError:
            return None
        except (ConfigError, OSError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            if known is not None and isinstance(error.__cause__ or error, OSError):
                return known._replace(stamp=None)  # what it holds now can't be read: that changes nothing
            if known is None or known.key is not None:
                log.warning("allowlist.file_skipped", path=entry.path, error=str(error))
            return _File(None, None)


def _name_in(folders: Mapping[KeyRole, Folder], key: bytes) -> str:
    return next((f"{role}/{name}" for role, folder in folders.items() if (name := folder.holds(key))), "")


def _stamp(status: os.stat_result) -> Stamp:
    """Return what shows that a file has changed. Its change time cannot be set by a user, unlike its modification
    time."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def read_key(path: Path) -> bytes:
    """Return the key in a file: 40 characters of Z85, as bytes. ConfigError when the file is missing, unreadable or
    holds no key."""
    try:
        key = path.read_text("ascii").strip().encode()
        zmq.utils.z85.decode(key)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing (see pdbus keys --help)") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} does not hold a key ({type(error).__name__})") from None
    if len(key) != 40:
        raise ConfigError(f"{path} does not hold a key (40 characters of Z85)")
    return key
