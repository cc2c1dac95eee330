"""A live cluster, a client channel, and a ledger of everything it delivers: what the fault tests share."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from soak.ledger import Ledger

from bus.errors import PeerLost
from bus.wire.messages import RankStatus, Role, Status, StatusQuery
from nodes.own.engines.sim import sim_generate
from pdbus.client.channel import Channel
from pdbus.client.options import Options, controllers_of, make_request, patience
from pdbus.client.output import Result
from pdbus.client.traffic import Update
from pdbus.launcher import Cluster

WAIT_S = 60.0  # of a busy machine; a wait that succeeds ends with its event
LEASE_S = 0.8
# A prompt of 300 tokens takes 0.3 s, then a token 5 ms, and its KV cache 1.2 MB: every stage can be met.
TIMING = ("--sim-base-s", "0.005", "--sim-prefill-s-per-token", "0.001", "--sim-decode-s", "0",
          "--sim-context-s-per-token", "0", "--sim-kv-bytes-per-token", "4096", "--kv-tokens", "8192")  # fmt: skip
CONTROLLER_ARGS = ("--lease-s", str(LEASE_S), "--hang-s", "6.0", "--stale-s", "0.6")


class Rig:
    """`with rig(cluster) as r:`. Every request must end well unless the test says otherwise (`check`)."""

    def __init__(self, cluster: Cluster, *, retries: int = 10, address: str = "", keys: str = "") -> None:
        self.cluster = cluster
        self.ledger = Ledger(f"t{time.monotonic_ns()}-")
        self.results: dict[str, Result] = {}
        self.ended_at: dict[str, float] = {}  # of those
        self.tokens: dict[str, list[int]] = {}
        self._where = controllers_of(address or cluster.controller, None, None)
        self._updates: queue.SimpleQueue[tuple[str, Update]] = queue.SimpleQueue()
        self.channel = Channel(self._where.endpoints, patience(retries, WAIT_S), keys=keys or cluster.spec.keys)
        self._numbers = iter(range(1, 1_000_000))

    def begin(self, prompt: list[int] | int = 300, max_tokens: int = 40, **options: Any) -> str:
        """Submit; returns the rid. A number is the length of a prompt made up here."""
        if isinstance(prompt, int):
            first = next(self._numbers)
            prompt = [3 + (first * 37 + at * 11) % 500 for at in range(prompt)]
        rid = self.ledger.begin(sim_generate(prompt, max_tokens), time.monotonic())
        self.tokens[rid] = []
        options = {"leg": "pair"} | options | {"rid": rid, "max_tokens": max_tokens}
        request = make_request(prompt, Options(**options), self._where, self.channel.rng)  # type: ignore[typeddict-item]
        self.channel.begin(request, lambda update: self._updates.put((rid, update)))
        return rid

    @property
    def controller(self) -> str:
        """The client endpoint of its controller."""
        return self._where.decode

    # --- waiting ------------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
        """Take in what is delivered until `true()`, which is asked less often by and by; returns what that returned."""
        end, pause_s = time.monotonic() + wait_s, 0.01
        while not (found := true()):
            assert time.monotonic() < end, f"waited {wait_s:g} s until {what}; {self.results}"
            self.read(pause_s)
            pause_s = min(0.1, 1.1 * pause_s)
        return found

    def read(self, timeout_s: float = 0.0) -> None:
        try:
            rid, update = self._updates.get(timeout=timeout_s)
        except queue.Empty:
            return
        self.ledger.deliver(rid, update)
        if isinstance(update, Result):
            self.results[rid] = update
            self.ended_at[rid] = time.monotonic()
        else:
            self.tokens[rid].extend(update)

    def got(self, rid: str, count: int) -> None:
        """Until `count` tokens of it have come."""
        self.until(lambda: len(self.tokens[rid]) >= count or rid in self.results, f"{rid} has {count} tokens")

    def ended(self, *rids: str, wait_s: float = WAIT_S) -> Result:
        self.until(lambda: all(rid in self.results for rid in rids), f"{rids} end", wait_s)
        return self.results[rids[-1]]

    # --- looking ------------------------------------------------------------------------------------------------

    def status(self, timeout_s: float = WAIT_S) -> Status:
        answer = self.channel.ask(self._where.decode, StatusQuery, Status, timeout_s).result()
        assert isinstance(answer, Status)
        return answer

    def answers(self, timeout_s: float) -> bool:
        """Whether the controller answers in time."""
        try:
            self.status(timeout_s)
        except PeerLost:
            return False
        return True

    def rank(self, part: str) -> RankStatus | None:
        instance, _, number = part.partition("/")
        ranks = self.status().ranks
        return next((rank for rank in ranks if (rank.instance, rank.dp_rank) == (instance, int(number))), None)

    def holder(self, role: Role, rid: str) -> str:
        """The part whose rank of this role runs `rid`, the only request there is; nobody's when it ended meanwhile."""
        found: list[str] = []

        def looked() -> bool:
            ranks = self.status().ranks
            found.extend(f"{each.instance}/{each.dp_rank}" for each in ranks if each.role == role and each.outstanding)
            return bool(found) or rid in self.results

        self.until(looked, f"a {role} rank has {rid}")
        return found[0] if found else ""

    def idle(self, mend: Callable[[], object] = lambda: None) -> None:
        """Until every part is there, ready, and holds nothing: no request, no run slot, no KV token. `mend` is called
        before each look."""

        def nothing() -> bool:
            mend()
            status = self.status()
            names = {f"{rank.instance}/{rank.dp_rank}" for rank in status.ranks if rank.state == "ready"}
            wanted = {name for name, child in self.cluster.children.items() if child.spec.kind == "node"}
            loads = [rank.load for rank in status.ranks if rank.state == "ready"]
            return (
                wanted <= names
                and not status.counts["requests"]
                and all(load and not (load.running or load.waiting or load.kv_tokens) for load in loads)
            )

        try:
            self.until(nothing, "the cluster is whole and idle")
        except AssertionError as error:
            seen = self.status()
            ranks = [(r.instance, r.dp_rank, r.state, r.outstanding, r.load) for r in seen.ranks]
            raise AssertionError(f"{error}; {seen.counts['requests']} requests; {ranks}") from None

    def check(self, *, failed: dict[str, int] | None = None) -> None:
        """Every request ended once, rightly; those that failed did so with these codes."""
        ledger = self.ledger
        assert not ledger.live
        assert (ledger.duplicated, ledger.wrong) == (0, 0), ledger.complaints
        assert dict(ledger.failed) == (failed or {}), [r for r in self.results.values() if r.code != "ok"]

    # --- faults -------------------------------------------------------------------------------------------------

    def signal(self, part: str, number: int) -> None:
        os.kill(self.cluster.children[part].pid, number)

    @contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        """While this lasts the part is stopped (SIGSTOP), as if its machine hung."""
        self.signal(part, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(part, signal.SIGCONT)


@contextmanager
def rig(cluster: Cluster, *, retries: int = 10, address: str = "") -> Iterator[Rig]:
    """`address`: of a controller other than the cluster's first."""
    made = Rig(cluster, retries=retries, address=address)
    try:
        yield made
    finally:
        made.channel.stop()
