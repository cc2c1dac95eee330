"""Keeps the parts of a started cluster running. It waits for events of the parts and carries out the decisions of
`restarts`; it decides nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import NoReturn, Protocol

from bus.errors import StartError
from pdbus.launcher.child import Child
from pdbus.launcher.restarts import Again, GiveUp, PartState, RestartPolicy, Restarts, Start

POLL_S = 0.25
EXIT_S = 1.0  # how long a process may take to end after its last output
LAST_LINES = 10


class Started(Protocol):
    """The parts to keep running: a `Cluster`, or the parts of one machine. `children` are their processes by name."""

    @property
    def children(self) -> dict[str, Child]: ...

    def poll(self) -> list[str]:
        """Return the names of the parts that have ended, without waiting."""

    def begin(self, part: str) -> Child:
        """Restart a part that has ended, without waiting for its READY. Raises StartError if it cannot be run."""


class Supervisor:
    """Restarts the parts of a cluster that end without being asked to, at the same addresses: `Supervisor(cluster,
    policy, notify).run()`. All parts must serve when it is made. `notify` gets a line for each event. For one
    thread."""

    def __init__(self, cluster: Started, policy: RestartPolicy, notify: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._notify = notify
        self._limit = policy.limit
        duties = {name: child.spec.duty for name, child in cluster.children.items()}
        self._core = Restarts(duties, policy, time.monotonic())

    def run(self) -> NoReturn:
        """Keep the parts running; it never returns. Raises StartError when it gives up a part that the cluster needs;
        Ctrl-C ends it too. Other parts go on running then."""
        while True:
            self.turn()

    def turn(self, timeout_s: float = POLL_S) -> None:
        """Handle what happened to the parts (ends, READY lines, due restarts), waiting up to `timeout_s` for it. Raises
        StartError as `run` does."""
        self._listen(min(timeout_s, self._core.wait_s(time.monotonic())))
        running = (PartState.SERVING, PartState.STARTING)
        for name in self._cluster.poll():
            if self._core.state(name) in running:
                child = self._cluster.children[name]
                self._ended(name, child.returncode, child.cause() if child.returncode else "it has left")
        for name, child in self._cluster.children.items():
            if self._core.state(name) is PartState.STARTING and child.ready:
                self._core.ready(name, time.monotonic())
                self._notify(f"{name} is back (pid {child.pid})")
        for action in self._core.due(time.monotonic()):
            if isinstance(action, Start):
                self._start(action.part)
            else:
                child = self._cluster.children[action.part]
                child.close()
                self._ended(action.part, child.returncode, f"{action.cause}; {child.cause()}")

    def _listen(self, timeout_s: float) -> None:
        """Wait for output of the parts: a READY line, or the close of stdout at their end."""
        living = [child for child in self._cluster.children.values() if child.returncode is None]
        by_descriptor = {child.fileno: child for child in living if not child.silent and not child.closed}
        for descriptor in wait(list(by_descriptor), timeout_s):
            assert isinstance(descriptor, int)
            child = by_descriptor[descriptor]
            if not child.read():
                child.wait(EXIT_S)

    def _start(self, part: str) -> None:
        try:
            child = self._cluster.begin(part)
        except StartError as error:
            self._ended(part, None, str(error))
        else:
            if child.unlogged:
                self._notify(f"{part}: it starts without a log: {child.unlogged}")

    def _ended(self, part: str, code: int | None, cause: str) -> None:
        verdict = self._core.exited(part, code, cause, time.monotonic())
        if isinstance(verdict, Again):
            self._notify(
                f"{part}: {cause}; starts again in {verdict.delay_s:g} s ({verdict.number} of at most {self._limit})"
            )
        elif isinstance(verdict, GiveUp):
            for line in self._cluster.children[part].last_lines()[-LAST_LINES:]:
                self._notify(f"{part} | {line[:1000]}")
            raise StartError(f"{part}: {cause}; gave up: {verdict.why}")
        else:
            self._notify(f"{part} has left ({cause}); the others go on" if code else f"{part} has left")
