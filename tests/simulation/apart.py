"""A Python process of its own for trials: its hashes are those of every other such process, so trials are the same."""

from __future__ import annotations

import os
import subprocess
import sys

import cuts


def run(*arguments: str) -> tuple[int, str]:
    """Run Python with these arguments and return its exit code and its output."""
    path = os.pathsep.join(str(cuts.ROOT / each) for each in ("tests", "tests/support"))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cuts.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
