"""An environment with somebody's real engine or tools, made once for each set of pins, outside the tree.

It is `NAME-HASH_OF_WHAT_MAKES_IT` in the cache that pdbus uses for its models. pip reads its own configuration, as it
would by hand: an index with a CPU build of torch saves 3 GB. Imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path


def cache_root() -> Path:
    """As `nodes.own.engines.cache.cache_root`, which can't be imported yet."""
    if chosen := os.environ.get("PDBUS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdbus"


def sections(pins: Path) -> tuple[list[str], list[str], list[str]]:
    """(pins, pins without their dependencies, what is taken out again)"""
    found: dict[str, list[str]] = {"": [], "--no-deps": [], "--uninstall": []}
    current = found[""]
    for line in pins.read_text().splitlines():
        if line in found:
            current = found[line]
        elif line and not line.startswith("#"):
            current.append(line)
    return found[""], found["--no-deps"], found["--uninstall"]


def python_of(
    name: str,
    says: str,
    pins: Path,
    *also: Path,
    takes: str = "some minutes, 4 GB",
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """The Python of an environment with `pins`, made first if it is not there. `finish` does to it what pip can't, by
    the files `also`."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    key = sha256(b"".join(path.read_bytes() for path in (pins, *also)) + version.encode()).hexdigest()[:12]
    place = cache_root() / f"{name}-{key}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if not (place / "ready").exists():
            print(f"==> {says} in {place} (once; {takes})", file=sys.stderr, flush=True)
            _make(place, pins)
            if finish is not None:
                finish(place)
            (place / "ready").touch()
    return place / "bin" / "python"


def _make(place: Path, pins: Path) -> None:
    wanted, alone, out = sections(pins)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps = (["install", *wanted], ["install", "--no-deps", *alone], ["uninstall", "--yes", *out])
    for step in steps:
        if len(step) > 2:
            subprocess.run([*pip, *step], check=True, stdout=sys.stderr)
