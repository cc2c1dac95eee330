"""Files that are made once in the user's cache and shared by all processes. This module owns the place, the lock and
the atomic rename.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bus.errors import ConfigError

LOOK_AGAIN_S = 0.2
_PROGRESS_BYTES = 128
Progress = Callable[[str, float], None]  # (what is being done, fraction done)


def no_progress(what: str, fraction: float) -> None:
    """Ignore the progress: the default where nothing shows it."""


def cache_root() -> Path:
    """Return the directory of cached files: `$PDBUS_CACHE`, else `$XDG_CACHE_HOME/pdbus`, else `~/.cache/pdbus`. It may
    not exist yet."""
    if chosen := os.environ.get("PDBUS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdbus"


def made_once(name: str, make: Callable[[Path, Progress], None], progress: Progress = no_progress) -> Path:
    """Return the cached directory `name` (one path component). If it is missing, call `make(directory, progress)` on an
    empty directory, then give it that name. It blocks meanwhile.

    Other processes that want it wait for the one that makes it, and report its progress (from the lock file). A process
    that dies leaves no incomplete directory. ConfigError for any OSError, also one of `make`; other errors of `make`
    pass.
    """
    target = cache_root() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(target.parent / f".{name}.lock") as lock:
            while not _locked(lock):
                progress(*_read_progress(lock))
                time.sleep(LOOK_AGAIN_S)

            def report(what: str, fraction: float) -> None:
                _write_progress(lock, what, fraction)
                progress(what, fraction)

            if not target.is_dir():
                _make(target, lambda part: make(part, report))
    except OSError as error:
        raise ConfigError(
            f"cannot write the model cache {target.parent} ({error.strerror or error}); "
            "set PDBUS_CACHE to a directory with 600 MB free"
        ) from None
    return target


def _opened(path: Path) -> IO[bytes]:
    """Open a file for reading and writing. It is made where it is missing, and never emptied: other processes may be
    reading it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)


def _locked(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_progress(lock: IO[bytes], what: str, fraction: float) -> None:
    lock.seek(0)
    lock.write(
        f"{fraction:.3f} {what}".encode().ljust(_PROGRESS_BYTES)
    )  # of one size, so that no reader gets half of it


def _read_progress(lock: IO[bytes]) -> tuple[str, float]:
    lock.seek(0)
    fraction, _, what = lock.read(_PROGRESS_BYTES).decode().strip().partition(" ")
    return (f"another process is {what}", float(fraction)) if what else ("waiting for another process", 0.0)


def _make(target: Path, make: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.part-"
    for left in target.parent.glob(f"{prefix}*"):  # we hold the lock, so its maker has died
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        make(part)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
