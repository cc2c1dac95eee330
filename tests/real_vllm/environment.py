"""An environment with real vLLM for these tests, made once for each set of pins, outside the tree.

    python3 tests/real_vllm/environment.py            # prints its Python; the first time takes some minutes and 4 GB

It is `vllm-HASH_OF_PINS` in the cache that pdbus uses for its models. pip reads its own configuration, as it would by
hand: an index with a CPU build of torch saves 3 GB. Imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

PINS = Path(__file__).parent / "pins.txt"


def cache_root() -> Path:
    """As `nodes.own.engines.cache.cache_root`, which can't be imported yet."""
    if chosen := os.environ.get("PDBUS_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdbus"


def sections() -> tuple[list[str], list[str], list[str]]:
    """(pins, pins without their dependencies, what is taken out again)"""
    found: dict[str, list[str]] = {"": [], "--no-deps": [], "--uninstall": []}
    current = found[""]
    for line in PINS.read_text().splitlines():
        if line in found:
            current = found[line]
        elif line and not line.startswith("#"):
            current.append(line)
    return found[""], found["--no-deps"], found["--uninstall"]


def make(place: Path) -> None:
    pins, alone, out = sections()
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for step in (["install", *pins], ["install", "--no-deps", *alone], ["uninstall", "--yes", *out]):
        subprocess.run([*pip, *step], check=True, stdout=sys.stderr)
    (place / "ready").touch()


def main() -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    key = sha256(PINS.read_bytes() + version.encode()).hexdigest()[:12]
    place = cache_root() / f"vllm-{key}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if not (place / "ready").exists():
            print(f"==> real vLLM in {place} (once; some minutes, 4 GB)", file=sys.stderr, flush=True)
            make(place)
    print(place / "bin" / "python")


if __name__ == "__main__":
    main()
