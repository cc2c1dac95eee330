"""An environment with somebody's real engine or tools, made once for each set of pins, outside the tree.

It is `NAME-HASH_OF_WHAT_MAKES_IT` in the cache that pdbus uses for its models. pip and npm read their own
configuration, as they would by hand: an index with a CPU build of torch saves 3 GB. Imports nothing but the standard
library.
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

    def make(place: Path) -> None:
        _make(place, pins)
        if finish is not None:
            finish(place)

    return _place_of(name, says, (pins, *also), takes, make) / "bin" / "python"


def programs_of(name: str, says: str, package: Path, *, takes: str) -> Path:
    """The folder of the programs of the npm packages that `package` (a package.json) pins, made first if it is not
    there."""

    def make(place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copy(package, place / "package.json")
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(npm, check=True, cwd=place, stdout=sys.stderr)

    return _place_of(name, says, (package,), takes, make) / "node_modules" / ".bin"


def _place_of(name: str, says: str, files: tuple[Path, ...], takes: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` makes by `files`, once."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    key = sha256(b"".join(path.read_bytes() for path in files) + version.encode()).hexdigest()[:12]
    place = cache_root() / f"{name}-{key}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if not (place / "ready").exists():
            print(f"==> {says} in {place} (once; {takes})", file=sys.stderr, flush=True)
            make(place)
            (place / "ready").touch()
    return place


def _make(place: Path, pins: Path) -> None:
    wanted, alone, out = sections(pins)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps = ((["install"], wanted), (["install", "--no-deps"], alone), (["uninstall", "--yes"], out))
    for step, packages in steps:
        if packages:
            subprocess.run([*pip, *step, *packages], check=True, stdout=sys.stderr)
