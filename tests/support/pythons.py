"""The Pythons of this machine that pdbus is for, by minor version, the oldest patch of each.

    python3 tests/support/pythons.py            # lines such as "3.11 /usr/bin/python3.11", the oldest first
    python3 tests/support/pythons.py newest     # the path of the newest (or oldest)

`python3` may be that of a version manager, so its other versions and /usr/bin are looked at too. One that cannot make
virtual environments is of no use here. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MINORS = range(11, 15)
LOOK_S = 30.0
ASK = "import ensurepip, sys, venv; print(*sys.version_info[:3], sys.version_info.releaselevel)"


def folders() -> list[Path]:
    """Where a Python may be."""
    home = Path.home()
    path = [Path(each) for each in os.environ.get("PATH", "").split(os.pathsep) if each]
    managed = [
        *(Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions").glob("*/bin"),
        *(home / ".local" / "share" / "uv" / "python").glob("*/bin"),
    ]
    return [*path, *managed, Path("/usr/local/bin"), Path("/usr/bin")]


def found(among: Iterable[Path]) -> dict[int, Path]:
    """By minor version, ascending: of several patches the oldest, of equals the first."""
    best: dict[int, tuple[int, Path]] = {}
    seen = set[Path]()
    for folder in among:
        for path in sorted(folder.glob("python3*")):
            if not re.fullmatch(r"python3(\.\d+)?", path.name) or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            if (version := _version(path)) is None or version[1] not in MINORS:
                continue
            minor, patch = version[1:]
            if minor not in best or patch < best[minor][0]:
                best[minor] = patch, path
    return {minor: best[minor][1] for minor in sorted(best)}


def _version(path: Path) -> tuple[int, int, int] | None:
    """None for one that does not run (a version manager's shim of a version that is not chosen), or is no release."""
    try:
        asked = subprocess.run([path, "-I", "-c", ASK], capture_output=True, text=True, timeout=LOOK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor, patch, level = asked.stdout.split()
    return (int(major), int(minor), int(patch)) if level == "final" else None


if __name__ == "__main__":
    here = found(folders())
    if not here:
        sys.exit("pythons: error: no Python 3.11 to 3.14 is here")
    match sys.argv[1:]:
        case ["oldest"]:
            print(next(iter(here.values())))
        case ["newest"]:
            print(list(here.values())[-1])
        case []:
            for minor, path in here.items():
                print(f"3.{minor} {path}")
        case _:
            sys.exit("usage: pythons.py [oldest|newest]")
