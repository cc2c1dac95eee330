"""Attacks on a live cluster, each in a process of its own: what they are aimed at, and one after the other in a soak.

Owns those processes and how much memory the parts take meanwhile. Judges nothing but that.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import BusError
from bus.rights import KeyRole
from bus.runtime.keys import add_key, give_key, new_keys
from bus.wire.messages import RankStatus
from pdbus.launcher import Cluster
from soak.attacks import ATTACKS, Ports
from soak.usage import usage_of

ATTACK = str(Path(__file__).parent / "attack.py")
ATTACK_S = 60.0  # one that is not over by then is ended
KILLED_S = 30.0  # for SIGKILL to act
LOOK_S = 0.05
PAUSE_S = (0.2, 3.0)  # between two attacks


def make_keys(directory: Path) -> tuple[str, str]:
    """Of a cluster and of the insiders that attack it: a client, and a node of another instance."""
    cluster, attackers = directory / "keys", directory / "attackers"
    new_keys(cluster)
    roles: tuple[KeyRole, ...] = ("clients", "nodes")
    for role in roles:
        add_key(cluster, role, "mallory")
        give_key(cluster, role, "mallory", attackers / role)
    return str(cluster), str(attackers)


def ports_of(cluster: Cluster, ranks: Iterable[RankStatus], keys: str = "") -> Ports:
    """Every endpoint of a cluster; `keys`: where the attackers' are."""
    bus, controller = BusAddress(cluster.bus), ControllerAddress(cluster.controller)
    ranks = tuple(ranks)
    return {
        "keys": keys,
        "publish": bus.publish, "subscribe": bus.subscribe, "bootstrap": bus.bootstrap,
        "clients": controller.clients, "nodes": controller.nodes,
        **{f"data {rank.instance}/{rank.dp_rank}": rank.endpoint for rank in ranks},
        **{f"epoch {rank.instance}/{rank.dp_rank}": str(rank.epoch) for rank in ranks},
    }  # fmt: skip


@contextmanager
def attacking(attack: str, ports: Ports) -> Iterator[Callable[[], int | None]]:
    """While this lasts, `attack` runs at `ports`; what is handed out gives its exit code, None while it still does.
    One that was ended since it took too long has the code 0."""
    child = subprocess.Popen([sys.executable, "-P", ATTACK, attack], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(json.dumps(ports).encode())
    until = time.monotonic() + ATTACK_S
    try:
        yield lambda: child.poll() if time.monotonic() < until else 0
    finally:
        child.kill()
        child.wait(KILLED_S)


class Attackers:
    """One thread that attacks and looks at memory, from `start` to `stop`. `ports` is asked before each attack, and
    may raise BusError: then there is nobody to attack for a moment."""

    def __init__(
        self, cluster: Cluster, rng: random.Random, ports: Callable[[], Ports],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.attacks: Counter[str] = Counter()
        self.troubles: list[str] = []  # attacks that failed themselves
        self.rss_max_bytes = 0  # of one part
        self._cluster = cluster
        self._rng = rng
        self._ports = ports
        self._say = say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attackers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        coming: list[str] = []
        while not self._stopping.is_set():
            try:
                ports = self._ports()
            except BusError:
                self._wait(1.0)
                continue
            coming = coming or self._rng.sample(list(ATTACKS), len(ATTACKS))
            attack = coming.pop()
            self._say(f"attack {attack}")
            with attacking(attack, ports) as over:
                while over() is None and not self._stopping.is_set():
                    self._wait(LOOK_S)
                if over():
                    self.troubles.append(f"the attack {attack} itself failed")
            self.attacks[attack] += 1
            self._wait(self._rng.uniform(*PAUSE_S))

    def _wait(self, seconds: float) -> None:
        """And look, how much memory the parts take."""
        self._stopping.wait(seconds)
        sizes = [usage_of([child.pid]).rss_bytes for child in list(self._cluster.children.values())]
        self.rss_max_bytes = max(self.rss_max_bytes, *sizes)
