"""Trials in a process of their own: they are the same where hashes are."""

from __future__ import annotations

import os
import subprocess
import sys

import cuts


def run(*arguments: str) -> tuple[int, str]:
    """The exit code of a Python process, and what it said."""
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
