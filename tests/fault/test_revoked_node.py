"""A node whose key is revoked still runs and sends its streams: nobody of ours reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_rig import CONTROLLER_ARGS, TIMING, Rig

from bus.runtime.keys import add_key, give_key, new_keys, revoke_key
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
TOKENS = 300  # each at STEP_S at least: none of it ends by itself before a lease
STEP_S = "0.02"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("listed", [True, False], ids=["has the list of nodes", "has none"])
def test_a_client_leaves_the_streams_of_a_revoked_node(tmp_path: Path, transport: Any, listed: bool) -> None:
    keys = tmp_path / "keys"
    new_keys(keys, ("prefill-0", "decode-0", "decode-1"))
    add_key(keys, "clients", "alice")
    give_key(keys, "clients", "alice", tmp_path / "alice")
    spec = ClusterSpec(
        prefill=1, decode=1, decode_instances=2, engine="sim", model="sim", transport=transport,
        keys=str(keys), node_args=(*TIMING, "--sim-base-s", STEP_S), controller_args=CONTROLLER_ARGS,
    )  # fmt: skip
    with Cluster(spec) as cluster:
        rig = Rig(cluster, keys="" if listed else str(tmp_path / "alice"))
        try:
            rids = [rig.begin(60, TOKENS) for _ in range(8)]
            for rid in rids:
                rig.got(rid, 20)
            revoke_key(keys, "nodes", "decode-0")
            rig.ended(*rids, wait_s=120)
        except AssertionError:
            print("live", {r: str(q) for r, q in rig.channel._traffic._core._requests.items()})
            print(*((rank.instance, rank.state, rank.outstanding) for rank in rig.status().ranks))
            raise
        finally:
            rig.channel.stop()
        rig.check()
        assert max(rig.results[rid].attempts for rid in rids) > 1  # over tcp others of its host are cut off as well
        assert {at.instance for rid in rids if (at := rig.results[rid].decode)} == {"decode-1"}
