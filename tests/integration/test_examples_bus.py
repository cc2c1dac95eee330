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
        ("load_table.py", "to ranks [0, 1, 2, 3, 3, 2]\nestimates [4000, 300, 300, 200] tokens, [1, 1, 2, 2] requests"),
    ],
)
def test_an_example_runs(name: str, said: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_the_load_table_needs_no_sockets() -> None:
    loaded = "[m for m in ('zmq', 'bus.runtime') if m in sys.modules]"
    program = f"import runpy, sys; runpy.run_path(sys.argv[1]); print({loaded})"
    done = subprocess.run(
        [sys.executable, "-c", program, str(EXAMPLES / "load_table.py")], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
