"""The queue order `slo` in live clusters: short prompts first, what cannot be in time last, or refused."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from test_cluster_live import settled

from bus.errors import RequestFailed
from pdbus.client import Client, Options
from pdbus.launcher import Cluster

Factory = Callable[..., Cluster]
SLOW = ("--sim-prefill-s-per-token", "0.001", "--sim-base-s", "0.001", "--report-interval-s", "0.05")
BUSY = 3000  # prompt tokens: 3 s


def prompt(tokens: int) -> list[int]:
    """Begins as no other one does that is as long."""
    return [3 + tokens % 89, *(3 + number % 97 for number in range(1, tokens))]


def first_tokens(client: Client, asked: list[tuple[str, int, float | str]]) -> list[str]:
    """The names of what was asked for (prompt tokens, SLO or its class), by the time of their first token."""
    streams = []
    for name, tokens, slo in asked:
        options: Options = {"slo_class": slo} if isinstance(slo, str) else {"ttft_slo_s": slo}
        began = time.monotonic()
        stream = client.generate_tokens(prompt(tokens), max_tokens=2, **options)
        streams.append((name, began, stream))
    return [name for _, name in sorted((began + stream.result.ttft_s, name) for name, began, stream in streams)]


@pytest.mark.parametrize("split", [True, False])
def test_short_prompts_go_first_and_hopeless_ones_last(pdbus_cluster: Factory, split: bool) -> None:
    ranks = {"prefill": 1, "decode": 1} if split else {"unified": 1}
    cluster = pdbus_cluster(
        **ranks, node_args=SLOW, prefill_method="total_tokens", unified_method="total_tokens",
        controller_args=("--queue-order", "slo", "--late-tokens", "200", "--slo-class", "at-once=0.001"),
    )  # fmt: skip
    with cluster.client() as client:
        client.generate_tokens(prompt(100), max_tokens=2).tokens()  # so that the pace is known
        settled(client.status)
        asked = [("busy", BUSY, 60.0), ("hopeless", 400, "at-once"), ("long", 900, 60.0), ("short", 300, 60.0)]
        assert first_tokens(client, asked) == ["busy", "short", "long", "hopeless"]
        counts = settled(client.status).counts
        assert (counts["ttft_slo_kept"], counts["ttft_slo_missed"]) == (4, 1)


def test_what_cannot_be_in_time_is_refused(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(
        unified=1, node_args=SLOW, unified_method="total_tokens",
        controller_args=("--queue-order", "slo", "--late-tokens", "200", "--shed", "hopeless"),
    )  # fmt: skip
    with Client(cluster.controller, retries=0) as client:
        client.generate_tokens(prompt(100), max_tokens=2).tokens()
        settled(client.status)
        busy = client.generate_tokens(prompt(BUSY), max_tokens=2, ttft_slo_s=60.0)
        with pytest.raises(RequestFailed, match="can no longer come in time"):
            client.generate_tokens(prompt(40), max_tokens=2, ttft_slo_s=0.001).tokens()
        assert len(busy.tokens()) == 2


def test_no_decode_rank_gets_what_would_make_its_steps_too_long(pdbus_cluster: Factory) -> None:
    cluster = pdbus_cluster(
        prefill=1, decode=1, node_args=("--sim-base-s", "0.001", "--sim-decode-s", "0.02"),
        prefill_method="total_tokens", decode_method="total_requests",
        controller_args=("--queue-order", "slo", "--tpot-slo-s", "0.05"),
    )  # fmt: skip
    with cluster.client() as client:

        def ask(count: int) -> list[tuple[float, float]]:
            """When each of so many, asked for at once, had its first token and its last."""
            asked = [(time.monotonic(), client.generate_tokens(prompt(9), max_tokens=30)) for _ in range(count)]
            return [(at + stream.result.ttft_s, at + stream.result.total_s) for at, stream in asked]

        for count in (1, 2):  # 21 ms a step, then 41
            ask(count)
            settled(client.status)
        times = ask(3)
        assert max(first for first, _ in times) > min(last for _, last in times)
