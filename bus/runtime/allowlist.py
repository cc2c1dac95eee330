"""Whose public keys may connect, and as whom: `allow/<role>/<name>.key` of a key directory, as they are now.

A handshake of a listed key costs one `stat`, that of a stranger one for each file; files are read when they changed.
Edits, new files and deletions count from the next handshake on. Owns that cache; judges keys and nothing else.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import zmq.utils.z85

from bus.errors import ConfigError
from bus.rights import DOMAINS, ROLES
from bus.runtime.logs import get_logger
from bus.wire.messages import NAME

SETTLED_NS = 2_000_000_000  # a file changed since may change once more within a tick of a coarse file system's clock
Stamp: TypeAlias = tuple[int, ...]

log = get_logger("bus")


class _File(NamedTuple):
    """What was read of a file: `key` is None where it holds none. `stamp` is None when it must be read again."""

    stamp: Stamp | None
    key: bytes | None


class Allowlist:
    """Reads the disk when asked; for one thread. A file that holds no key is skipped and logged once."""

    def __init__(self, directory: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._folders = {role: _Folder(directory / "allow" / role, clock_ns) for role in ROLES}

    def admits(self, key: bytes, domain: str) -> str:
        """The name, `<role>/<name>`, under which `key` (Z85) may connect to `domain`; empty: it may not."""
        roles = DOMAINS.get(domain, ())
        for ask in (_Folder.still_holds, _Folder.holds):
            for role in roles:
                if file := ask(self._folders[role], key):
                    return f"{role}/{file.removesuffix('.key')}"
        return ""


class _Folder:
    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        self._path = path
        self._clock_ns = clock_ns
        self._files: dict[str, _File] = {}
        self._names: dict[bytes, str] = {}  # of the files, by their keys
        self._readable = True

    def still_holds(self, key: bytes) -> str:
        """The file that held `key`, if it is there and unchanged; none may only mean that nobody has looked."""
        name = self._names.get(key, "")
        try:
            return name if name and self._files[name].stamp == _stamp((self._path / name).stat()) else ""
        except OSError:
            return ""

    def holds(self, key: bytes) -> str:
        """The file that holds `key`, if any: looks at all, and reads those that changed. None where that fails."""
        files: dict[str, _File] = {}
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if entry.name.endswith(".key") and (file := self._look(entry)):
                        files[entry.name] = file
        except FileNotFoundError:
            pass
        except OSError as error:
            if self._readable:
                log.error("allowlist.unreadable", path=str(self._path), error=error.strerror)
            self._readable = False
            return ""
        self._readable = True
        self._files = files
        self._names = {file.key: name for name, file in files.items() if file.key is not None}
        return self._names.get(key, "")

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
            if known is None or known.key is not None:
                log.warning("allowlist.file_skipped", path=entry.path, error=str(error))
            return _File(None, None)


def _stamp(status: os.stat_result) -> Stamp:
    """What a change of a file changes: its time of change cannot be set, as that of modification can."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


def read_key(path: Path) -> bytes:
    """The key in a file, 40 characters of Z85. ConfigError when there is none."""
    try:
        key = path.read_text("ascii").strip().encode()
        zmq.utils.z85.decode(key)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing (see pdbus keys --help)") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} does not hold a key ({type(error).__name__})") from None
    if len(key) != 40:
        raise ConfigError(f"{path} does not hold a key (40 characters of Z85)")
    return key
