"""Each kind of process, killed, stopped and restarted at each stage of a request, which ends once and rightly."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from fault_rig import CONTROLLER_ARGS, LEASE_S, TIMING, Rig, rig

from bus.wire.messages import Legs, Role
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault

KINDS = ("prefill", "decode", "unified", "controller", "broker")
STAGES = ("before_dispatch", "during_prefill", "between_the_legs", "mid_stream", "after_finish")
FAULTS = ("kill", "stop", "restart")
SPEC = ClusterSpec(
    prefill=2, decode=2, unified=2, engine="sim", model="sim", prefill_method="total_tokens",
    node_args=TIMING, controller_args=CONTROLLER_ARGS,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(SPEC) as running:
        yield running


@pytest.fixture
def live(cluster: Cluster) -> Iterator[Rig]:
    with rig(cluster) as made:
        made.idle()
        yield made


def reach(live: Rig, kind: str, stage: str) -> tuple[str, str]:
    """A request at this stage: its rid, and the part of this kind that has to do with it."""
    role: Role = "decode" if kind == "decode" else "unified" if kind == "unified" else "prefill"
    central = {"controller": "controller-0", "broker": "broker"}.get(kind, "")
    if stage == "before_dispatch":
        return "", central or f"{role}-0/0"
    leg: Legs = "unified" if kind == "unified" else "pair"
    prompt, output = (800 if stage == "during_prefill" else 200), 40
    while True:
        rid = live.begin(prompt, output, leg=leg)
        part = central if central and stage != "during_prefill" else live.holder(role, rid)
        if stage == "between_the_legs":  # the first token comes with the news that the KV cache may be fetched
            live.got(rid, 1)
        elif stage == "mid_stream":
            live.got(rid, 5)
        elif stage == "after_finish":
            live.ended(rid)
        seen = len(live.tokens[rid])
        if part and (stage == "after_finish" or (seen == 0 if stage == "during_prefill" else seen < output)):
            return rid, central or part
        live.ended(rid)  # this machine was too busy to look in time: a longer one
        prompt, output = min(2 * prompt, 3200), min(2 * output, 640)


def finish(live: Rig, kind: str, stage: str, rid: str) -> None:
    """The request ends while the fault lasts; before dispatch and after the end it is a new one that must."""
    if stage in ("before_dispatch", "after_finish"):
        rid = live.begin(60, leg="unified" if kind == "unified" else "pair")
    live.ended(rid)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_request_ends_once_with_the_right_tokens(live: Rig, kind: str, stage: str, fault: str) -> None:
    rid, part = reach(live, kind, stage)
    needs_it = kind == "controller" and stage in ("before_dispatch", "after_finish")
    if fault == "restart":
        live.cluster.restart(part)
        finish(live, kind, stage, rid)
    elif fault == "kill":
        live.cluster.kill(part)
        if not needs_it:
            finish(live, kind, stage, rid)
        live.cluster.restart(part)
        if needs_it:
            finish(live, kind, stage, rid)
    else:
        with live.stopped(part):
            if needs_it:
                rid, stage = live.begin(60), "waits"
                assert not live.answers(2 * LEASE_S)
            else:
                finish(live, kind, stage, rid)
        if needs_it:
            finish(live, kind, stage, rid)
    live.idle()  # who woke up late has been told, and holds nothing
    live.check()
    assert live.cluster.children[part].returncode is None


def test_a_part_that_is_asked_to_leave_at_any_time_leaves_with_0(cluster: Cluster) -> None:
    """SIGTERM to each kind in turn with requests in flight: nothing is lost, and the exit code is 0."""
    for part in ("prefill-0/0", "decode-0/1", "unified-0/0", "broker", "controller-0"):
        with rig(cluster) as live:
            live.idle()
            rids = [live.begin(60, leg=leg) for leg in ("pair", "unified") * 4]
            live.got(rids[0], 1)
            cluster.kill(part, signal.SIGTERM, wait_s=60.0)
            assert cluster.children[part].returncode == 0
            cluster.restart(part)
            live.ended(*rids)
            live.check()
