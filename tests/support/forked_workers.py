"""The workers of pytest-xdist are forks of one process that has imported all tests: a start costs the listing alone.

Each worker would import every test and what these need, some seven seconds of CPU (twice that in a fresh clone, where
the assertions of each file are first rewritten). Here a server does so once, as a worker would: with the same options
and the same `sys.path`. What it could not import a worker tries itself, and says why not. Hypothesis reads the sources
of all modules for constants, another second or two, which each worker has from there, too.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import warm_starts

WAIT_S = 300.0  # for all imports, on a machine that is busy
BOOTSTRAP = "import sys;exec(eval(sys.stdin.readline()))"  # what execnet runs as a program


class Workers(warm_starts.Starts):
    """The starts of workers in the process that hands out the tests."""

    def __init__(self, args: Sequence[str]) -> None:
        """`args`: pytest's own."""
        super().__init__()
        self._args = list(args)

    def program(self, args: Any) -> warm_starts.Request | None:
        if args != [sys.executable, "-u", "-c", BOOTSTRAP]:
            return None
        return {"line": args, "safe": False, "module": "", "code": args[-1], "argv": ["-c"]}

    def launch(self, seed: str = "") -> socket.socket:
        said = {"args": self._args, "path": sys.path}
        return warm_starts.launch([os.path.abspath(__file__), json.dumps(said)], WAIT_S)


class OnlyImported:
    """Makes a session of pytest one that only imports. It states, as a worker does, that it keeps nothing."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.workerinput = {"workerid": "gw"}  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []  # each worker lists the tests of the modules that are imported here

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        return True


def import_tests(args: Sequence[str], path: Sequence[str]) -> list[random.Random]:
    """As a session with these arguments does. Nothing draws anew: what a test has seeded stays so."""
    mine, sys.path = sys.path, list(path)
    pytest.main([*args, "-n0"], plugins=[OnlyImported()])
    sys.path = mine
    read_constants()
    return []


def read_constants() -> None:
    """Draw, until it has been a constant: one in twenty is, and before the first of them Hypothesis reads sources."""
    from hypothesis import HealthCheck, Phase, given, settings  # pytest warns of what was imported before it
    from hypothesis import strategies as st

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.integers())
    def draw(number: int) -> None:
        pass

    draw()


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    warm_starts.main(lambda: import_tests(said["args"], said["path"]))
