"""Real vLLM behind the bus: one prefill and one decode engine of SmolLM2 on a CPU, KV caches by NIXL.

What is asked for is that nobody can tell: tokens equal those of one vLLM engine alone, whatever ends, stands still or
comes late meanwhile. Starting an engine takes most of a minute on two cores, so one cluster serves all tests, in order.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_server import unmodified
from loops import SERVER, check, loop
from real_engines import (
    BLOCK,
    DECODE,
    LEASE_S,
    PREFILL,
    Alone,
    answers_alone,
    ask,
    cluster_of,
    figure,
    idle,
    lives,
    near,
    processes_of,
    start_again,
    until,
)

from benchmarks import peers_sides
from benchmarks.harness import Scope, Workspace
from bus.endpoints import BusAddress
from bus.errors import RequestFailed
from bus.runtime.sockets import Sockets
from bus.wire.hashing import block_hashes
from bus.wire.kv_events import BlockStored, parse_batch, split_frames
from nodes.vllm.smollm2 import hugging_face
from pdbus.client import Client
from pdbus.launcher import Cluster
from pdbus.text.models import text_for

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Alone]:
    return answers_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def cluster(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """After the engine alone: two cores are not enough for three engines that start."""
    with cluster_of(1, tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client(retries=10_000) as made:
        yield made


def test_tokens_equal_those_of_one_engine_alone_and_decode_computes_no_prompt(
    cluster: Cluster, client: Client, alone: list[Alone]
) -> None:
    """And log probabilities. One by one, and greedy ones all at once; prompts of exactly a block among them. By vLLM's
    own counters."""
    for each in alone:
        each.equals(ask(client, each.case).result)
    greedy = [each for each in alone if "seed" not in each.case["params"]]  # a seeded one changes with vLLM's batches
    streams = [ask(client, each.case) for each in greedy]
    for each, stream in zip(greedy, streams, strict=True):
        each.equals(stream.result)
    total = sum(len(each.case["ids"]) for each in alone + greedy)
    by = "vllm:prompt_tokens_by_source_total"
    until(lambda: figure(cluster, DECODE, by, source="external_kv_transfer") >= total, "decode has fetched all", 20)
    assert figure(cluster, DECODE, by, source="local_compute") == 0
    assert figure(cluster, PREFILL, by, source="local_compute") > 0
    until(lambda: idle(cluster), "vLLM is idle", 20)
    until(lambda: all(rank.load and rank.load.kv_tokens == 0 for rank in client.status().ranks), "no KV is held", 20)


def test_a_grammar_that_is_none_is_refused_before_anything_is_computed(cluster: Cluster, client: Client) -> None:
    computed = figure(cluster, PREFILL, "vllm:prompt_tokens_total")
    with pytest.raises(RequestFailed, match=r"(?i)regex") as failed:
        client.generate_tokens(list(range(100, 164)), max_tokens=4, regex="(").tokens()
    assert failed.value.code == "bad_request"
    assert figure(cluster, PREFILL, "vllm:prompt_tokens_total") == computed


def test_prefixes_are_announced(cluster: Cluster, client: Client) -> None:
    """What cache_aware goes by: vLLM's KV events, each block of them with a name of ours, on the bus itself; what a
    controller knows may be what it expects of its own dispatches."""
    prompt = text_for("smollm2").encode("Once upon a time, in a land far away, there lived an old king who " * 8)
    seen: set[object] = set()
    with Sockets() as sockets:
        events = sockets.sub(BusAddress(cluster.bus).subscribe, (b"kv/prefill-0/0/",))
        until_s = time.monotonic() + 60
        turn = 0
        while not seen:  # until the subscription is there; each prompt is new to the cache
            assert time.monotonic() < until_s, "no KV events came"
            turn += 1
            asked = [turn, *prompt]
            client.generate_tokens(asked, max_tokens=1).tokens()
            while events.poll(500):
                batch = parse_batch(split_frames(events.recv_multipart())[1])
                assert not batch.left_out
                seen.update(name for event in batch.events if isinstance(event, BlockStored) for name in event.hashes)
    names = block_hashes(asked, BLOCK)
    assert len(names) > 2
    assert seen >= set(names)
    counts = client.status().counts
    assert not {"kv_gaps", "kv_blocks_unnamed", "kv_blocks_elsewhere", "kv_unreadable"} & counts.keys()


def test_an_agents_loop_of_forced_calls_runs_through_vllm_serve(cluster: Cluster, tmp_path: Path) -> None:
    """OpenAI's client with streaming, and an unmodified `vllm serve` by its plugin; `test_front_loop.py` has the other
    clients, beside one engine alone."""
    with unmodified(hugging_face(), tmp_path, *SERVER, PDBUS_VLLM_CONTROLLER=cluster.controller) as served:
        check(loop("openai-chat", served))


def test_a_cancelled_request_is_gone_from_both_engines(cluster: Cluster, client: Client, alone: list[Alone]) -> None:
    streams = [ask(client, alone[7].case, max_tokens=500, ignore_eos=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream._pieces()))
    streams.append(ask(client, alone[7].case, max_tokens=500))  # maybe still at prefill
    for stream in streams:
        stream.cancel()
        assert stream.result.code == "cancelled"
    until(lambda: idle(cluster), "vLLM is idle", 30)
    until(lambda: figure(cluster, DECODE, "vllm:kv_cache_usage_perc") == 0.0, "decode's KV memory is free", 30)
    alone[0].equals(ask(client, alone[0].case).result)


def test_a_pull_that_comes_too_late_gives_no_wrong_token(cluster: Cluster, client: Client, alone: list[Alone]) -> None:
    """The decode engine stands still for longer than the lease, with the request handed to it in time, while prefill
    gives the memory to other prompts. vLLM then decodes from those, and says nothing."""
    late = alone[7]
    case = late.case
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
        kept = []  # a stream that nobody holds cancels its request
        for number in range(3):  # more than there is memory for beside the first
            computed += 400
            others = list(range(1000 + 500 * number, 1400 + 500 * number))
            kept.append(client.generate_tokens(others, max_tokens=1, leg="prefill", bootstrap_room=number))
            until(prefilled, "another one is", 60)
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    late.equals(stream.result)
    assert stream.result.attempts > 1
    assert figure(cluster, DECODE, "pdbus_node_legs_ended_total", code="kv_failed") > refused


def test_a_stream_goes_on_when_the_decode_engine_is_killed_and_started_again(
    cluster: Cluster, client: Client, alone: list[Alone]
) -> None:
    """The node says so, leaves and takes every process of its engine along; whoever supervises it starts it again."""
    case = alone[2].case
    whole = ask(client, case, max_tokens=32, ignore_eos=True).result
    assert len(whole.ids) == 32
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
    start_again(cluster, DECODE)
    for _ in pieces:
        pass
    assert stream.result.ids == whole.ids
    near(stream.result, [each.logprob for each in whole.logprobs])
    assert stream.result.attempts > 1


def test_a_prefill_engine_that_is_killed_costs_no_request(cluster: Cluster, client: Client, alone: list[Alone]) -> None:
    """One's KV cache is being fetched from it, and it computes another's prompt. Both engines are stopped meanwhile, so
    that neither gets any further (but where UCX reads the memory of a process that stands still)."""
    fetched, computing = alone[7], alone[2]
    decode, child = processes_of(cluster.children[DECODE].pid), cluster.children[PREFILL]
    engine = processes_of(child.pid)
    prompts = "vllm:prompt_tokens_total"
    computed = figure(cluster, PREFILL, prompts) + len(fetched.case["ids"])

    generated = figure(cluster, DECODE, "vllm:generation_tokens_total")

    def dispatched() -> int:
        return sum(rank.outstanding for rank in client.status().ranks if rank.role == "prefill")

    def fetching() -> bool:
        waits = figure(cluster, DECODE, "vllm:num_requests_waiting") == 1
        return waits or figure(cluster, DECODE, "vllm:generation_tokens_total") > generated

    for pid in decode:
        os.kill(pid, signal.SIGSTOP)
    try:
        streams = [ask(client, fetched.case)]
        until(lambda: figure(cluster, PREFILL, prompts) >= computed, "one prompt is computed", 60)
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        streams.append(ask(client, computing.case))
        until(lambda: dispatched() == 2, "another one is to be", 20)
    finally:
        for pid in decode:
            os.kill(pid, signal.SIGCONT)
    until(fetching, "decode fetches", 20)
    assert figure(cluster, PREFILL, prompts) == computed
    for pid in engine:
        os.kill(pid, signal.SIGKILL)
    assert child.wait(60), "the node leaves"
    assert child.returncode == 1
    start_again(cluster, PREFILL)
    for each, stream in zip((fetched, computing), streams, strict=True):
        each.equals(stream.result)
    assert streams[1].result.attempts > 1


def test_drain_finishes_what_runs_and_leaves_nothing(cluster: Cluster, client: Client, alone: list[Alone]) -> None:
    """And after a node's own SIGKILL no process of its engine is left either."""
    case = alone[2].case
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
    until(lambda: not any(map(lives, engine)), "no process is left", 20)

    prefill = cluster.children[PREFILL]
    engine = processes_of(prefill.pid)
    assert engine
    prefill.send(signal.SIGKILL)
    until(lambda: not any(map(lives, engine)), "the reaper has been", 20)
    with cluster.client(retries=0) as other, pytest.raises(RequestFailed):
        ask(other, case).tokens()


def test_the_benchmark_runs_its_balancer() -> None:
    with Workspace() as space:
        (sized,) = peers_sides.PEERS["vllm"].start(space, Scope(quick=True), sys.executable)
        for tokens in peers_sides.TOKENS:
            side = sized(tokens)
            cpu_us, per_s = side.burst(40)
            assert cpu_us > 0
            assert per_s > 0
            assert side.one_way(40) > 0
            side.path.client.ask(do="paced", count=40, rate=400.0, **side.asked)
            arrived = [len(node.ask(do="take")) for node in side.path.nodes]
            assert sum(arrived) == 40
            assert min(arrived) >= 10, "no rank got most of what came evenly"
