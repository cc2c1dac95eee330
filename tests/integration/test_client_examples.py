"""The client's examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdbus.launcher import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "words"), [("client_sync.py", "60 tokens from"), ("client_async.py", "Name a planet.")]
)
def test_example(pdbus_cluster: Callable[..., Cluster], name: str, words: str) -> None:
    cluster = pdbus_cluster(prefill=1, decode=1, node_args=("--sim-timing", "zero"))
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / name), cluster.controller],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
