"""Whole clusters of processes, started by the pytest plugin: three deployments, every method, ipc and tcp."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_broker_live import Asker

from bus.errors import RequestFailed
from bus.wire.messages import Params, Status
from controller.policies import POLICIES
from nodes.own.engines.sim import sim_generate
from pdbus.client import AsyncClient, Client, Result
from pdbus.launcher import Cluster

Factory = Callable[..., Cluster]
BLOCK_TOKENS = 16  # of the sim engine
SHARED = [3 + n for n in range(4 * BLOCK_TOKENS)]  # what every prompt begins with


def settled(read: Callable[[], Status], deadline_s: float = 60.0) -> Status:
    """The status once nothing is in flight or estimated any more; fails when that does not come about."""
    until = time.monotonic() + deadline_s
    while True:
        status = read()
        busy = [
            rank
            for rank in status.ranks
            if rank.estimate_requests or rank.estimate_tokens or rank.in_flight_requests or rank.outstanding
        ]
        if not busy:
            return status
        assert time.monotonic() < until, f"still busy: {busy}"
        time.sleep(0.01)


def stays_where_it_is_cached(client: Client, rank_of: Callable[[Result], object], **options: Any) -> None:
    """One at a time, a prompt returns to the rank that has computed it: all are idle, and the others would have to."""
    prompt = [*SHARED, *range(200, 200 + 6 * BLOCK_TOKENS)]
    ranks = set()
    for _ in range(4):
        result = client.generate_tokens(prompt, max_tokens=2, block_tokens=BLOCK_TOKENS, **options).result
        ranks.add(rank_of(result))
        settled(client.status)
    assert len(ranks) == 1, ranks


def run_some(client: Client, count: int = 12, **options: Any) -> list[Result]:
    """`count` requests at once, each checked against the sim engine's rule."""
    rng = random.Random(7)
    prompts = [[*SHARED, *(rng.randrange(3, 500) for _ in range(rng.randrange(1, 200)))] for _ in range(count)]
    options.setdefault("block_tokens", BLOCK_TOKENS)
    streams = [client.generate_tokens(prompt, max_tokens=1 + i % 9, **options) for i, prompt in enumerate(prompts)]
    for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        assert stream.tokens() == sim_generate(prompt, 1 + i % 9)
    return [stream.result for stream in streams]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_one_controller_for_both_roles(pdbus_cluster: Factory, transport: str) -> None:
    """Deployment (a): decode is told where prefill ran."""
    cluster = pdbus_cluster(
        prefill=2, decode=2, ranks_per_process=2, transport=transport,
        prefill_method="total_tokens", decode_method="total_requests",
    )  # fmt: skip
    with cluster.client() as client:
        results = run_some(client)
        assert {result.found_by for result in results} == {"told"}
        assert {result.prefill.dp_rank for result in results if result.prefill} == {0, 1}
        assert {result.decode.dp_rank for result in results if result.decode} == {0, 1}
        fixed = run_some(client, 3, routed_dp_rank=1, disagg_prefill_dp_rank=0)
        assert {(r.prefill.dp_rank, r.decode.dp_rank) for r in fixed if r.prefill and r.decode} == {(0, 1)}
        status = settled(client.status)
        assert sum(rank.dispatched_total for rank in status.ranks) == 2 * 15


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize(("method", "found_by"), [("total_tokens", "asked"), ("follow_bootstrap_room", "computed")])
def test_one_controller_per_instance(pdbus_cluster: Factory, transport: str, method: str, found_by: str) -> None:
    """Deployment (b): neither knows of the other; decode asks the broker or computes; and (c): all fixed."""
    cluster = pdbus_cluster(
        prefill=2, decode=2, ranks_per_process=2, transport=transport, controllers="per_instance", prefill_method=method
    )
    with cluster.client() as client:
        if method == "follow_bootstrap_room":
            with Asker(cluster.bus) as asker:
                asker.until_followed("prefill-0", 2)
        results = run_some(client)
        assert {result.found_by for result in results} == {found_by}
        if method == "follow_bootstrap_room":
            for result in results:
                assert result.prefill is not None
                assert result.bootstrap_room is not None
                assert result.prefill.dp_rank == result.bootstrap_room % 2
        fixed = run_some(client, 4, routed_dp_rank=0, disagg_prefill_dp_rank=1, prefill_instance="prefill-0")
        assert {(r.prefill.dp_rank, r.decode.dp_rank) for r in fixed if r.prefill and r.decode} == {(1, 0)}
        assert {result.found_by for result in fixed} == {"told"}
        for name in cluster.controllers:
            settled(lambda name=name: cluster.status(name))  # type: ignore[misc]


@pytest.mark.parametrize("method", POLICIES)
def test_every_method_on_every_leg(pdbus_cluster: Factory, method: str) -> None:
    cluster = pdbus_cluster(
        prefill=3, decode=3, unified=2, ranks_per_process=3, prefill_method=method, decode_method=method,
        unified_method=method,
    )  # fmt: skip
    with cluster.client() as client:
        alone = run_some(client, 6, leg="unified")
        assert {result.found_by for result in alone} == {"local"}
        assert {result.prefill for result in alone} == {None}
        results = run_some(client, 15, leg="pair")
        status = settled(client.status)
        assert set(status.methods.values()) == {method}
        if method == "cache_aware":
            assert status.counts["prefix_blocks"] >= len(SHARED) // BLOCK_TOKENS
            stays_where_it_is_cached(client, lambda result: (result.prefill, result.decode), leg="pair")
            stays_where_it_is_cached(client, lambda result: result.decode, leg="unified")
            cluster.restart("controller-0")
            until = time.monotonic() + 30.0
            while client.status().counts.get("prefix_blocks", 0) < len(SHARED) // BLOCK_TOKENS:
                assert time.monotonic() < until, "the ranks say nothing of what they have cached"
                time.sleep(0.05)
            return
    if method == "follow_bootstrap_room":
        for result in results:
            assert result.bootstrap_room is not None
            assert result.prefill is not None
            assert result.decode is not None
            assert result.prefill.dp_rank == result.decode.dp_rank == result.bootstrap_room % 3
    else:
        assert {result.decode.dp_rank for result in results if result.decode} == {0, 1, 2}


@pytest.mark.cold  # it reads an environment in /proc
def test_several_instances_and_an_embedded_centre(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(
        prefill=1, decode=1, prefill_instances=2, decode_instances=2, embedded=True, gpus=("6", "7", "4,5", "3")
    )
    environ = Path(f"/proc/{cluster.children['decode-0/0'].pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=4,5" in environ, "its own GPUs, prefill's coming first"
    with cluster.client() as client:
        chosen = run_some(client, 3, instance="decode-1", prefill_instance="prefill-1")
        assert {(r.prefill.instance, r.decode.instance) for r in chosen if r.prefill and r.decode} == {
            ("prefill-1", "decode-1")
        }
        anywhere = run_some(client, 8)
        assert {result.decode.instance for result in anywhere if result.decode} == {"decode-0", "decode-1"}
        settled(client.status)


def test_two_hundred_mixed_requests_on_sixteen_ranks(pdbus_cluster: Factory) -> None:
    """Every one completes with the right tokens; all estimates come back to zero. (Teardown checks what is left.)"""
    cluster = pdbus_cluster(
        prefill=8, decode=8, ranks_per_process=4, prefill_method="total_tokens", decode_method="total_requests"
    )
    rng = random.Random(1)

    async def one(client: AsyncClient) -> Result:
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice([1, 15, 16, 17, 100, 700, 2500]))]
        n = rng.choice([1, 2, 10, 40])
        stream = await client.generate_tokens(prompt, max_tokens=n, priority=rng.choice([-1, 0, 5]))
        assert await stream.tokens() == sim_generate(prompt, n)
        assert stream.result is not None
        return stream.result

    async def all_of_them() -> list[Result]:
        async with AsyncClient(cluster.controller) as client:
            return await asyncio.gather(*(one(client) for _ in range(200)))

    results = asyncio.run(all_of_them())
    assert len({result.rid for result in results}) == 200
    assert {result.finish for result in results} == {"length"}
    status = settled(cluster.status)
    dispatched = sum(rank.dispatched_total for rank in status.ranks)
    assert dispatched == sum(rank.ended_total for rank in status.ranks)
    assert dispatched >= 2 * len(results)
    # Where this machine stands still, requests are tried again, and submits without an answer come again.
    if status.counts["submitted"] == len(results) and all(result.attempts == 1 for result in results):
        assert dispatched == 2 * len(results)
    for role in ("prefill", "decode"):
        shares = [rank.dispatched_total for rank in status.ranks if rank.role == role]
        assert len(shares) == 8
        assert min(shares) > 0, shares


def test_threads_cancel_deadline_and_text(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(prefill=1, decode=1, node_args=("--sim-base-s", "0.02"))
    with cluster.client() as client:
        done: list[bool] = []
        threads = [
            threading.Thread(target=lambda: done.append(len(run_some(client, 3)) == 3), daemon=True) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert done == [True] * 4

        stream = client.generate_tokens([5, 6], max_tokens=5000)
        for piece in stream:
            assert piece.ids
            stream.cancel()
        assert stream.result.finish == "cancelled"
        assert 1 <= len(stream.result.ids) < 5000

        for _ in client.generate_tokens([5, 6], max_tokens=5000, rid="left-early"):
            break

        with pytest.raises(RequestFailed) as caught:
            client.generate_tokens([5, 6], max_tokens=5000, deadline_s=0.5).tokens()
        assert caught.value.code == "deadline"

        spoken = client.generate("hi", chat=False, max_tokens=12)
        text = spoken.text()
        assert list(spoken.result.ids) == sim_generate([3 + byte for byte in b"hi"], 12)
        assert text
        settled(client.status)  # nothing that was cancelled is left anywhere


def test_split_equals_single_process_on_the_torch_engine(pdbus_cluster: Factory) -> None:
    from nodes.own.engines.reference import generate_alone

    cluster = pdbus_cluster(
        prefill=2, decode=2, ranks_per_process=2, engine="torch", model="tiny",
        prefill_method="total_tokens", decode_method="total_requests",
    )  # fmt: skip
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 259) for _ in range(size)] for size in (1, 15, 16, 17, 40, 130)]
    with cluster.client() as client:
        streams = [client.generate_tokens(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
        outputs = [stream.tokens() for stream in streams]
        likely = [client.generate_tokens(p, max_tokens=9, ignore_eos=True, logprobs=3).result for p in prompts]
        sampled = client.generate_tokens(prompts[4], max_tokens=12, temperature=1.0, seed=11, ignore_eos=True).tokens()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == generate_alone("tiny", prompt, 20, Params(ignore_eos=True))
        assert len(set(output)) > 3, "an engine that echoes one token proves nothing"
    for output, result in zip(outputs, likely, strict=True):
        assert list(result.ids) == output[:9]
        assert [each.top[0] for each in result.logprobs] == [
            (token, each.logprob) for token, each in zip(result.ids, result.logprobs, strict=True)
        ], "greedy: the first token too, which prefill made"
        assert all(len(each.top) == 3 and each.top == tuple(sorted(each.top, key=lambda of: -of[1]))
                   for each in result.logprobs)  # fmt: skip
    assert sampled == generate_alone("tiny", prompts[4], 12, Params(temperature=1.0, seed=11, ignore_eos=True))


def test_a_killed_rank_and_a_restarted_controller_cost_no_request(pdbus_cluster: Factory) -> None:
    """Resumed mid-stream by the client; the restarted part is used again."""
    cluster = pdbus_cluster(prefill=1, decode=2, node_args=("--sim-base-s", "0.02"), decode_method="total_requests")
    with cluster.client(connect_timeout_s=60.0) as client:
        streams = [client.generate_tokens([5, 6, i], max_tokens=150) for i in range(3, 7)]
        read = [iter(stream) for stream in streams]
        first = [next(pieces) for pieces in read]
        cluster.kill("decode-0/0")
        for i, (piece, pieces) in enumerate(zip(first, read, strict=True), 3):
            assert [*piece.ids, *(token for more in pieces for token in more.ids)] == sim_generate([5, 6, i], 150)
        assert max(stream.result.attempts for stream in streams) >= 2
        assert min(stream.result.attempts for stream in streams) == 1
        cluster.restart("decode-0/0")

        pieces = iter(client.generate_tokens([9, 9], max_tokens=100))
        piece = next(pieces)
        cluster.kill("controller-0")
        cluster.restart("controller-0")
        assert [*piece.ids, *(token for more in pieces for token in more.ids)] == sim_generate([9, 9], 100)
        assert len(run_some(client, 4)) == 4
