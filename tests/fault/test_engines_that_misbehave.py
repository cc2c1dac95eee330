"""A hung, failing or poisonous engine: it is told apart, others take over, and poison is not passed on for ever."""

from __future__ import annotations

import pytest
from fault_rig import CONTROLLER_ARGS, TIMING, rig

from nodes.own.engines.sim import sim_generate
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault

FAIL, HANG, CRASH = 0, 1, 2  # token ids that the sim engine never produces
FAULTS = ("--fault-fail-token", str(FAIL), "--fault-hang-token", str(HANG), "--fault-crash-token", str(CRASH))


def spec(unified: int, *more: str, hang_s: str = "6.0") -> ClusterSpec:
    return ClusterSpec(
        unified=unified, engine="sim", model="sim", node_args=(*TIMING, *(more or FAULTS)),
        controller_args=(*CONTROLLER_ARGS, "--hang-s", hang_s, "--attempts", "2"),
    )  # fmt: skip


def test_a_hung_rank_is_seen_and_its_requests_go_elsewhere() -> None:
    with Cluster(spec(2, hang_s="1.0")) as cluster, rig(cluster) as live:
        live.idle()
        rids = [live.begin(100, 150, leg="unified") for _ in range(4)]
        for rid in rids:
            live.got(rid, 1)
        hung = live.begin([HANG] * 4, 4, leg="unified", routed_dp_rank=0)
        result = live.ended(hung)
        assert result.code in ("peer_lost", "rank_unavailable"), result
        live.ended(*rids)
        live.check(failed={result.code: 1})
        live.until(lambda: (rank := live.rank("unified-0/0")) is not None and rank.state == "hung", "it counts as hung")
        assert cluster.children["unified-0/0"].returncode is None  # it answers pings, so only its steps tell
        cluster.restart("unified-0/0")
        live.idle()


def test_a_step_that_fails_ends_what_was_in_it_and_the_rank_goes_on() -> None:
    with Cluster(spec(2)) as cluster, rig(cluster) as live:
        live.idle()
        assert live.ended(live.begin([5, FAIL], 4, leg="unified")).code == "engine_failed"
        live.ended(*[live.begin(20, 10, leg="unified") for _ in range(6)])
        live.check(failed={"engine_failed": 1})
        live.idle()
        assert not cluster.poll()


def test_a_poisonous_prompt_is_failed_and_takes_down_no_more_ranks_than_it_may() -> None:
    with Cluster(spec(3)) as cluster, rig(cluster) as live:
        live.idle()
        result = live.ended(live.begin([CRASH] * 8, 4, leg="unified"))
        assert result.code == "poison", result
        live.until(lambda: len(cluster.poll()) == 2, "two ranks are gone")
        live.ended(live.begin(20, 10, leg="unified"))  # the third serves
        live.check(failed={"poison": 1})
        assert len(cluster.poll()) == 2
        for part in cluster.poll():
            cluster.restart(part)


def test_poison_that_shows_itself_mid_stream_is_failed_too() -> None:
    """The token that kills is the second of the output: the client resumes, and the ranks it kills stay bounded."""
    prompt = next([n, 7] for n in range(3, 500) if sim_generate([n, 7], 2)[1] not in (n, 7, sim_generate([n, 7], 1)[0]))
    deadly = sim_generate(prompt, 2)[1]
    with Cluster(spec(4, "--fault-crash-token", str(deadly))) as cluster, rig(cluster) as live:
        live.idle()
        rid = live.begin(prompt, 40, leg="unified")
        result = live.ended(rid)
        got, killed = live.tokens[rid], cluster.poll()
        assert result.code == "poison", result
        assert got == sim_generate(prompt, 40)[: len(got)]
        # A dying rank takes along the tokens that have not left it, so it is luck how far each rank gets. Two ranks may
        # die after the last token, its sender among them, and one more before the first.
        assert len(killed) <= len(got) + 2 <= 3
        for part in killed:
            cluster.restart(part)
        clean = next([n] for n in range(3, 500) if deadly not in [n, *sim_generate([n], 10)])
        live.ended(live.begin(clean, 10, leg="unified"))
        live.check(failed={"poison": 1})


def test_overload_is_refused_early_with_a_hint_and_waits_are_bounded() -> None:
    small = ("--max-running", "1", "--max-waiting", "2", "--kv-tokens", "1024")
    queue = ("--queue-requests", "4", "--request-overcommit", "1")
    crowded = ClusterSpec(
        unified=1, engine="sim", model="sim", node_args=(*TIMING, *small), controller_args=(*CONTROLLER_ARGS, *queue)
    )
    with Cluster(crowded) as cluster, rig(cluster, retries=0) as live:
        live.idle()
        live.ended(live.begin(10, 2, leg="unified"))  # a fresh controller first waits for its picture to be whole
        with live.stopped("controller-0"):
            rids = [live.begin(50, 40, leg="unified") for _ in range(12)]  # which it then sees at once
        live.ended(*rids)
        refused = [live.results[rid] for rid in rids if live.results[rid].code == "overloaded"]
        assert 12 - 1 - 4 - 2 <= len(refused) <= 12 - 4
        assert all(result.retry_after_s > 0 and result.retryable for result in refused)
        assert max(result.total_s for result in refused) < min(
            live.results[rid].total_s for rid in rids if live.results[rid].code == "ok"
        )
        live.check(failed={"overloaded": len(refused)})
        with rig(cluster, retries=12) as patient:
            patient.idle()
            patient.ended(*[patient.begin(20, 10, leg="unified") for _ in range(12)])
            patient.check()  # who waits as hinted gets through
