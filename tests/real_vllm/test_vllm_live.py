"""Real vLLM behind the bus: one prefill and one decode engine of SmolLM2 on a CPU, KV caches by NIXL.

What is asked for is that nobody can tell: tokens equal those of one vLLM engine alone, whatever ends, stands still or
comes late meanwhile. Starting an engine takes most of a minute on two cores, so one cluster serves all tests, in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.errors import RequestFailed
from bus.runtime.ports import free_ports
from bus.wire.hashing import block_hashes
from nodes.own.engines.tokenizer import SmolTokenizer
from nodes.vllm.reaper import MARK
from nodes.vllm.smollm2 import hugging_face
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.timeout(900)

PREFILL, DECODE = "prefill-0/0", "decode-0/0"
BLOCK = 32
LEASE_S = 15
BLOCKS = 48  # of KV memory: so few that those of a lapsed lease are soon used again
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ENGINE = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS))
WAIT_S = 300.0


def until(true: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited {seconds:g} s until {what}"
        time.sleep(0.05)
    return found


# --- the prompts, and what one engine alone says ----------------------------------------------------------------------


def cases() -> list[dict[str, Any]]:
    tokens = SmolTokenizer()
    texts = [
        "What is the capital of France?",
        "Count from one to ten in words, one a line.",
        "Tell me of the sea. " * 12,
    ]
    greedy = [tokens.chat(text) for text in texts]
    long = tokens.encode("A ship sails over the wide sea at night, and nobody knows where it goes. " * 30)
    greedy += [long[:BLOCK], long[: 2 * BLOCK], long[: BLOCK - 1], long[: BLOCK + 1], long[:400]]
    stop = list(tokens.eos_ids)
    found = [{"ids": ids, "params": {"temperature": 0.0, "max_tokens": 16, "stop_token_ids": stop}} for ids in greedy]
    seeded = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 7, "max_tokens": 16, "stop_token_ids": stop}
    return [*found, {"ids": greedy[0], "params": seeded}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], list[int]]]:
    """The cases, and what vLLM answers when nothing of ours is in between."""
    folder = tmp_path_factory.mktemp("alone")
    asked = cases()
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": BLOCK}
    (folder / "cases").write_text(json.dumps({"model": str(hugging_face()), "engine": engine, "cases": asked}))
    command = [sys.executable, str(Path(__file__).parent / "alone.py"), str(folder / "cases"), str(folder / "answers")]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(asked, json.loads((folder / "answers").read_text()), strict=True))


@pytest.fixture(scope="module")
def cluster(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """After the engine alone: two cores are not enough for three engines that start."""
    spec = ClusterSpec(
        prefill=1,
        decode=1,
        engine="vllm",
        model="smollm2",
        prefill_method="cache_aware",
        metrics_port=free_ports("127.0.0.1", 4),
        controller_args=("--lease-s", "90", "--hang-s", "90"),
        node_args=("--hold-s", str(LEASE_S)),
        engine_args=ENGINE,
        env=ENV,
        log_dir=str(tmp_path_factory.mktemp("logs")),
        start_timeout_s=WAIT_S,
        stop_grace_s=60.0,
    )
    with Cluster(spec) as made:
        yield made
        engines = [pid for child in made.started for pid in processes_of(child.pid)]
    until(lambda: not any(map(lives, engines)), "no process of an engine is left", 30)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client(retries=100) as made:
        yield made


# --- looking at vLLM --------------------------------------------------------------------------------------------------


def figure(cluster: Cluster, part: str, name: str, **labels: str) -> float:
    """A metric of a node, its own or vLLM's."""
    port = cluster.children[part].spec.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.partition("{")[0].partition(" ")[0] == name and all(each in line for each in wanted)
    )


def processes_of(node: int) -> list[int]:
    """The engine's processes of a node: those that carry the mark which its children do."""
    marks = set()
    found: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            mark = next((each for each in environ if each.startswith(f"{MARK}=".encode())), b"")
            if mark:
                found[int(entry.name)] = mark
                if parent == node:
                    marks.add(mark)
    return [pid for pid, mark in found.items() if mark in marks]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def idle(cluster: Cluster) -> bool:
    """vLLM itself has nothing left."""
    return not any(
        figure(cluster, part, f"vllm:num_requests_{state}")
        for part in (PREFILL, DECODE)
        for state in ("running", "waiting")
    )


def ask(client: Client, case: dict[str, Any], **changes: Any) -> Any:
    params = {name: value for name, value in case["params"].items() if name != "stop_token_ids"}
    return client.generate_tokens(case["ids"], **{**params, **changes})


# --- the tests --------------------------------------------------------------------------------------------------------


def test_tokens_equal_those_of_one_engine_alone_and_decode_computes_no_prompt(
    cluster: Cluster, client: Client, alone: list[tuple[dict[str, Any], list[int]]]
) -> None:
    """One by one, and greedy ones all at once; prompts of exactly a block among them. By vLLM's own counters."""
    for case, answer in alone:
        assert ask(client, case).tokens() == answer
    greedy = [each for each in alone if "seed" not in each[0]["params"]]  # a seeded one changes with vLLM's batches
    streams = [(ask(client, case), answer) for case, answer in greedy]
    for stream, answer in streams:
        assert stream.tokens() == answer
    total = sum(len(case["ids"]) for case, _ in alone + greedy)
    by = "vllm:prompt_tokens_by_source_total"
    until(lambda: figure(cluster, DECODE, by, source="external_kv_transfer") >= total, "decode has fetched all", 20)
    assert figure(cluster, DECODE, by, source="local_compute") == 0
    assert figure(cluster, PREFILL, by, source="local_compute") > 0
    until(lambda: idle(cluster), "vLLM is idle", 20)
    until(lambda: all(rank.load and rank.load.kv_tokens == 0 for rank in client.status().ranks), "no KV is held", 20)


def test_prefixes_are_announced(cluster: Cluster, client: Client) -> None:
    """What cache_aware goes by: vLLM's KV events, each block of them with a name of ours at the controller."""
    prompt = SmolTokenizer().encode("Once upon a time, in a land far away, there lived an old king who " * 8)
    named = len(block_hashes(prompt, BLOCK))
    assert named > 2
    counts = client.status().counts
    client.generate_tokens(prompt, max_tokens=1).tokens()
    expected = counts["prefix_blocks"] + named
    until(lambda: client.status().counts["prefix_blocks"] == expected, "the controller knows all blocks", 60)
    assert not {"kv_gaps", "kv_blocks_unnamed"} & client.status().counts.keys()


def test_a_cancelled_request_is_gone_from_both_engines(
    cluster: Cluster, client: Client, alone: list[tuple[dict[str, Any], list[int]]]
) -> None:
    streams = [ask(client, alone[7][0], max_tokens=500, ignore_eos=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream._pieces()))
    streams.append(ask(client, alone[7][0], max_tokens=500))  # maybe still at prefill
    for stream in streams:
        stream.cancel()
        assert stream.result.code == "cancelled"
    until(lambda: idle(cluster), "vLLM is idle", 30)
    until(lambda: figure(cluster, DECODE, "vllm:kv_cache_usage_perc") == 0.0, "decode's KV memory is free", 30)
    assert ask(client, alone[0][0]).tokens() == alone[0][1]


def test_a_pull_that_comes_too_late_gives_no_wrong_token(
    cluster: Cluster, client: Client, alone: list[tuple[dict[str, Any], list[int]]]
) -> None:
    """The decode engine stands still for longer than the lease, with the request handed to it in time, while prefill
    gives the memory to other prompts. vLLM then decodes from those, and says nothing."""
    case, answer = alone[7]
    refused = figure(cluster, DECODE, "pdbus_node_legs_ended_total", code="kv_failed")
    engine = processes_of(cluster.children[DECODE].pid)
    computed = figure(cluster, PREFILL, "vllm:prompt_tokens_total") + len(case["ids"])

    def prefilled() -> bool:
        return figure(cluster, PREFILL, "vllm:prompt_tokens_total") >= computed

    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    try:
        stream = ask(client, case)
        until(prefilled, "the prompt is computed", 60)
        until_s = time.monotonic() + LEASE_S + 2.0
        until(lambda: time.monotonic() >= until_s, "the lease is over")
        for number in range(3):  # more than there is memory for beside the first
            computed += 400
            others = list(range(1000 + 500 * number, 1400 + 500 * number))
            client.generate_tokens(others, max_tokens=1, leg="prefill", bootstrap_room=number)
            until(prefilled, "another one is", 60)
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    assert stream.tokens() == answer
    assert stream.result.attempts > 1
    assert figure(cluster, DECODE, "pdbus_node_legs_ended_total", code="kv_failed") > refused


def test_a_stream_goes_on_when_the_decode_engine_is_killed_and_started_again(
    cluster: Cluster, client: Client, alone: list[tuple[dict[str, Any], list[int]]]
) -> None:
    """The node says so, leaves and takes every process of its engine along; whoever supervises it starts it again."""
    case, _ = alone[2]
    whole = ask(client, case, max_tokens=32, ignore_eos=True).tokens()
    assert len(whole) == 32
    stream = ask(client, case, max_tokens=32, ignore_eos=True)
    pieces = stream._pieces()
    next(pieces)
    child = cluster.children[DECODE]
    engine = processes_of(child.pid)
    assert engine
    os.kill(max(engine), signal.SIGKILL)
    assert child.wait(60), "the node leaves"
    assert child.returncode == 1
    assert "its engine died" in child.tail()
    until(lambda: not any(map(lives, engine)), "and its engine with it", 20)
    cluster.restart(DECODE)
    for _ in pieces:
        pass
    assert list(stream.result.ids) == whole
    assert stream.result.attempts > 1


def test_drain_finishes_what_runs_and_leaves_nothing(
    cluster: Cluster, client: Client, alone: list[tuple[dict[str, Any], list[int]]]
) -> None:
    """And after a node's own SIGKILL no process of its engine is left either."""
    case, _ = alone[2]
    stream = ask(client, case, max_tokens=40, ignore_eos=True)
    pieces = stream._pieces()
    next(pieces)
    child = cluster.children[DECODE]
    engine = processes_of(child.pid)
    child.send(signal.SIGTERM)
    for _ in pieces:
        pass
    assert len(stream.result.ids) == 40
    assert stream.result.attempts == 1
    assert child.wait(60)
    assert child.returncode == 0, child.tail()
    assert not any(map(lives, engine))

    prefill = cluster.children[PREFILL]
    engine = processes_of(prefill.pid)
    assert engine
    prefill.send(signal.SIGKILL)
    until(lambda: not any(map(lives, engine)), "the reaper has been", 20)
    with cluster.client(retries=0) as other, pytest.raises(RequestFailed):
        ask(other, case).tokens()
