"""Decode ranks with a cache, as processes: conversations go where they are cached, and outlive the rank there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from test_cluster_live import settled

from nodes.own.engines.reference import generate_alone
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client, Result
from pdbus.launcher import Cluster

Factory = Callable[..., Cluster]
SIZE = 16  # tokens of a block


def said(client: Client, prompt: list[int], **options: object) -> Result:
    """Return the result of one turn, whose tokens are right."""
    result = client.generate_tokens(prompt, max_tokens=20, **options).result
    assert list(result.ids) == sim_generate(prompt, 20)
    settled(client.status)
    return result


def cluster_of(pdbus_cluster: Factory, *controller_args: str) -> Cluster:
    return pdbus_cluster(
        prefill=1, decode=2, prefill_method="cache_aware", decode_method="least_cost",
        decode_args=("--decode-cache",), controller_args=controller_args,
    )  # fmt: skip


def test_the_next_turn_is_computed_where_the_last_one_was_and_a_killed_rank_costs_no_answer(
    pdbus_cluster: Factory,
) -> None:
    cluster = cluster_of(pdbus_cluster)
    with cluster.client() as client:
        prompt = [3 + n % 400 for n in range(40 * SIZE)]
        first = said(client, prompt)
        assert first.decode is not None
        for turn in range(3):
            prompt = [*prompt, *first.ids, 7 + turn]
            result = said(client, prompt)
            assert result.prefill is None, "it needs no other rank"
            assert result.decode == first.decode
            assert result.cached_tokens >= len(prompt) - 2 * SIZE
        salted = said(client, prompt, cache_salt="other")
        assert salted.cached_tokens == 0
        ranks = {rank.dp_rank: rank for rank in client.status().ranks if rank.role == "decode"}
        assert ranks[first.decode.dp_rank].load is not None
        os.kill(cluster.children[f"decode-0/{first.decode.dp_rank}"].pid, signal.SIGKILL)
        after = client.generate_tokens([*prompt, 9], max_tokens=20).result
        assert list(after.ids) == sim_generate([*prompt, 9], 20)
        assert after.finish == "length"


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_where_prompts_are_computed_can_be_forced(pdbus_cluster: Factory, where: str) -> None:
    cluster = cluster_of(pdbus_cluster, "--prefill-at", where)
    with cluster.client() as client:
        prompt = [3 + n % 400 for n in range(20 * SIZE)]
        for _ in range(3):
            result = said(client, prompt)
            assert (result.prefill is None) == (where == "decode")
            prompt = [*prompt, *result.ids, 5]
        fixed = said(client, prompt, routed_dp_rank=1, disagg_prefill_dp_rank=0)
        assert fixed.prefill is not None, "who names ranks gets these"


def test_without_a_prefill_rank_decode_ranks_do_it_all(pdbus_cluster: Factory) -> None:
    cluster = cluster_of(pdbus_cluster)
    with cluster.client() as client:
        said(client, [5] * 40)
        os.kill(cluster.children["prefill-0/0"].pid, signal.SIGSTOP)
        try:
            result = client.generate_tokens([6] * 40, max_tokens=20).result
            assert list(result.ids) == sim_generate([6] * 40, 20)
            assert result.prefill is None
        finally:
            os.kill(cluster.children["prefill-0/0"].pid, signal.SIGCONT)


def test_turns_of_a_real_model_are_those_of_one_engine(pdbus_cluster: Factory) -> None:
    """Computed at decode from fetched and generated blocks, and at prefill, where decode fetches a part."""
    cluster = pdbus_cluster(
        prefill=1, decode=1, engine="numpy", model="tiny", decode_method="least_cost", decode_args=("--decode-cache",)
    )
    with cluster.client() as client:
        prompt = [(7 * n) % 200 for n in range(5 * SIZE + 3)]
        trips = []
        for turn in range(4):
            there = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0} if turn == 2 else {}
            result = client.generate_tokens(prompt, max_tokens=12, block_tokens=SIZE, ignore_eos=True, **there).result
            assert list(result.ids) == generate_alone("tiny", prompt, 12, engine="numpy")
            trips.append("at decode" if result.prefill is None else "pair")
            prompt = [*prompt, *result.ids, 5 + turn]
            settled(client.status)
        assert trips == ["pair", "at decode", "pair", "at decode"]
        command = [sys.executable, "-m", "pdbus", "status", "--controller", cluster.controller]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        trips = r"trips: at_decode 2, (delta|read_back) 1, whole 1"  # by how long a token takes here
        assert re.search(trips, " ".join(shown.split()))


READS = """from controller.policies.least_cost import LeastCost

class Reads(LeastCost):
    def read_back(self, rank, prefill, request):
        return True
"""


@pytest.mark.parametrize("engine", ["sim", "numpy"])
def test_a_prefill_rank_reads_what_the_decode_rank_has(pdbus_cluster: Factory, tmp_path: Path, engine: str) -> None:
    """Each turn is at the other prefill rank, which has computed nothing of the last one."""
    (tmp_path / "reads.py").write_text(READS)
    cluster = pdbus_cluster(
        prefill=2, decode=1, engine=engine, model="" if engine == "sim" else "tiny", prefill_method="round_robin",
        decode_method=f"{tmp_path}/reads.py:Reads", decode_args=("--decode-cache",),
        controller_args=("--prefill-at", "prefill"),
    )  # fmt: skip
    alone = sim_generate if engine == "sim" else partial(generate_alone, "tiny", engine="numpy")
    with cluster.client() as client:
        prompt = [(7 * n) % 200 for n in range(5 * SIZE + 3)]
        cached, rids = [], []
        for turn in range(3):
            result = client.generate_tokens(prompt, max_tokens=12, block_tokens=SIZE, ignore_eos=True).result
            assert list(result.ids) == alone(prompt, 12)
            cached.append(result.cached_tokens)
            rids.append(result.rid)
            prompt = [*prompt, *result.ids, 5 + turn]
            settled(client.status)
        assert cached == [0, 5 * SIZE, 6 * SIZE], "the last token of an answer was never computed"
        (told,) = [
            event.detail for part in client.trace(rids[1]).parts for event in part.events if event.what == "read"
        ]
        assert told == f"{5 * SIZE} tokens of the decode rank"
        command = [sys.executable, "-m", "pdbus", "status", "--controller", cluster.controller]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "trips: read_back 2, whole 1" in " ".join(shown.split())
