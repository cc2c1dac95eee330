"""Links between two hosts lose everything, both ways or one way alone, under load, and are whole again: what
docs/failures.md says is what is seen, and every request ends once and rightly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_rig import Rig
from hosts_world import Load, World, state

from nodes.own.engines.sim import sim_generate

each_way = pytest.mark.parametrize("way", ["both", "to", "from"])


@each_way
@pytest.mark.parametrize("node", ["prefill-0", "decode-0"])
def test_a_node_cut_off_from_a_controller_is_lost_to_that_one_alone(
    world: World, rig: Rig, other: Rig, node: str, way: str
) -> None:
    part, load = f"{node}/0", Load(rig)
    load.runs_at(part)
    with world.net.cut(*world.between(node, "controller-0", way)):
        load.until(lambda: state(rig, part) == "lost", "it is lost")
        load.ends(10)
        assert state(other, part) == "ready"
    load.until(lambda: state(rig, part) == "ready", "it is ready again")
    load.end()


@each_way
def test_a_node_cut_off_from_the_bus_is_silent_and_finishes_what_it_has(
    world: World, rig: Rig, other: Rig, way: str
) -> None:
    load = Load(rig)
    load.runs_at("prefill-0/0")
    with world.net.cut(*world.between("prefill-0", "broker", way)):
        load.until(lambda: state(rig, "prefill-0/0") == state(other, "prefill-0/0") == "silent", "it is silent")
        load.ends(10)
    load.until(lambda: state(rig, "prefill-0/0") == state(other, "prefill-0/0") == "ready", "it is ready again")
    load.end(undisturbed=True)


@each_way
def test_a_controller_cut_off_from_the_bus_blames_no_rank(world: World, rig: Rig, way: str) -> None:
    load = Load(rig)
    with world.net.cut(*world.between("controller-0", "broker", way)):
        if way != "to":  # what it publishes, its own counters, concerns the other controller
            load.until(lambda: all(rank.report_age_s > 4 for rank in rig.status().ranks), "all reports are old")
        load.ends(20)
        assert {rank.state for rank in rig.status().ranks} == {"ready"}
    load.until(lambda: all(rank.report_age_s < 2 for rank in rig.status().ranks), "reports come again")
    load.end(undisturbed=True)


@each_way
def test_a_client_cut_off_from_its_controller_reads_on_and_is_served_later(world: World, rig: Rig, way: str) -> None:
    streams = [rig.begin(60, 400) for _ in range(4)]
    for rid in streams:
        rig.got(rid, 5)
    with world.net.cut(*world.between("client", "controller-0", way)):
        late = [rig.begin() for _ in range(4)]
        rig.ended(*streams)
        assert not rig.answers(timeout_s=4.0)
        assert not rig.results.keys() & set(late)
    rig.ended(*late)
    assert {rig.results[rid].attempts for rid in streams} == {1}
    rig.check()


def test_a_command_without_a_way_to_its_controller_says_so(world: World) -> None:
    with world.net.cut(*world.between("client", "controller-0", "both")):
        line = "pdbus generate --tokens --wait-s 4 --controller tcp://10.0.0.2:5560#controller-0 --keys keys '5 6'"
        done = world.run("client", line)
    assert done.returncode == 1
    assert "no controller answers at tcp://10.0.0.2:5560" in done.stderr


@each_way
def test_a_client_cut_off_from_a_rank_resumes_at_another(world: World, rig: Rig, way: str) -> None:
    streams = [rig.begin(60, 600) for _ in range(4)]
    for rid in streams:
        rig.got(rid, 5)
    assert state(rig, "decode-0/0") == "ready"
    with world.net.cut(*world.between("client", "decode-0", way)):
        rig.ended(*streams)
        rig.ended(*[rig.begin() for _ in range(4)])
    moved = [result for result in rig.results.values() if result.attempts > 1]
    assert {rid for rid, result in rig.results.items() if result.attempts > 1} <= set(streams), "later ones knew of it"
    assert moved, "some were at decode-0"
    assert {result.decode.instance for result in moved if result.decode} == {"decode-1"}
    rig.check()


@each_way
def test_a_pair_that_cannot_reach_each_other_fails_and_goes_on_elsewhere(world: World, rig: Rig, way: str) -> None:
    """Of four pairs one is cut. A request that is bound to it waits until the link is whole."""
    load = Load(rig)
    with world.net.cut(*world.between("prefill-0", "decode-0", way)):
        bound = rig.begin(instance="decode-0", prefill_instance="prefill-0")
        told = world.log("controller-0")
        load.until(lambda: any(bound in line and "request.retried" in line for line in told()), "it was tried again")
        load.ends(10)
        assert bound not in rig.results
        assert {rank.state for rank in rig.status().ranks} == {"ready"}
    assert rig.ended(bound).attempts > 1
    load.end()


@each_way
def test_an_edge_cut_off_from_its_controller_says_so_and_answers_later(world: World, way: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        with world.net.cut(*world.between("edge", "controller-0", way)):
            late = pool.submit(world.generate, [5, 6, 7], 20)
            world.until(lambda: world.get("/ready")[0] == 503, "the edge is not ready")
            assert not late.done()
        assert late.result(60) == sim_generate([5, 6, 7], 20)
        world.until(lambda: world.get("/ready")[0] == 200, "the edge is ready again")
