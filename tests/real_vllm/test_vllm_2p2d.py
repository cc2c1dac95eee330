"""Two prefill and two decode engines of real vLLM, any of which may serve any request: what one and one can't show.

Four engines on two cores are slow, and take 10 GB: `make test-vllm-2p2d`, no other run.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from real_engines import Alone, answers_alone, ask, cluster_of, figure, idle, processes_of, start_again, until

from pdbus.client import Client
from pdbus.launcher import Cluster

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Alone]:
    """The greedy ones: what is sampled by seed changes with vLLM's batches."""
    found = answers_alone(tmp_path_factory.mktemp("alone"))
    return [each for each in found if "seed" not in each.case["params"]]


@pytest.fixture(scope="module")
def cluster(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(2, tmp_path_factory.mktemp("logs"), lease_s=60) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client(retries=100) as made:
        yield made


def test_every_pair_gives_the_tokens_of_one_engine_alone(cluster: Cluster, client: Client, alone: list[Alone]) -> None:
    for prefill, decode in itertools.product(range(2), range(2)):
        streams = [ask(client, each.case, disagg_prefill_dp_rank=prefill, routed_dp_rank=decode) for each in alone]
        for each, stream in zip(alone, streams, strict=True):
            each.equals(stream.result)
            assert stream.result.prefill is not None
            assert stream.result.decode is not None
            assert (stream.result.prefill.dp_rank, stream.result.decode.dp_rank) == (prefill, decode)
    for part in ("decode-0/0", "decode-0/1"):
        assert figure(cluster, part, "vllm:prompt_tokens_by_source_total", source="local_compute") == 0


def test_the_others_take_over_what_a_killed_prefill_and_a_killed_decode_engine_had(
    cluster: Cluster, client: Client, alone: list[Alone]
) -> None:
    for victim in ("prefill-0/0", "decode-0/1"):
        streams = [ask(client, each.case) for each in alone]
        if victim.startswith("decode"):
            next(iter(streams[0]._pieces()))  # some decode by now
        child = cluster.children[victim]
        for pid in processes_of(child.pid):
            os.kill(pid, signal.SIGKILL)
        for each, stream in zip(alone, streams, strict=True):
            each.equals(stream.result)
        assert child.wait(60)
        assert child.returncode == 1
        start_again(cluster, victim)
    until(lambda: idle(cluster), "vLLM is idle", 60)
