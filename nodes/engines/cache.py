"""Files made once in the user's cache and shared by all processes. Owns the place, the lock and the atomic rename."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from bus.errors import ConfigError

Progress = Callable[[str, float], None]  # (what is being done, fraction done)


def no_progress(what: str, fraction: float) -> None:
    """For callers who don't look."""


def cache_root() -> Path:
    """`$PDBUS_CACHE`, else `$XDG_CACHE_HOME/pdbus`, else `~/.cache/pdbus`."""
    if chosen := os.environ.get("PDBUS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdbus"


def made_once(name: str, make: Callable[[Path], None], progress: Progress = no_progress) -> Path:
    """The cached directory `name`; if it is not there yet, `make` fills an empty one that then takes that name.

    Processes that want it meanwhile wait for the one that makes it. A process that dies leaves nothing half made.
    ConfigError when the cache cannot be written.
    """
    target = cache_root() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / f".{name}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another process to prepare the model", 0.0)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _make(target, make)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model cache {target.parent} ({error.strerror or error}); "
            "set PDBUS_CACHE to a directory with 600 MB free"
        ) from None
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.part-"
    for left in target.parent.glob(f"{prefix}*"):  # we hold the lock, so whoever made it has died
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        make(part)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
