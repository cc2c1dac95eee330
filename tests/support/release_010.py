"""The packages of release 0.1.0 as its wheel has them, built once from the repository's history into the cache."""

from __future__ import annotations

import fcntl
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from engine_venv import cache_root

ROOT = Path(__file__).parents[2]
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before 3.11.4


def commit() -> str:
    """Of the tag, else the one that wrote 0.1.0 into the changelog; empty where this checkout has neither."""
    if tagged := _git("rev-parse", "--verify", "--quiet", "v0.1.0^{commit}"):
        return tagged
    found = _git("log", "--reverse", "--format=%H", "-S## [0.1.0] - ", "--", "CHANGELOG.md").split()
    return found[0] if found and _git("rev-parse", "--is-shallow-repository") == "false" else ""


def packages(of: str) -> Path:
    """A folder for PYTHONPATH, which goes before an editable install of today's."""
    place = cache_root() / f"release-{of[:12]}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if not (place / "ready").exists():
            _build(of, place)
            (place / "ready").touch()
    return place


def _build(of: str, place: Path) -> None:
    archive = subprocess.run(["git", "-C", ROOT, "archive", of], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory(prefix="pd") as made:
        with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
            sources.extractall(made, **FILTER)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", f"{made}/wheel", made], check=True, stdout=sys.stderr)
        (wheel,) = Path(made, "wheel").glob("pdbus-0.1.0-*.whl")
        with zipfile.ZipFile(wheel) as held:
            held.extractall(place)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
