"""Breaks the processes of a cluster at random, and mends them. Owns what is broken now; judges nothing.

Kinds of faults: `kill` (SIGKILL, started again at once, soon, or after the lease), `stop` (SIGSTOP for less or more
than the lease, then SIGCONT), `drain` (SIGTERM, which must end with exit code 0, then started again). Never the last
whole rank of a role at once, so that the cluster could always serve.
"""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

from bus.errors import StartError
from pdbus.launcher import Cluster

WEIGHTS = {"kill": 5, "stop": 3, "drain": 2}
DOWN_S = (0.0, 0.0, 0.3, 1.0, 4.0)
DRAIN_WAIT_S = 30.0


class Chaos:
    """One thread chooses, each fault runs on its own. `stop` mends everything and returns when all is whole."""

    def __init__(
        self, cluster: Cluster, rng: random.Random, *, every_s: float, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.faults: Counter[str] = Counter()  # "kill prefill-0/1" -> times
        self.troubles: list[str] = []  # what no fault of ours explains: exits, codes, starts that failed
        self._cluster = cluster
        self._rng = rng
        self._every_s = every_s
        self._say = say
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._chooser = threading.Thread(target=self._run, name="chaos", daemon=True)

    @property
    def kills(self) -> int:
        """Faults of all kinds so far."""
        return sum(self.faults.values())

    def start(self) -> None:
        self._chooser.start()

    def stop(self) -> None:
        self._stopping.set()
        self._chooser.join()
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Start again whatever left on its own accord, and keep it in mind."""
        for part in self._cluster.poll():
            with self._lock:
                if part in self._busy:
                    continue
                self._busy.add(part)
            self.troubles.append(f"left by itself: {self._cluster.children[part].failure()}")
            self._say(self.troubles[-1])
            self._mend(part)

    def strike(self, part: str, kind: str) -> None:
        """One fault, from beginning to end; returns when the part is whole again."""
        self.faults[f"{kind} {part}"] += 1
        child = self._cluster.children[part]
        if kind == "stop":
            child.send(signal.SIGSTOP)
            self._stopping.wait(self._rng.choice((0.2, 1.0, 2.5, 5.0)))
            child.send(signal.SIGCONT)
            with self._lock:
                self._busy.discard(part)
            return
        if kind == "kill":
            self._cluster.kill(part)
            self._stopping.wait(self._rng.choice(DOWN_S))
        else:
            child.send(signal.SIGTERM)
            if not child.wait(DRAIN_WAIT_S):
                self.troubles.append(f"{part} did not leave within {DRAIN_WAIT_S:g} s of SIGTERM")
            elif child.returncode != 0:
                self.troubles.append(f"{part} left with exit code {child.returncode} after SIGTERM")
        self._mend(part)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s * self._rng.uniform(0.5, 1.5)):
            self.check()
            part = self._choose()
            if part is None:
                continue
            kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self.strike, args=(part, kind), name=f"{kind} {part}", daemon=True)
            self._threads.append(thread)
            self._say(f"{kind} {part}")
            thread.start()

    def _choose(self) -> str | None:
        with self._lock:
            children = self._cluster.children
            whole = [part for part in children if part not in self._busy]
            left = Counter(children[part].spec.module for part in whole)
            free = [
                part for part in whole if children[part].spec.kind != "node" or left[children[part].spec.module] > 1
            ]
            if not free:
                return None
            part = self._rng.choice(free)
            self._busy.add(part)
            return part

    def _mend(self, part: str) -> None:
        try:
            self._cluster.restart(part)
        except StartError as error:
            self.troubles.append(f"did not start again: {error}")
            self._say(self.troubles[-1])
        with self._lock:
            self._busy.discard(part)
