"""Nodes with a data port of their own (`--data tcp://host:port`): a later start is where the earlier one was, and
whoever was connected to that is connected to this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_rig import CONTROLLER_ARGS, TIMING, Rig, rig

from bus.runtime.ports import free_ports
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def live() -> Iterator[Rig]:
    port = free_ports("127.0.0.1", 2)
    prefill, decode = (("--data", f"tcp://127.0.0.1:{port + each}") for each in range(2))
    spec = ClusterSpec(
        prefill=1, decode=1, engine="sim", model="sim", transport="tcp", node_args=TIMING, prefill_args=prefill,
        decode_args=decode, controller_args=CONTROLLER_ARGS,
    )  # fmt: skip
    with Cluster(spec) as cluster, rig(cluster) as made:
        yield made


@pytest.mark.parametrize(("part", "tokens"), [("prefill-0/0", 0), ("prefill-0/0", 1), ("decode-0/0", 5)])
def test_a_later_start_is_not_taken_for_the_earlier_one(live: Rig, part: str, tokens: int) -> None:
    """Requests wait for the KV cache, fetch it, or stream from there when the process is killed; all end rightly."""
    rids = [live.begin(400, 60) for _ in range(4)]
    for rid in rids if tokens else ():
        live.got(rid, tokens)
    before = live.rank(part)
    live.cluster.kill(part)
    live.cluster.restart(part)
    after = live.rank(part)
    assert before is not None
    assert after is not None
    assert after.epoch != before.epoch
    live.ended(*rids)
    live.check()
