"""What a KV token takes on its way, learnt from load reports: a controller's cost of a transfer."""

from __future__ import annotations

import pytest
from legs_world import Rank, World, start
from msgspec.structs import replace

from bus.wire.messages import Hello, Load
from controller.costs import Costs
from controller.load.table import LoadTable
from controller.speeds import FetchRate, Speeds
from nodes.link.runner import Event, Fetched


def load(seq: int, fetches: int, tokens: int, microseconds: int) -> Load:
    return Load(
        seq=seq, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=0, max_running=0,
        fetches_total=fetches, fetched_tokens_total=tokens, fetch_us_total=microseconds,
    )  # fmt: skip


def told(*fetches: tuple[int, int]) -> FetchRate:
    """Of reports with one fetch each: (tokens, microseconds)."""
    rate, last = FetchRate(), load(1, 0, 0, 0)
    for number, (tokens, took) in enumerate(fetches, 1):
        then = load(number + 1, number, last.fetched_tokens_total + tokens, last.fetch_us_total + took)
        rate.observe(last, then)
        last = then
    return rate


def test_what_each_fetch_takes_whatever_its_size_is_no_cost_of_a_token() -> None:
    assert told((100, 5000 + 200), (1000, 5000 + 2000), (50, 5000 + 100)).s_per_token == pytest.approx(2e-6)


def test_of_fetches_of_one_size_all_of_it_is() -> None:
    assert told((100, 500), (100, 700)).s_per_token == pytest.approx(6e-6, rel=0.01)
    assert told((0, 500)).s_per_token == 0.0
    assert told((100, 5000), (1000, 100)).s_per_token == 0.0, "a line that falls says nothing"


def test_recent_fetches_count_most() -> None:
    slow = [(size, size * 100) for size in (10, 500)] * 500
    fast = [(size, size) for size in (10, 500)] * 4000
    assert told(*slow, *fast).s_per_token < 3e-6


def test_the_cost_of_a_link_is_what_ranks_like_the_target_report() -> None:
    table, speeds, costs = LoadTable(1), Speeds(), Costs()
    ranks = [
        table.open(
            Hello(
                instance="d", dp_rank=n, epoch=1, role="decode", model="m", dp_size=2, state="ready", endpoint="",
                max_context=0, kv_capacity=0, max_running=0, block_tokens=16,
            )
        )
        for n in range(2)
    ]  # fmt: skip
    costs.add("decode", table, None, lambda: speeds, lambda submit: None)
    assert costs.link_s(ranks[1], ranks[0]) == 0.0
    for report in (load(1, 0, 0, 0), load(2, 1, 1000, 3000)):
        speeds.observe(ranks[0], report, float(report.seq))
        table.apply(ranks[0].key, 1, report, float(report.seq))
    assert costs.link_s(ranks[0], ranks[1]) == pytest.approx(3e-6), "the other rank of the role counts too"
    assert costs.link_s(ranks[0], ranks[0]) == 0.0
    assert Costs(1e-6).link_s(*ranks) == 1e-6


def test_ranks_report_what_they_have_fetched_and_read() -> None:
    world = World()
    prefill = Rank(world, "prefill", "p", reads_back=True)
    decode = Rank(world, "decode", "d", decode_cache=True, reads_back=True)
    start((prefill, decode), "one", list(range(20, 31)), max_tokens=8)
    world.run(1.0)
    said = decode.core.load()
    assert (said.fetches_total, said.fetched_tokens_total) == (1, 11)
    assert 0 < said.fetch_us_total < 1e6
    assert prefill.core.load().fetches_total == 0
    prompt = [*range(20, 31), *decode.tokens["one"], 7, 8, 9]
    start((prefill, decode), "two", prompt, bootstrap_room=6, read_tokens=16)
    world.run(1.0)
    said = prefill.core.load()
    assert (said.fetches_total, said.fetched_tokens_total) == (1, 8)
    assert decode.core.load().fetched_tokens_total == 11 + len(prompt) - 16


def test_seconds_that_last_until_the_first_token_are_no_speed_of_a_link() -> None:
    world = World()
    prefill, decode = Rank(world, "prefill", "p"), Rank(world, "decode", "d")
    emit = decode.runner._emit

    def waits_for_a_step(event: Event) -> None:
        emit(replace(event, to_first_token=True) if isinstance(event, Fetched) else event)

    decode.runner._emit = waits_for_a_step
    start((prefill, decode), "one", list(range(20, 31)), max_tokens=8)
    world.run(1.0)
    assert decode.finishes["one"].finish == "length"
    assert len(decode.core.fetch_s) == 1, "a histogram has them"
    said = decode.core.load()
    assert (said.fetches_total, said.fetched_tokens_total, said.fetch_us_total) == (0, 0, 0)
