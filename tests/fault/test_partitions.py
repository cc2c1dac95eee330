"""A node cut off from its controller but not from the bus, and the other way round: told apart, used again later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cut_links import far, far_node, state
from fault_rig import CONTROLLER_ARGS, TIMING, Rig, rig

from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With the controllers' options that the test asks for."""
    spec = ClusterSpec(
        unified=1, engine="sim", model="sim", unified_method="total_requests", node_args=TIMING,
        controller_args=request.param,
    )  # fmt: skip
    with Cluster(spec) as cluster, rig(cluster) as made:
        yield made


@pytest.mark.parametrize("live", [CONTROLLER_ARGS], indirect=True, ids=[""])
def test_cut_off_from_its_controller_it_is_lost_and_what_ran_there_goes_on_elsewhere(live: Rig) -> None:
    live.idle()
    with far_node(live) as (link, _):
        rids = [live.begin(60, 400, leg="unified") for _ in range(6)]
        for rid in rids:
            live.got(rid, 1)
        live.until(lambda: (rank := far(live)) is not None and rank.outstanding, "it has some of them")
        link.cut()
        live.until(lambda: state(live) == "lost", "it is lost")
        more = [live.begin(20, leg="unified") for _ in range(4)]
        live.ended(*rids, *more)
        assert all(live.results[rid].decode.instance == "unified-0" for rid in more)  # type: ignore[union-attr]
        link.mend()
        live.until(lambda: state(live) == "ready", "it is back")
        live.ended(*[live.begin(20, leg="unified") for _ in range(4)])
        live.idle()
        live.check()


@pytest.mark.parametrize("live", [("--lease-s", "2.0", "--stale-s", "0.6")], indirect=True, ids=[""])
def test_cut_off_from_the_bus_it_gets_nothing_new_and_finishes_what_it_has(live: Rig) -> None:
    live.idle()
    with far_node(live) as (_, links):
        rids = [live.begin(60, 800, leg="unified") for _ in range(6)]
        for rid in rids:
            live.got(rid, 1)
        live.until(lambda: (rank := far(live)) is not None and rank.outstanding, "it has some of them")
        for link in links:
            link.cut()
        live.until(lambda: state(live) == "silent", "it is silent")
        more = [live.begin(20, leg="unified") for _ in range(4)]
        live.ended(*rids, *more)
        assert {live.results[rid].attempts for rid in rids} == {1}, "nothing that ran there was disturbed"
        assert all(live.results[rid].decode.instance == "unified-0" for rid in more)  # type: ignore[union-attr]
        for link in links:
            link.mend()
        live.until(lambda: state(live) == "ready", "it is back")
        live.idle()
        live.check()
