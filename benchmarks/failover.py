"""`failover`: from SIGKILL of a node's process until all that ran there is dispatched again, none of it having a token.

Two node processes of two ranks; one of them dies while its ranks compute prompts of ten seconds. Its controller notices
with the next dispatch to it, or where nothing more is submitted with its next ping, and gives the ranks a moment to
come back. A figure is of all kills, one a run: the least, the median and the greatest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import zmq

from benchmarks.harness import Row, Scope, row
from bus.endpoints import ControllerAddress
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, Accepted, Cancel, Params, Submit
from pdbus.launcher import Cluster, ClusterSpec

PROMPT_TOKENS = 2000
RUNNING = 32
LOAD_S = 0.02  # between submits
WAIT_S = 60.0
TRANSPORTS: tuple[Literal["ipc", "tcp"], ...] = ("ipc", "tcp")
NODES = (
    "--sim-prefill-s-per-token", "0.005", "--sim-kv-bytes-per-token", "1", "--kv-tokens", "1000000",
    "--max-running", "256",
)  # fmt: skip


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    rows = []
    for transport in TRANSPORTS[: scope.size(2, 1)]:
        scope.show(f"starting two node processes over {transport}")
        spec = ClusterSpec(
            unified=2, unified_instances=2, ranks_per_process=2, engine="sim", model="sim", transport=transport,
            unified_method="total_tokens", node_args=NODES,
        )  # fmt: skip
        with Cluster(spec) as cluster, Sockets() as sockets:
            killer = _Killer(cluster, sockets.dealer(ControllerAddress(cluster.controller).clients))
            for loaded in (True, False)[: scope.size(2, 1)]:
                took_s = []
                for number in range(scope.runs):
                    scope.show(f"{transport}, kill {number + 1} of {scope.runs}")
                    took_s.append(killer.kill(loaded))
                case = f"{transport}, {1 / LOAD_S:.0f} submits/s" if loaded else f"{transport}, nothing more submitted"
                for name, of in (("least", min), ("median", statistics.median), ("greatest", max)):
                    rows.append(row(case, f"{name} of {len(took_s)} kills", "s", [of(took_s)]))
    return rows


class _Killer:
    """One client, which reads no streams."""

    def __init__(self, cluster: Cluster, dealer: Socket) -> None:
        self._cluster = cluster
        self._dealer = dealer
        self._rids: list[str] = []

    def kill(self, loaded: bool) -> float:
        """Seconds until the last request has its second attempt. What was killed before is started again first."""
        for part in self._cluster.poll():
            self._cluster.restart(part)
        end = time.monotonic() + WAIT_S
        while not self._whole():
            if time.monotonic() > end:
                raise TimeoutError("the ranks are not ready and idle")
            time.sleep(0.05)
        rids = {self._submit() for _ in range(RUNNING)}
        at: dict[str, str] = {}
        for accepted in self._accepted(lambda: None):
            if accepted.rid in rids and accepted.decode is not None:
                at[accepted.rid] = accepted.decode.instance
            if len(at) == RUNNING:
                break
        dead = at[min(at)]
        moving = {rid for rid in rids if at[rid] == dead}
        part = next(name for name in self._cluster.children if name.startswith(dead))
        began = time.perf_counter()
        self._cluster.kill(part)
        for accepted in self._accepted(self._submit if loaded else lambda: None):
            if accepted.attempt > 1 and accepted.decode is not None and accepted.decode.instance != dead:
                moving.discard(accepted.rid)
            if not moving:
                break
        took_s = time.perf_counter() - began
        for rid in self._rids:
            self._dealer.send(codec.encode(Cancel(rid)))
        self._rids.clear()
        return took_s

    def _submit(self) -> str:
        rid = f"r{time.monotonic_ns()}"
        submit = Submit(rid, "unified", PROMPT_TOKENS, 2, continue_on_disconnect=True)
        self._dealer.send_multipart([codec.encode(submit), bytes(4 * PROMPT_TOKENS), codec.encode(Params())])
        self._rids.append(rid)
        return rid

    def _accepted(self, each: Callable[[], object]) -> Iterator[Accepted]:
        """Yield what is accepted, and call `each` every LOAD_S. TimeoutError after WAIT_S."""
        end, due = time.monotonic() + WAIT_S, 0.0
        while (now := time.monotonic()) < end:
            if now >= due:
                each()
                due = now + LOAD_S
            if self._dealer.poll(round(1000 * LOAD_S), zmq.POLLIN):
                message = codec.decode(self._dealer.recv(), CONTROLLER_TO_CLIENT)
                if isinstance(message, Accepted):
                    yield message
        raise TimeoutError("requests were not dispatched again")

    def _whole(self) -> bool:
        """All four ranks are there, have said so, and are idle."""
        status = self._cluster.status()
        loads = [rank.load for rank in status.ranks if rank.state == "ready"]
        return len(loads) == 4 and not any(load is None or load.running or load.waiting for load in loads)
