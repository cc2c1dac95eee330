"""Real SGLang servers, prefill and decode split, with the plugin and without it.

Not stock: torch is a CPU build, what needs a GPU is stood in for, and Mooncake's sender gets page numbers from ordinary
memory (`environment.py`, `harness.py`). Three fleets, one after the other: two cores are not enough for more at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from model import make as make_model
from servers import DECODE, Pair, Server, fleet, free_port_with, greedy, plugins, prefill, until

from bus import Resolver

pytestmark = pytest.mark.timeout(1500)

DP_2 = ("--dp-size", "2")
PAGE = 16
HANG_S = 20.0
ROOM_S, LOST_S = 20, 5


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


PREFIX = prompt(99, 40 * PAGE)
PROMPTS = [prompt(seed, 8 if seed % 3 else 900) for seed in range(12)]
ALIKE = [PREFIX + prompt(seed, 20) for seed in range(100, 106)]
OPENINGS = [prompt(seed, 21 * PAGE - 7) for seed in range(200, 204)]  # an answer, but its last token, fills the page
TURNS = 3


def next_turn(ids: list[int], answer: list[int]) -> list[int]:
    """A conversation's next prompt: the last one, its answer, and what is said then."""
    return [*ids, *answer, *prompt(ids[0] + len(ids), 40)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    make_model(place)
    return place


class Stock:
    """What SGLang does alone: the answers of one server, and those of a pair with two prefill ranks."""

    def __init__(self, model: Path, folder: Path) -> None:
        port = free_port_with()
        paths = plugins(folder / "path", pdbus=False)
        servers = {
            "single": ("--page-size", str(PAGE)),
            "prefill": (*prefill(port), *DP_2, "--load-balance-method", "round_robin"),
            "decode": DECODE,
        }
        with fleet(folder, model, servers, PYTHONPATH=paths) as started:
            ask = started["single"].ask
            bodies = [{"input_ids": ids, "sampling_params": greedy(8)} for ids in [*PROMPTS, *ALIKE]]
            answers = [ask(body)["output_ids"] for body in bodies]
            self.answers = {tuple(body["input_ids"]): answer for body, answer in zip(bodies, answers, strict=True)}
            for ids in OPENINGS:
                for _ in range(TURNS):
                    answer = ask({"input_ids": ids, "sampling_params": greedy(8)})["output_ids"]
                    self.answers[tuple(ids)] = answer
                    ids = next_turn(ids, answer)
            pair = Pair(started["prefill"], started["decode"], port)
            self.pairs = pair.ask_all(PROMPTS[1:3], timeout_s=HANG_S)


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock(model, tmp_path_factory.mktemp("stock"))


def ranks_of(stock: Stock, prompts: list[list[int]], answers: list[Any]) -> list[tuple[int, int]]:
    """The prefill and decode ranks of answers, which must be those of one server alone."""
    for ids, (prefilled, decoded) in zip(prompts, answers, strict=True):
        assert "error" not in prefilled, prefilled
        assert "error" not in decoded, decoded
        assert decoded["output_ids"] == stock.answers[tuple(ids)]
    return [(first["meta_info"]["dp_rank"], second["meta_info"]["dp_rank"]) for first, second in answers]


# --- alone ------------------------------------------------------------------------------------------------------------


def test_answers_differ_so_that_equal_ones_mean_something(stock: Stock) -> None:
    assert len({tuple(answer) for answer in stock.answers.values()}) == len(stock.answers)
    assert all(len(set(answer)) > 2 for answer in stock.answers.values())


def test_the_stock_pair_hangs_on_the_second_prefill_rank(stock: Stock) -> None:
    """The control: two requests, one to each rank."""
    ended = ["error" not in decoded for _, decoded in stock.pairs]
    assert sorted(ended) == [False, True], stock.pairs


# --- total_tokens, with the broker that the plugin starts -------------------------------------------------------------


class Plugged:
    def __init__(self, folder: Path, servers: dict[str, Server], bootstrap_port: int) -> None:
        self.servers = servers
        self.pair = Pair(servers["prefill"], servers["decode"], bootstrap_port)
        self.bus = f"tcp://127.0.0.1:{bootstrap_port + 100}"
        self._queries = folder / "queries"

    def body(self, ids: list[int], room: int) -> dict[str, Any]:
        """One leg of a request; both legs have the same room."""
        return self.pair.body(ids, bootstrap_room=room)

    @property
    def asked_by_http(self) -> int:
        return len(self._queries.read_text().splitlines()) if self._queries.exists() else 0


@pytest.fixture(scope="module")
def total_tokens(stock: Stock, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    """One pip install and one environment variable; the two others only make the tests short."""
    folder = tmp_path_factory.mktemp("total_tokens")
    port = free_port_with(100, 101, 102)
    servers = {"prefill": (*prefill(port), *DP_2), "decode": (*DECODE, *DP_2)}
    env = {
        "PYTHONPATH": plugins(folder / "path", pdbus=True), "PDBUS_TEST_QUERIES": str(folder / "queries"),
        "PDBUS_DIR": str(folder / "run"), "PDBUS_SGLANG_METHOD": "total_tokens",
        "PDBUS_SGLANG_ROOM_S": str(ROOM_S), "PDBUS_SGLANG_LOST_S": str(LOST_S),
    }  # fmt: skip
    with fleet(folder, model, servers, **env) as started:
        yield Plugged(folder, started, port)


def test_a_pair_answers_as_one_server_does(total_tokens: Plugged, stock: Stock) -> None:
    """Any method with two prefill ranks, which stock SGLang hangs on; and decode asks nobody over HTTP."""
    ranks = ranks_of(stock, PROMPTS, total_tokens.pair.ask_all(PROMPTS))
    assert {first for first, _ in ranks} == {0, 1}
    assert {second for _, second in ranks} == {0, 1}
    assert total_tokens.asked_by_http == 0
    for name in ("prefill", "decode"):
        said = total_tokens.servers[name].said()
        assert "pdbus.plugin.on" in said
        assert "pdbus.dispatch.by_pdbus method='total_tokens'" in said


def test_the_ranks_that_a_router_chose_are_found(total_tokens: Plugged, stock: Stock) -> None:
    """By `routed_dp_rank` at prefill, without telling decode of it."""
    for rank in (1, 0, 1):
        room = random.Random(rank).getrandbits(62)
        body = total_tokens.body(PROMPTS[1], room)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(total_tokens.servers["prefill"].ask, body | {"routed_dp_rank": rank})
            answers = total_tokens.servers["decode"].ask(body), prefilled.result()
        answers = answers[::-1]
        assert ranks_of(stock, [PROMPTS[1]], [answers])[0][0] == rank


def test_an_idle_dp_controller_sleeps(total_tokens: Plugged) -> None:
    """Stock, it takes most of a core."""
    before = cpu_s(total_tokens.servers["prefill"])
    deadline = before[0] + 3.0
    until(lambda: cpu_s(total_tokens.servers["prefill"])[0] >= deadline, "three seconds have passed", 10)
    after = cpu_s(total_tokens.servers["prefill"])
    assert (after[1] - before[1]) / (after[0] - before[0]) < 0.1


def cpu_s(server: Server) -> tuple[float, float]:
    """The time, and the CPU time of a server's DP controller."""
    (pid,) = server.titled("sglang::data_parallel_controller")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.monotonic(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_prefill_rank_dies_and_decode_ends_with_a_reason(total_tokens: Plugged, stock: Stock) -> None:
    """SIGKILL between the registration of a room and its KV cache; SGLang's server lives on without the rank."""
    prefiller, decoder = total_tokens.servers["prefill"], total_tokens.servers["decode"]
    room = 4711
    body = total_tokens.body(PROMPTS[1], room)
    with ThreadPoolExecutor(1) as pool, Resolver(total_tokens.bus) as resolver:
        pool.submit(prefiller.ask, body | {"routed_dp_rank": 1}, 5.0)
        resolver.want(room)
        assert resolver.wait(60)
        assert resolver.poll()[room].dp_rank == 1
        os.kill(prefiller.ranks()[1], signal.SIGKILL)
        answer = decoder.ask(body)
    assert "prefill rank 1" in answer["error"]
    assert "has died" in answer["error"]
    until(lambda: "pdbus.rank.silent dp_rank=1" in prefiller.said(), "the DP controller has missed the rank", 30)
    ranks = ranks_of(stock, PROMPTS[:6], total_tokens.pair.ask_all(PROMPTS[:6]))
    assert {first for first, _ in ranks} == {0}


def test_a_room_that_nobody_registers_ends_with_a_reason(total_tokens: Plugged) -> None:
    answer = total_tokens.servers["decode"].ask(total_tokens.body(PROMPTS[1], 815))
    assert f"no prefill rank has registered it within {ROOM_S} s" in answer["error"]


# --- cache_aware, with a broker that somebody else runs ---------------------------------------------------------------


class Broker:
    def __init__(self, folder: Path) -> None:
        self.address = f"tcp://127.0.0.1:{free_port_with(1, 2)}"
        self._log = folder / "broker.log"
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            command = [sys.executable, "-m", "bus", "--bus", self.address]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def cache_aware(
    total_tokens: Plugged, stock: Stock, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Plugged, Broker]]:
    for server in total_tokens.servers.values():  # its tests are over
        server.stop()
    folder = tmp_path_factory.mktemp("cache_aware")
    port = free_port_with()
    broker = Broker(folder)

    def events() -> tuple[str, str]:
        endpoint = f"tcp://127.0.0.1:{free_port_with(1)}"
        return "--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True})

    common = (*DP_2, "--page-size", str(PAGE))
    keeps = (*DECODE, "--disaggregation-decode-enable-radix-cache")
    servers = {"prefill": (*prefill(port), *common, *events()), "decode": (*keeps, *common, *events())}
    env = {
        "PYTHONPATH": plugins(folder / "path", pdbus=True), "PDBUS_TEST_QUERIES": str(folder / "queries"),
        "PDBUS_SGLANG_METHOD": "cache_aware", "PDBUS_SGLANG_BUS": broker.address,
    }  # fmt: skip
    try:
        with fleet(folder, model, servers, **env) as started:
            yield Plugged(folder, started, port), broker
    finally:
        broker.kill()


def test_prompts_go_where_their_prefix_is_cached(cache_aware: tuple[Plugged, Broker], stock: Stock) -> None:
    """By SGLang's KV events: what they say was flushed draws nobody any more."""
    plugged, _ = cache_aware
    assert {first for first, _ in ranks_of(stock, PROMPTS[:4], plugged.pair.ask_all(PROMPTS[:4]))} == {0, 1}
    answers = plugged.pair.ask_all(ALIKE, at_once=1)
    (sticky,) = {first for first, _ in ranks_of(stock, ALIKE, answers)}
    assert all(prefilled["meta_info"]["cached_tokens"] >= len(PREFIX) for prefilled, _ in answers[1:])

    def moves_on() -> bool:
        flush(plugged.servers["prefill"])
        return ranks_of(stock, ALIKE[:1], plugged.pair.ask_all(ALIKE[:1]))[0][0] != sticky

    until(moves_on, "a flushed cache draws nobody", 60)


def flush(server: Server) -> None:
    """Have all its ranks forget what they cache."""
    url = f"http://127.0.0.1:{server.port}/flush_cache"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
        assert answer.status == 200


def test_a_conversation_goes_on_at_the_decode_rank_that_has_it(
    cache_aware: tuple[Plugged, Broker], stock: Stock
) -> None:
    """Each turn asks the other conversation of a pair first, so whoever takes turns gets none of them right. Prefill
    has forgotten all: what is cached then is what the decode rank kept, answers included."""
    plugged, _ = cache_aware
    prompts, homes = OPENINGS, []
    for turn in range(TURNS):
        flush(plugged.servers["prefill"])
        asked = [prompts[at ^ turn % 2] for at in range(len(prompts))]
        answers = plugged.pair.ask_all(asked, at_once=1)
        ranks = [second for _, second in ranks_of(stock, asked, answers)]
        ranks = [ranks[at ^ turn % 2] for at in range(len(prompts))]
        assert sorted(ranks) == [0, 0, 1, 1]
        homes.append(ranks)
        for ids, (prefilled, decoded) in zip(asked, answers, strict=True):
            had = 0 if turn == 0 else (len(ids) - 40 - 1) // PAGE * PAGE
            assert prefilled["meta_info"]["cached_tokens"] == 0
            assert decoded["meta_info"]["cached_tokens"] == had
        prompts = [next_turn(ids, stock.answers[tuple(ids)]) for ids in prompts]
    assert homes == [homes[0]] * TURNS


def test_the_broker_dies_and_comes_back(cache_aware: tuple[Plugged, Broker], stock: Stock) -> None:
    """Without it rooms go over HTTP, from a thread and with the right rank; then by the bus again."""
    plugged, broker = cache_aware
    broker.kill()
    before = plugged.asked_by_http
    ranks = ranks_of(stock, PROMPTS, plugged.pair.ask_all(PROMPTS))
    assert {first for first, _ in ranks} == {0, 1}
    assert plugged.asked_by_http > before
    broker.start()
    with Resolver(broker.address) as resolver:
        assert resolver.wait_ready(60)

        def by_the_bus() -> bool:
            """A room that a rank registers is found there."""
            before = plugged.asked_by_http
            ranks_of(stock, PROMPTS[:4], plugged.pair.ask_all(PROMPTS[:4]))
            return plugged.asked_by_http == before

        until(by_the_bus, "rooms are found by the bus again", 60)
