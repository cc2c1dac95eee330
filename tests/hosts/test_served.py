"""Everything is served over nine hosts, with keys, by the commands of docs/hosts.md; links that are slow or far."""

from __future__ import annotations

import json

import pytest
from fault_rig import Rig
from hosts_world import Load, World

from nodes.own.engines.sim import sim_generate

STATUS = "pdbus status --controller tcp://10.0.0.2:5560#controller-0 --bus tcp://10.0.0.1:5550 --keys keys --json"


def test_every_request_is_served_by_library_edge_and_command(world: World, rig: Rig, other: Rig) -> None:
    """The KV cache of the longest prompt is 16 MB, over links whose packets have 1,500 bytes."""
    for each in (rig, other):
        each.ended(each.begin(4000), *(each.begin() for _ in range(8)))
        each.check()
    assert world.generate([5, 6, 7], 20) == sim_generate([5, 6, 7], 20)
    prefilled, decoded = ({getattr(r, leg).instance for r in rig.results.values()} for leg in ("prefill", "decode"))
    assert (prefilled, decoded) == ({"prefill-0", "prefill-1"}, {"decode-0", "decode-1"})


def test_the_operators_commands_work_from_another_host(world: World) -> None:
    status = world.run("client", STATUS)
    assert (status.returncode, status.stderr) == (0, "")
    told = json.loads(status.stdout)
    assert told["broker"]["counts"]["ranks"] == 4
    ends = sorted(rank["endpoint"].partition("#")[0].rpartition(":")[0] for rank in told["controller"]["ranks"])
    assert ends == [f"tcp://10.0.0.{number}" for number in (4, 5, 6, 7)], "what a node advertises is what it was told"
    line = (
        "pdbus generate --tokens --json --max-tokens 9 --controller tcp://10.0.0.3:5560#controller-1 --keys keys '5 6'"
    )
    assert json.loads(world.run("client", line).stdout)["ids"] == sim_generate([5, 6], 9)


def test_over_a_slow_link_reports_keep_their_place_beside_kv_caches(world: World, rig: Rig) -> None:
    """What prefill-0 has to send takes longer than it has: its link is never idle, and it stays ready."""
    load = Load(rig)
    world.hosts["prefill-0"].limit("20mbit")
    try:
        load.runs_at("prefill-0/0")
        states: set[str] = set()
        enough = len(rig.results) + 30

        def served() -> bool:
            rank = rig.rank("prefill-0/0")
            states.add(rank.state if rank is not None else "")
            return len(rig.results) >= enough

        load.until(served, "30 requests have ended, of 20 Mbit/s")
        assert states == {"ready"}
        load.end()
    finally:
        world.hosts["prefill-0"].limit("")


@pytest.mark.parametrize("one_way_s", [0.02, 0.1])
def test_a_host_far_away_serves_like_any_other(world: World, rig: Rig, one_way_s: float) -> None:
    load = Load(rig)
    with world.net.delay(one_way_s, *world.around("decode-0")):
        load.runs_at("decode-0/0")
        load.ends(30)
        load.end()
    assert any(r.decode.instance == "decode-0" for r in rig.results.values() if r.decode)
