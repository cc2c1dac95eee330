"""The workers of pytest-xdist are forks of one process that has imported and listed all tests: a start costs little.

Each worker would import every test and what these need, some seven seconds of CPU (twice that in a fresh clone, where
the assertions of each file are first rewritten), and make the list of all tests. Here a server does so once, as a
worker would: with the same options and the same `sys.path`. Each worker takes over its session, whose tests then belong
to the worker's own configuration (`Listed`). Where something could not be imported a worker lists itself, and says why.
Hypothesis reads the sources of all modules for constants, another second or two, which each worker has from there, too.
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


class Listed:
    """A plugin of the server's session, which lists tests and runs none. It states, as a worker does, that it keeps
    nothing. Afterwards the next session of this process or a fork of it, of another configuration, is this one."""

    def __init__(self) -> None:
        self._session: pytest.Session | None = None
        self._path = list(sys.path)  # before folders of tests were added

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.workerinput = {"workerid": "gw"}  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:  # what failed a worker is to say itself
            self._session = session
        return True

    def hand_over(self) -> None:
        """Have the next session be this one, if it could list all."""
        if (session := self._session) is None:
            return
        fixtures, made = session._fixturemanager, pytest.Session.from_config
        folders = [each for each in sys.path if each not in self._path]

        def from_config(config: pytest.Config) -> pytest.Session:
            pytest.Session.from_config = made  # type: ignore[method-assign]
            session.perform_collect = collect  # type: ignore[assignment, method-assign]
            for node in {node for item in session.items for node in item.listchain()}:
                node.config = config
            config.pluginmanager.register(session, name="session")
            return session

        def collect() -> list[pytest.Item]:
            """In place of `perform_collect`: the tests are known, the new configuration's plugins are told of them."""
            config = session.config
            session._fixturemanager, fixtures.config = fixtures, config
            sys.path[:0] = [each for each in folders if each not in sys.path]
            for folder in sorted({item.path.parent for item in session.items}):
                config.pluginmanager._loadconftestmodules(
                    folder, config.getoption("importmode"), config.rootpath,
                    consider_namespace_packages=config.getini("consider_namespace_packages"),
                )  # fmt: skip
            config.hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
            config.hook.pytest_collection_finish(session=session)
            session.testscollected = len(session.items)
            return session.items

        pytest.Session.from_config = from_config  # type: ignore[assignment, method-assign]


def list_tests(args: Sequence[str], path: Sequence[str]) -> list[random.Random]:
    """As a session with these arguments does. Nothing draws anew: what a test has seeded stays so."""
    mine, sys.path = sys.path, list(path)
    listed = Listed()
    pytest.main([*args, "-n0"], plugins=[listed])
    listed.hand_over()
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
    warm_starts.main(lambda: list_tests(said["args"], said["path"]))
