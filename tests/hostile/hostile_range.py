"""A live cluster, attackers in a process of their own, an honest client beside them, and what became of all three."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fault_rig import Rig, rig
from soak.attackers import attacking, ports_of
from soak.attacks import Ports
from soak.usage import usage_of

from pdbus.launcher import Cluster, ClusterSpec

QUICK = ("--sim-base-s", "0.002", "--sim-prefill-s-per-token", "0.0001")


@dataclass
class Outcome:
    """What an attack did: parts that ended, the highest resident memory of one part, latencies of honest requests, and
    how long one took that began when the attack was over."""

    died: list[str] = field(default_factory=list)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    grown_bytes: dict[str, int] = field(default_factory=dict)
    honest_s: list[float] = field(default_factory=list)
    back_s: float = 0.0


class Range:
    """`with firing_range("ipc") as range_: outcome = range_.under("long_topic")`."""

    def __init__(self, cluster: Cluster, rig: Rig, keys: str = "") -> None:
        self.cluster = cluster
        self.rig = rig
        self.keys = keys

    def ports(self) -> Ports:
        return ports_of(self.cluster, self.rig.status().ranks, self.keys)

    def under(self, attack: str, ports: Ports | None = None) -> Outcome:
        """Requests one after the other while `attack` goes on (at other `ports` than the cluster's), and one from the
        moment it is over."""
        pids = {name: child.pid for name, child in self.cluster.children.items()}
        outcome = Outcome()
        with _watched(pids, outcome), attacking(attack, ports or self.ports()) as over:
            after = ""
            while not after and not self.cluster.poll():
                rid, began = self.rig.begin(20, 8), time.monotonic()
                self.rig.until(lambda rid=rid: rid in self.rig.results or over() is not None, f"{rid} or {attack} ends")
                if over() is not None:
                    after, began_after = self.rig.begin(20, 8), time.monotonic()
                    self.rig.ended(after)
                    outcome.back_s = self.rig.ended_at[after] - began_after
                self.rig.ended(rid)
                outcome.honest_s.append(self.rig.ended_at[rid] - began)
            assert not over(), f"the attack {attack} itself failed"
        outcome.died = self.cluster.poll()
        return outcome


@contextmanager
def _watched(pids: dict[str, int], outcome: Outcome) -> Iterator[None]:
    """Note each part's highest resident memory, looked at every 20 ms."""
    start = {name: usage_of([pid]).rss_bytes for name, pid in pids.items()}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for name, pid in pids.items():
                rss = usage_of([pid]).rss_bytes
                outcome.rss_bytes[name] = max(rss, outcome.rss_bytes.get(name, 0))
                outcome.grown_bytes[name] = outcome.rss_bytes[name] - start[name]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def firing_range(transport: str, keys: str = "", attackers: str = "") -> Iterator[Range]:
    """`attackers`: where the keys of insiders are."""
    spec = ClusterSpec(
        prefill=1, decode=1, engine="sim", model="sim", transport=transport, keys=keys, node_args=QUICK,  # type: ignore[arg-type]
    )  # fmt: skip
    with Cluster(spec) as cluster, rig(cluster) as made:
        yield Range(cluster, made, attackers)
