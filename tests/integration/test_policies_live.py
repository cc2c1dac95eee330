"""A policy from outside the package in live clusters and in `pdbus replay`; and one that breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cluster_live import SHARED, run_some, settled, stays_where_it_is_cached

from pdbus.launcher import Cluster

Factory = Callable[..., Cluster]
ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'two_choices.py'}:TwoChoices"
FEW_HERE = f"{ROOT / 'examples' / 'where_to_prefill.py'}:FewHere"
SUPPORT = ROOT / "tests" / "support"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(SUPPORT)}
    return subprocess.run(
        [sys.executable, "-P", "-m", *arguments], capture_output=True, text=True, timeout=280, check=False, env=env
    )


def test_the_example_places_prompts_where_their_prefix_is_cached(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(prefill=3, decode=1, ranks_per_process=3, prefill_method=EXAMPLE)
    with cluster.client() as client:
        run_some(client, 12)
        status = settled(client.status)
        assert status.methods["prefill"] == EXAMPLE
        assert status.uses_hashes == ("prefill",)
        assert status.counts["prefix_blocks"] >= len(SHARED) // 16  # told by KV events, which it asked for
        assert "policy_faults" not in status.counts
        stays_where_it_is_cached(client, lambda result: result.prefill)


def test_a_client_sends_hashes_to_a_policy_it_has_never_heard_of(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(unified=2, ranks_per_process=2, unified_method=EXAMPLE)
    prompt = list(range(3, 3 + 10 * 16))
    with cluster.client() as client:
        results = []
        for _ in range(4):
            results.append(client.generate_tokens(prompt, max_tokens=2).result)  # no block_tokens given
            settled(client.status)
        assert len({result.decode for result in results}) == 1
        assert len({result.decode for result in run_some(client, 12)}) == 2


def test_a_short_prompt_of_a_pair_is_computed_where_it_decodes_if_its_policy_says_so(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(prefill=1, decode=1, unified=1, unified_method=FEW_HERE)
    with cluster.client() as client:
        short, long = (list(range(3, 3 + tokens)) for tokens in (40, 1100))
        alone, pair = (client.generate_tokens(prompt, max_tokens=4).result for prompt in (short, long))
        assert alone.prefill is None
        assert pair.prefill is not None
        assert alone.decode is not None
        assert {rank.role for rank in client.status().ranks if rank.instance == alone.decode.instance} == {"unified"}
        there = client.generate_tokens(short, max_tokens=4, disagg_prefill_dp_rank=0, routed_dp_rank=0).result
        assert there.prefill is not None, "its caller named the ranks"
        assert there.ids == alone.ids
        assert "policy_faults" not in settled(client.status).counts


def test_a_policy_that_breaks_costs_no_request(pdbus_cluster: Factory, tmp_path: Path) -> None:
    cluster = pdbus_cluster(
        unified=2, ranks_per_process=2, unified_method=f"{SUPPORT / 'odd_policies.py'}:Broken", log_dir=str(tmp_path)
    )
    with cluster.client() as client:
        results = run_some(client, 10)
        assert {result.finish for result in results} <= {"length", "stop"}
        assert settled(client.status).counts["policy_faults"] == 10
    cluster.stop()
    (line,) = (line for line in (tmp_path / "controller-0.log").read_text().splitlines() if "policy.failed" in line)
    assert "ZeroDivisionError" in line
    assert "odd_policies.py:" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("controller", "--prefill-method", "total_token"), "did you mean total_tokens?"),
        (("controller", "--decode-method", "odd_policies:nothing"), "which is no policy: subclass controller.Policy"),
        (("pdbus", "up", "--model", "sim", "--prefill-method", "nowhere:X"), "No module named 'nowhere'"),
        (("pdbus", "replay", "--methods", "oracle,nowhere.py:X"), "cannot load the policy nowhere.py:X"),
        (("pdbus", "replay", "--methods", "odd_policies:failing"), "OSError: no model at /nowhere"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_replay_compares_it_with_ours_side_by_side_in_processes() -> None:
    done = command(
        "pdbus", "replay", "--duration-s", "60", "--methods", f"power_of_two,{EXAMPLE}", "--jobs", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    blind, aware = json.loads(done.stdout)["methods"].values()
    assert aware["cache_hit_rate"] > blind["cache_hit_rate"]


def test_replay_of_one_that_breaks_is_one_line() -> None:
    done = command(
        "pdbus", "replay", "--duration-s", "20", "--methods", "oracle,odd_policies:Broken", "--jobs", "2", "--json"
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "policy odd_policies:Broken failed in pick: ZeroDivisionError: no luck" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_replay_live_runs_it_too() -> None:
    done = command("pdbus", "replay", "--live", "--duration-s", "8", "--ranks", "2", "--decode-ranks", "2", "--load",
                   "0.6", "--methods", EXAMPLE, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    live, virtual = json.loads(done.stdout)["methods"].values()
    assert live["cache_hit_rate"] == pytest.approx(virtual["cache_hit_rate"], abs=0.15)
