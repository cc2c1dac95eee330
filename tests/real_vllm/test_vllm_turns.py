"""Conversations over a prefill and a decode engine of real vLLM on a CPU, the decode engine with a cache: nobody can
tell where a turn was computed, but by what was computed.

Each turn repeats the last one and its answer, as one engine alone gives it, so all prompts are known. Then reads that
end too late, of either engine, and one that is killed. CONVERSATIONS (4) for each way, of four turns, or five of more
conversations, LATE (1) reads of either and KILLS (1) are variables of the environment.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from real_engines import (
    BLOCK,
    BLOCKS,
    DECODE,
    ENGINE,
    ENV,
    PREFILL,
    cluster_of,
    figure,
    idle,
    processes_of,
    said_alone,
    start_again,
    until,
)

from pdbus.client import Client, Result
from pdbus.launcher import Cluster
from pdbus.text.models import text_for

pytestmark = pytest.mark.timeout(3600)

CONVERSATIONS = int(os.environ.get("CONVERSATIONS") or 4)
LATE = int(os.environ.get("LATE") or 1)
KILLS = int(os.environ.get("KILLS") or 1)
TURNS, TOKENS = 5 if CONVERSATIONS > 4 else 4, 8
AT_ONCE = 4  # as many as both engines keep in their memory
LEASE_S = 12
DECODE_BLOCKS = 480  # of KV memory: a tenth of it, which can be read back, has the conversations that are under way
PIN_S = 8  # for which that is kept
WAYS = ("auto", "prefill", "decode")
BY = "vllm:prompt_tokens_by_source_total"
NAMED: dict[str, Any] = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}  # a pair, whatever it would cost
LONG = 900  # tokens of a prompt whose KV cache no socket's buffers can hold
SHORTER = 400  # of another one
PARAMS: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
MORE = (" And then?", " Why was that so? Say it in a few words.", " Who else was there, and where are they?", " I see.")


class Turn(NamedTuple):
    prompt: list[int]
    answer: list[int]
    new: int  # tokens of the prompt that no earlier turn had in its prompt; 0: it is the first turn


def conversations() -> list[dict[str, Any]]:
    """For each way, and for the kills; after them the prompts whose reads are late, of one turn in truth, or two."""
    encode = text_for("smollm2").encode
    story = "was a town by the sea, and in it lived a baker who gave bread to every bird that came to the window. "
    found = []
    for number in range(4 * CONVERSATIONS):
        begin = encode(f"Story {number}. Once upon a time there {story * (3 + number % 3)}")
        if number % 4 == 0:
            begin = begin[: 2 * BLOCK]  # fills its blocks
        found.append({"ids": begin, "more": [encode(f"{each} ({number})") for each in MORE], "params": PARAMS})
    sea = "A ship sails over the wide sea at night, and nobody knows where it goes. " * 70
    for number in range(2 * LATE):
        ids = encode(f"Number {number}. {sea}")[: LONG if number < LATE else SHORTER]
        found.append({"ids": ids, "more": [encode(" And?")] * len(MORE), "params": PARAMS})
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[Turn]]:
    """All conversations as one engine alone has them."""
    asked = conversations()
    found = []
    for case, answers in zip(asked, said_alone(tmp_path_factory.mktemp("alone"), asked), strict=True):
        prompt: list[int] = case["ids"]
        turns: list[Turn] = []
        for number, answer in enumerate(answers):
            turns.append(Turn(prompt, answer, len(prompt) - len(turns[-1].prompt) if turns else 0))
            prompt = [*prompt, *answer, *(case["more"][number] if number < len(MORE) else ())]
        found.append(turns)
    return found


@pytest.fixture(scope="module")
def cluster(told: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """KV caches travel by TCP alone: so a read takes an engine at either end, and one that is stopped holds it up."""
    assert ENGINE[-1] == str(BLOCKS)
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"decoder_kv_blocks_ttl": PIN_S}}  # fmt: skip
    decode = (*ENGINE[:-1], str(DECODE_BLOCKS), "--kv-transfer-config", json.dumps(transfer))
    with cluster_of(
        1, tmp_path_factory.mktemp("logs"), LEASE_S, decode_method="least_cost", engine_args=(),
        prefill_args=("--", *ENGINE), decode_args=("--decode-cache", "--", *decode),
        env={**ENV, "UCX_TLS": "tcp,self"},
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client(retries=10_000) as made:
        yield made


def prefill_at(cluster: Cluster, way: str) -> None:
    """Start the controller again; it learns the ranks and what they cache from them."""
    child = cluster.children["controller-0"]
    args = child.spec.args
    if "--prefill-at" in args:
        args = args[: args.index("--prefill-at")]
    child.spec = replace(child.spec, args=(*args, "--prefill-at", way))
    cluster.restart("controller-0")
    with cluster.client() as client:
        until(lambda: len(client.status().ranks) == 2, "both ranks are back", 60)


def asked(client: Client, turn: Turn, **changes: Any) -> Any:
    return client.generate_tokens(turn.prompt, **PARAMS, **changes)


def right(result: Result, turn: Turn) -> Result:
    assert list(result.ids) == turn.answer
    return result


def tokens_by(cluster: Cluster, source: str) -> Counter[str]:
    return Counter({part: int(figure(cluster, part, BY, source=source)) for part in (PREFILL, DECODE)})


def computed(cluster: Cluster) -> Counter[str]:
    return tokens_by(cluster, "local_compute")


@pytest.mark.parametrize("way", WAYS)
def test_turns_are_those_of_one_engine_and_cost_what_is_new(cluster: Cluster, told: list[list[Turn]], way: str) -> None:
    """At each engine, by vLLM's own counters: what the results say is what was computed, and after the first turn
    that is what is new, and the rest of a block. The last turn of those that decode computes is a pair's by name:
    prefill, which has seen none of them, reads all of the earlier ones back, in whole blocks."""
    prefill_at(cluster, way)
    first = WAYS.index(way) * CONVERSATIONS
    before, trips, expected = computed(cluster), Counter[str](), Counter[str]()
    moved = tokens_by(cluster, "external_kv_transfer")
    to_fetch = to_read = 0
    with cluster.client(retries=10_000) as client:
        for group in range(first, first + CONVERSATIONS, AT_ONCE):
            for number in range(TURNS):
                turns = [each[number] for each in told[group : min(group + AT_ONCE, first + CONVERSATIONS)]]
                back = way == "decode" and number == TURNS - 1
                streams = [asked(client, turn, **(NAMED if back else {})) for turn in turns]
                results = [right(stream.result, turn) for stream, turn in zip(streams, turns, strict=True)]
                known = [len(turn.prompt) - turn.new + TOKENS - 1 for turn in turns] if back else ()
                to_read += sum(tokens // BLOCK * BLOCK for tokens in known)
                for result, turn in zip(results, turns, strict=True):
                    lacked = len(turn.prompt) - result.cached_tokens
                    expected[DECODE if result.prefill is None else PREFILL] += lacked
                    trips["at decode" if result.prefill is None else "pair"] += 1
                    if turn.new and way != "auto":  # there the engine that is picked may lack several turns
                        assert lacked <= turn.new + BLOCK
                    to_fetch += 0 if result.prefill is None else turn.new + BLOCK if turn.new else len(turn.prompt)
                until(lambda: idle(cluster), "both engines have told all", 30)
        counts = client.status().counts
    assert computed(cluster) - before == expected
    moved = tokens_by(cluster, "external_kv_transfer") - moved
    assert moved[DECODE] <= to_fetch
    both = CONVERSATIONS * TURNS
    shown = {name: counts.get(f"trip_{name}", 0) for name in ("at_decode", "delta", "read_back", "whole")}
    assert shown["at_decode"] == trips["at decode"]
    assert shown["delta"] + shown["read_back"] + shown["whole"] == trips["pair"]
    if way == "auto":  # several at once: the batch there is worth sparing
        assert shown["at_decode"] + shown["read_back"] > 0
        assert trips["pair"] >= CONVERSATIONS / 2
    if way == "decode":
        assert shown == {"at_decode": both - CONVERSATIONS, "delta": 0, "read_back": CONVERSATIONS, "whole": 0}
        assert moved[PREFILL] == to_read > 0
    if way == "prefill":
        assert trips["pair"] == both
        assert shown["whole"] <= CONVERSATIONS, "decode fetched what it lacked alone"


def send(engine: list[int], number: signal.Signals) -> None:
    """To an engine's processes; its node is none of them."""
    for pid in engine:
        os.kill(pid, number)


def has_computed(cluster: Cluster, tokens: float) -> bool:
    return figure(cluster, PREFILL, "vllm:prompt_tokens_total") >= tokens


def use_again(cluster: Cluster, client: Client, seed: int) -> None:
    """Fill prefill's memory with other prompts: more than it has."""
    count = figure(cluster, PREFILL, "vllm:prompt_tokens_total")
    kept = []  # a stream that nobody holds cancels its request
    for number in range(2):
        count += LONG
        prompt = random.Random(f"{seed} {number}").choices(range(1000, 40_000), k=LONG)  # no other has its beginning
        kept.append(client.generate_tokens(prompt, max_tokens=1, leg="prefill", bootstrap_room=2 * seed + number))
        until(partial(has_computed, cluster, count), "it is computed")


@pytest.mark.parametrize("number", range(LATE))
def test_what_prefill_reads_back_too_late_is_computed(
    cluster: Cluster, client: Client, told: list[list[Turn]], number: int
) -> None:
    """The read begins in time, and gets no further while decode stands still; then prefill does, until decode may use
    the memory again. It costs the request nothing but the time, and prefill caches what it has computed."""
    if number == 0:
        prefill_at(cluster, "decode")
    first, second = told[4 * CONVERSATIONS + LATE + number][:2]
    prefill, decode = (processes_of(cluster.children[part].pid) for part in (PREFILL, DECODE))
    until(lambda: not any(rank.load.kv_pinned for rank in client.status().ranks if rank.load), "nothing is pinned", 30)
    right(asked(client, first).result, first)
    ends = time.monotonic() + PIN_S + 1.0
    until(lambda: idle(cluster), "decode has told all", 30)
    read, worked = (tokens_by(cluster, source)[PREFILL] for source in ("external_kv_transfer", "local_compute"))
    send(decode, signal.SIGSTOP)
    try:
        stream = asked(client, second, **NAMED)
        until(lambda: figure(cluster, PREFILL, "vllm:num_requests_waiting") == 1, "prefill reads", 20)
        send(prefill, signal.SIGSTOP)
        send(decode, signal.SIGCONT)
        until(lambda: time.monotonic() >= ends, "its time is over", PIN_S + 10)
    finally:
        send([*prefill, *decode], signal.SIGCONT)
    right(stream.result, second)
    assert stream.result.attempts == 1
    until(lambda: idle(cluster), "both engines have told all", 30)
    log = cluster.children[PREFILL].log.read_text(errors="replace")
    assert log.count("came after their time") == number + 1, "it had begun in time"
    assert tokens_by(cluster, "external_kv_transfer")[PREFILL] == read
    assert tokens_by(cluster, "local_compute")[PREFILL] == worked + len(second.prompt)
    hits = figure(cluster, PREFILL, BY, source="local_cache_hit")
    right(asked(client, second, **NAMED).result, second)
    until(lambda: idle(cluster), "both engines have told all", 30)
    assert figure(cluster, PREFILL, BY, source="local_cache_hit") == hits + (len(second.prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("number", range(LATE))
def test_a_read_that_ends_after_its_lease_gives_no_wrong_token_and_stays_in_no_cache(
    cluster: Cluster, client: Client, told: list[list[Turn]], number: int
) -> None:
    """It begins in time, and gets no further while prefill stands still; then decode does, until the lease is over and
    the memory used again. vLLM by itself answers from that, and keeps it under the prompt's hashes."""
    if number == 0:
        prefill_at(cluster, "auto")
    turn, rid = told[4 * CONVERSATIONS + number][0], f"late-{number}"
    failed = figure(cluster, DECODE, "pdbus_node_legs_ended_total", code="kv_failed")
    prefill, decode = (processes_of(cluster.children[part].pid) for part in (PREFILL, DECODE))
    assert prefill
    assert decode

    def events() -> set[str]:
        return {event.what for part in client.trace(rid).parts for event in part.events}

    send(decode, signal.SIGSTOP)
    try:
        stream = asked(client, turn, rid=rid, **NAMED)
        until(lambda: "handed" in events(), "decode has the handle", 90)
        ends = time.monotonic() + LEASE_S + 1.0
        send(prefill, signal.SIGSTOP)
        send(decode, signal.SIGCONT)
        until(lambda: figure(cluster, DECODE, "vllm:num_requests_waiting") == 1, "decode reads", 20)
        send(decode, signal.SIGSTOP)
        send(prefill, signal.SIGCONT)
        until(lambda: time.monotonic() >= ends, "the lease is over", LEASE_S + 10)
        use_again(cluster, client, number)
    finally:
        send([*prefill, *decode], signal.SIGCONT)
    right(stream.result, turn)
    assert stream.result.attempts > 1
    assert figure(cluster, DECODE, "pdbus_node_legs_ended_total", code="kv_failed") == failed + 1
    log = cluster.children[DECODE].log.read_text(errors="replace")
    assert log.count("came after their time") == number + 1, "it had begun in time"
    until(lambda: idle(cluster), "both engines have told all", 30)
    hits = figure(cluster, DECODE, BY, source="local_cache_hit")
    right(asked(client, turn).result, turn)
    until(lambda: idle(cluster), "both engines have told all", 30)
    assert figure(cluster, DECODE, BY, source="local_cache_hit") == hits + (LONG - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_decode_engine_that_is_killed_costs_a_whole_trip_and_no_error(
    cluster: Cluster, client: Client, told: list[list[Turn]], kill: int
) -> None:
    """In some turn, after some tokens of it; then the engine that came back keeps the conversations, whichever engine
    computes what is new. (Of a pair the result tells what prefill cached, which may be nothing.)"""
    rng = random.Random(kill)
    first = 3 * CONVERSATIONS + kill * AT_ONCE % CONVERSATIONS
    group, killed_in = told[first : min(first + AT_ONCE, 4 * CONVERSATIONS)], rng.randrange(1, TURNS - 1)
    for number in range(TURNS):
        turns = [each[number] for each in group]
        hits = figure(cluster, DECODE, BY, source="local_cache_hit")
        streams = [asked(client, turn) for turn in turns]
        if number == killed_in:
            pieces = streams[0]._pieces()
            for _ in range(rng.randrange(1, TOKENS - 1)):
                next(pieces)
            child = cluster.children[DECODE]
            os.kill(max(processes_of(child.pid)), signal.SIGKILL)
            assert child.wait(60)
            start_again(cluster, DECODE)
        results = [right(stream.result, turn) for stream, turn in zip(streams, turns, strict=True)]
        if number > killed_in:
            assert all(result.attempts == 1 for result in results)
            until(lambda: idle(cluster), "both engines have told all", 30)
            kept = sum((len(turn.prompt) - turn.new) // BLOCK * BLOCK for turn in turns)
            assert figure(cluster, DECODE, BY, source="local_cache_hit") >= hits + kept
