"""The embedding examples run as they stand, quickly, and say what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("embed_broker.py", "the broker is heard by publishers: True"),
        ("embed_scheduler.py", "room 4711 is prefilled by prefill-0/3 at tcp://10.0.0.7:7000"),
    ],
)
def test_an_example_runs(name: str, said: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
