"""Ranks drain, join and leave a running cluster; two controllers share the same ranks; one of them dies."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_rig import CONTROLLER_ARGS, TIMING, Rig, rig

from pdbus.client.options import controllers_of
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec

pytestmark = pytest.mark.fault


@contextmanager
def part(cluster_directory: Path, name: str, module: str, *args: str) -> Iterator[Child]:
    """One more process, of any kind."""
    child = Child(PartSpec(name, "node", module, (*args, "--watch-parent")), cluster_directory / f"{name}.log", {})
    try:
        yield child
    finally:
        child.close()


def unified(cluster: Cluster, instance: str, dp_size: int, dp_ranks: str) -> tuple[str, ...]:
    return (
        "--bus", cluster.bus, "--controller", cluster.controller, "--instance", instance, "--dp-size", str(dp_size),
        "--dp-rank", dp_ranks, "--engine", "sim", "--model", "sim", "--data", f"ipc://{cluster.directory}", *TIMING,
    )  # fmt: skip


def test_ranks_join_and_leave_a_running_cluster_and_nothing_is_lost() -> None:
    spec = ClusterSpec(unified=1, engine="sim", model="sim", node_args=TIMING, controller_args=CONTROLLER_ARGS)
    with Cluster(spec) as cluster, rig(cluster) as live:
        live.idle()
        rids = [live.begin(40, 60, leg="unified") for _ in range(8)]
        live.got(rids[0], 1)
        with part(cluster.directory, "more", "nodes.unified", *unified(cluster, "unified-more", 3, "0-2")) as more:
            live.until(lambda: (more.read(), more.ready)[1], "the new ranks are ready")
            wanted = {("unified-more", n) for n in range(3)}
            live.until(
                lambda: wanted < {(r.instance, r.dp_rank) for r in live.status().ranks if r.state == "ready"},
                "and the controller counts with them",
            )
            rids += [live.begin(40, 60, leg="unified") for _ in range(12)]
            counts = live.until(
                lambda: {r.dispatched_total for r in live.status().ranks if r.instance == "unified-more"} - {0},
                "the new ranks get work",
            )
            assert counts
            more.send(signal.SIGTERM)  # in the middle of it
            live.ended(*rids)
            assert more.wait(60)
            assert more.returncode == 0
        live.check()
        live.until(
            lambda: {r.state for r in live.status().ranks if r.instance == "unified-more"} == {"gone"},
            "they have said goodbye",
        )
        live.ended(live.begin(40, leg="unified"))
        live.check()


def test_an_operator_drains_a_rank_over_the_controller() -> None:
    spec = ClusterSpec(unified=2, engine="sim", model="sim", node_args=TIMING)
    with Cluster(spec) as cluster, rig(cluster) as live, cluster.client() as client:
        live.idle()
        rids = [live.begin(40, 80, leg="unified") for _ in range(8)]
        for rid in rids:
            live.got(rid, 1)
        client.drain("unified-0", 1)
        more = [live.begin(40, leg="unified") for _ in range(4)]
        live.ended(*rids, *more)
        live.check()
        assert {live.results[rid].attempts for rid in rids} == {1}, "what ran there was finished there"
        assert {live.results[rid].decode.dp_rank for rid in more} == {0}  # type: ignore[union-attr]
        assert cluster.children["unified-0/1"].wait(60)
        assert cluster.children["unified-0/1"].returncode == 0


@pytest.fixture
def two() -> Iterator[tuple[Rig, Rig, Child]]:
    """Two controllers over the same ranks, and a client of each. The second is not the launcher's."""
    directory = Path(tempfile.mkdtemp(prefix="pd"))
    bus, second = f"ipc://{directory}/bus", f"ipc://{directory}/second"
    args = ("--name", "controller-1", "--bus", bus, "--controller", second, *CONTROLLER_ARGS)
    with part(directory, "controller-1", "controller", *args) as child:
        spec = ClusterSpec(
            prefill=2, decode=2, engine="sim", model="sim", bus=bus, prefill_method="total_tokens",
            decode_method="total_requests", node_args=(*TIMING, "--controller", second),
            controller_args=CONTROLLER_ARGS,
        )  # fmt: skip
        with Cluster(spec) as cluster, rig(cluster) as first, rig(cluster, address=second) as other:
            first.idle()
            yield first, other, child


def test_two_controllers_share_the_ranks_and_one_of_them_dies(two: tuple[Rig, Rig, Child]) -> None:
    first, other, child = two
    assert controllers_of(first.cluster.controller, None, None).decode != other.controller
    mine = [first.begin(60) for _ in range(12)]
    theirs = [other.begin(60) for _ in range(12)]
    first.got(mine[0], 1)
    other.got(theirs[0], 1)
    assert child.process.poll() is None
    first.cluster.kill("controller-0")
    other.ended(*theirs)
    other.check()
    other.idle()
    first.cluster.restart("controller-0")
    first.ended(*mine)
    first.check()
    first.idle()
    other.until(lambda: not any(rank.in_flight_requests for rank in other.status().ranks), "the other knows that too")


def test_both_controllers_see_the_work_of_the_other(two: tuple[Rig, Rig, Child]) -> None:
    """They do not all pick the same rank: with one at work, the other one's estimate of those ranks rises."""
    first, other, _ = two
    rids = [first.begin(300, 600) for _ in range(8)]
    first.got(rids[0], 1)
    estimates = other.until(
        lambda: [rank.estimate_requests for rank in other.status().ranks if rank.estimate_requests],
        "the other controller sees it",
    )
    assert estimates
    first.ended(*rids)
    first.check()
