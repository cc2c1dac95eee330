"""Engines that are not ours, as processes: toy schedulers on the rank link (examples/embed_rank.py and
embed_connector.py), a runner that behaves as vLLM's (tests/support/vllm_like.py), and our runner of vLLM over a client
that does (tests/support/fake_vllm.py). Controllers and engines are killed meanwhile."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import BLOCK
from vllm_like import DEADLY, VOCAB

from bus.errors import PeerLost, RequestFailed
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class Processes:
    """A bus and a controller at fixed addresses, and engines beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = "vllm_like"  # of engines
        self.bus, self.controller = f"ipc://{folder}/bus", f"ipc://{folder}/ctl"
        self.children: dict[str, Child] = {}

    def begin(self) -> None:
        self.start("bus", "bus", "--bus", self.bus)
        self.start_controller()

    def start_controller(self, *more: str) -> None:
        """`more`: options, which go before those of the same name."""
        methods = ("--prefill-method", "total_tokens", "--decode-method", "total_requests", *more)
        self.start("controller", "controller", "--bus", self.bus, "--controller", self.controller, *methods)

    def start(self, name: str, module: str, *args: str) -> Child:
        if name in self.children:
            self.children.pop(name).close()
        env = {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT / 'examples'}"}
        child = Child(PartSpec(name, "node", module, args), self.folder / f"{name}.log", env)
        self.children[name] = child
        until(lambda: (child.read() and child.ready) or child.returncode is not None, f"{name} is ready")
        assert child.returncode is None, child.tail()
        return child

    def engine(self, role: str, name: str, *more: str) -> Child:
        """`more`: of the module's arguments."""
        return self.start(name, self.module, role, self.bus, self.controller, str(self.folder), name, *more)

    def close(self) -> None:
        for child in reversed(self.children.values()):
            child.send(signal.SIGTERM)
        for child in reversed(self.children.values()):
            child.wait(WAIT_S)
            child.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        made = Processes(Path(folder))
        try:
            made.begin()
            yield made
        finally:
            made.close()


def until(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.01)
    return found


def ready(client: Client, count: int) -> None:
    def serving() -> bool:
        try:
            return sum(rank.state == "ready" for rank in client.status().ranks) >= count
        except PeerLost:
            return False

    until(serving, f"{count} ranks are ready")


# --- a scheduler of one's own ------------------------------------------------------------------------------------


def test_a_toy_scheduler_serves_survives_a_controllers_restart_and_drains(processes: Processes) -> None:
    toy = processes.start("toy", "embed_rank", processes.bus, processes.controller)
    text = "a longer text, said again " * 60
    with Client(processes.controller, tokenizer="bytes") as client:
        ready(client, 1)
        assert client.generate("hello", chat=False, max_tokens=99).text() == "HELLO"
        answers = [client.generate(f"request {n}", chat=False, max_tokens=9 + n) for n in range(12)]
        assert [answer.text() for answer in answers] == [f"REQUEST {n}"[: 9 + n] for n in range(12)]

        longer = client.generate(text, chat=False, max_tokens=4000)
        pieces = iter(longer)
        said = next(pieces).text
        processes.children["controller"].send(signal.SIGKILL)
        processes.children["controller"].wait(WAIT_S)
        processes.start_controller()
        assert said + "".join(piece.text for piece in pieces) == text.upper()
        ready(client, 1)
        assert client.generate("again", chat=False, max_tokens=99).text() == "AGAIN"

        cancelled = client.generate(text, chat=False, max_tokens=4000)
        next(iter(cancelled))
        cancelled.cancel()
        until(lambda: client.status().ranks[0].outstanding == 0, "the cancelled one is over")
        until(lambda: sum_load(client) == 0, "and the scheduler has let go of it")

        last = client.generate(text, chat=False, max_tokens=4000)
        pieces = iter(last)
        said = next(pieces).text
        toy.send(signal.SIGTERM)
        until(lambda: client.status().ranks[0].state != "ready", "it drains")
        with Client(processes.controller, retries=0) as another, pytest.raises(RequestFailed):
            another.generate_tokens([5, 6], max_tokens=3, leg="unified").tokens()
        assert said + "".join(piece.text for piece in pieces) == text.upper(), "what runs is finished"
    assert toy.wait(WAIT_S)
    assert toy.returncode == 0, toy.tail()


def sum_load(client: Client) -> int:
    loads = [rank.load for rank in client.status().ranks]
    return sum(load.running + load.waiting for load in loads if load is not None)


def test_an_engine_with_a_connector_of_its_own_shares_its_caches_by_handle(processes: Processes) -> None:
    def start(role: str) -> None:
        processes.start(role, "embed_connector", role, processes.bus, processes.controller, role)

    start("prefill")
    start("decode")
    text = "a longer text, said again " * 60
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 2)
        answers = [client.generate(f"request {n}", chat=False, max_tokens=9 + n) for n in range(12)]
        assert [answer.text() for answer in answers] == [f"REQUEST {n}"[: 9 + n] for n in range(12)]
        for victim in ("prefill", "decode"):  # each while requests run
            longer = client.generate(text, chat=False, max_tokens=4000)
            pieces = iter(longer)
            said = next(pieces).text
            processes.children[victim].send(signal.SIGKILL)
            processes.children[victim].wait(WAIT_S)
            start(victim)
            assert said + "".join(piece.text for piece in pieces) == text.upper(), victim
            ready(client, 2)
        until(lambda: sum_load(client) == 0, "every cache is let go of")
    for child in processes.children.values():
        if child.spec.name in ("prefill", "decode"):
            child.send(signal.SIGTERM)
            assert child.wait(WAIT_S), child.tail()
            assert child.returncode == 0, child.tail()


# --- an engine like vLLM's ----------------------------------------------------------------------------------------


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 31 + i * 7) % 500 for i in range(number % 40 + 1)]


def run(client: Client, numbers: range, max_tokens: int = 12) -> None:
    streams = [client.generate_tokens(prompt_of(number), max_tokens=max_tokens) for number in numbers]
    for number, stream in zip(numbers, streams, strict=True):
        assert stream.tokens() == sim_generate(prompt_of(number), max_tokens, VOCAB), number


@pytest.mark.parametrize("module", ["vllm_like", "fake_vllm"])
def test_a_cluster_of_engines_with_their_own_connector(processes: Processes, module: str) -> None:
    processes.module = module
    for name in ("p0", "p1"):
        processes.engine("prefill", name)
    for name in ("d0", "d1"):
        processes.engine("decode", name)
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 4)
        run(client, range(40))
        used = {rank.instance: rank.ended_total for rank in client.status().ranks}
        assert min(used.values()) > 4, used

        for victim in ("d0", "p1"):  # killed under load: each request ends as if nothing had been
            # as many as fit into the KV memory at once, and long enough that some still run when the last has begun
            count, length = (4, 700) if victim == "d0" else (16, 150)
            until(lambda: sum_load(client) == 0, "nothing counts, so that each rank gets some")
            streams = [client.generate_tokens(prompt_of(number), max_tokens=length) for number in range(count)]
            pieces = [iter(stream) for stream in streams]
            if victim == "d0":  # it decodes by then; p1 is killed while it computes prompts
                for each in pieces:
                    next(each)
            processes.children[victim].send(signal.SIGKILL)
            for number, (stream, rest) in enumerate(zip(streams, pieces, strict=True)):
                assert sum(len(piece.ids) for piece in rest) <= length
                assert list(stream.result.ids) == sim_generate(prompt_of(number), length, VOCAB), number
            told = [(str(stream.result.decode), stream.result.attempts, stream.result.total_s) for stream in streams]
            assert victim != "d0" or max(stream.result.attempts for stream in streams) > 1, f"it held none: {told}"
            processes.engine("prefill" if victim[0] == "p" else "decode", victim)
            ready(client, 4)
        run(client, range(40, 60))


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_decode_engine_that_keeps_its_kv_caches_computes_and_fetches_what_it_lacks(
    processes: Processes, where: str
) -> None:
    """Turns of a conversation, forced to be computed at either; then the engine is killed, and knows nothing."""
    processes.module = "fake_vllm"
    processes.children["controller"].send(signal.SIGTERM)
    processes.children["controller"].wait(WAIT_S)
    processes.start_controller("--decode-method", "least_cost", "--prefill-at", where)
    processes.engine("prefill", "p")
    processes.engine("decode", "d", "30", "0", "keeps")
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 2)
        prompt = list(range(3, 3 + 40))
        for turn in range(5):
            result = client.generate_tokens(prompt, max_tokens=12).result
            assert list(result.ids) == sim_generate(prompt, 12, VOCAB)
            assert (result.prefill is None) == (where == "decode")
            if where == "decode":
                kept = turn in (1, 2, 4)
                assert result.cached_tokens == (len(prompt) - 2 if kept else 0) // BLOCK * BLOCK
            prompt = [*prompt, *result.ids, 5, 6]
            if turn == 2:
                until(lambda: not client.status().counts["requests"], "the controller knows that it is done")
                processes.children["d"].send(signal.SIGKILL)
                processes.children["d"].wait(WAIT_S)
                processes.engine("decode", "d", "30", "0", "keeps")
                ready(client, 2)
        until(lambda: not client.status().counts["requests"], "the controller knows that all has ended")
        counts = {name.removeprefix("trip_"): count for name, count in client.status().counts.items() if "trip" in name}
        assert counts == ({"at_decode": 5} if where == "decode" else {"whole": 2, "delta": 3})


@pytest.mark.parametrize("killed", ["", "p", "d"])
def test_a_prefill_engine_reads_back_what_decode_has_left(processes: Processes, killed: str) -> None:
    """Turns are computed at decode, then the next one's pair is named: prefill computes what is new. Either end may be
    killed in mid-read."""
    processes.module = "fake_vllm"
    processes.children["controller"].send(signal.SIGTERM)
    processes.children["controller"].wait(WAIT_S)
    processes.start_controller("--decode-method", "least_cost", "--prefill-at", "decode")
    go = processes.folder / "go"
    go.touch()
    processes.engine("prefill", "p", "30", str(WAIT_S), "reads")
    processes.engine("decode", "d", "30", "0", "reads")
    ranks: dict[str, Any] = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 2)
        prompt = list(range(3, 3 + 40))
        for turn in range(3):
            result = client.generate_tokens(prompt, max_tokens=24, **(ranks if turn == 0 else {})).result
            assert (result.prefill is None) == (turn > 0)
            known, prompt = len(prompt) + 24 - 1, [*prompt, *result.ids, 5, 6]
        until(lambda: not client.status().counts["requests"], "the controller knows that it is done")
        go.unlink()
        stream = client.generate_tokens(prompt, max_tokens=12, **ranks)
        until((processes.folder / "reading").exists, "it reads")
        if killed:
            processes.children[killed].send(signal.SIGKILL)
            processes.children[killed].wait(WAIT_S)
        go.touch()
        if killed:
            processes.engine("prefill" if killed == "p" else "decode", killed, "30", "0", "reads")
        assert list(stream.result.ids) == sim_generate(prompt, 12, VOCAB)
        assert (stream.result.attempts > 1) == bool(killed)
        if not killed:
            assert stream.result.cached_tokens == known // BLOCK * BLOCK
            until(lambda: client.status().counts.get("trip_read_back") == 1, "it is counted as what it was")


def test_log_probabilities_have_no_gap_where_an_output_goes_on_elsewhere(processes: Processes) -> None:
    processes.module = "fake_vllm"
    for role, name in (("prefill", "p"), ("decode", "d0"), ("decode", "d1")):
        processes.engine(role, name)
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 3)
        streams = [client.generate_tokens(prompt_of(number), max_tokens=150, logprobs=1) for number in range(6)]
        pieces = [iter(stream) for stream in streams]
        said = [list(next(each).logprobs) for each in pieces]
        processes.children["d0"].send(signal.SIGKILL)
        for number, (stream, rest) in enumerate(zip(streams, pieces, strict=True)):
            said[number] += [each for piece in rest for each in piece.logprobs]
            ids = sim_generate(prompt_of(number), 150, VOCAB)
            assert list(stream.result.ids) == ids
            assert [each.logprob for each in said[number]] == [-1.0 - token / VOCAB for token in ids]
            assert [each.top for each in said[number]] == [(((token + 1) % VOCAB, -0.25),) for token in ids]
            assert list(stream.result.logprobs) == said[number]
        assert max(stream.result.attempts for stream in streams) > 1


@pytest.mark.parametrize(("stage", "slow"), [("computing", "prefill"), ("fetching", "decode")])
def test_a_prefill_engine_that_is_killed_meanwhile_costs_no_request(
    processes: Processes, stage: str, slow: str
) -> None:
    processes.module = "fake_vllm"
    for role in ("prefill", "decode"):
        processes.engine(role, role, "30", str(WAIT_S) if role == slow else "0")
    doing = processes.folder / stage
    with Client(processes.controller, retries=20, tokenizer="bytes") as client:
        ready(client, 2)
        streams = [client.generate_tokens(prompt_of(number), max_tokens=12) for number in range(3)]
        until(lambda: doing.exists() and doing.stat().st_size == len(streams), f"all three are {stage}")
        processes.children["prefill"].send(signal.SIGKILL)
        processes.children["prefill"].wait(WAIT_S)
        (processes.folder / "go").touch()
        processes.engine("prefill", "prefill")
        for number, stream in enumerate(streams):
            assert stream.tokens() == sim_generate(prompt_of(number), 12, VOCAB)
            assert stream.result.attempts > 1


@pytest.mark.parametrize("module", ["vllm_like", "fake_vllm"])
@pytest.mark.parametrize("role", ["prefill", "unified"])
def test_an_engine_that_dies_for_good_leaves_and_comes_back(processes: Processes, role: str, module: str) -> None:
    processes.module = module
    first = processes.engine(role, "mortal")
    if role == "prefill":
        processes.engine("decode", "d0")
    count = 2 if role == "prefill" else 1
    with Client(processes.controller, retries=0, tokenizer="bytes") as client:
        ready(client, count)
        run(client, range(8))
        with pytest.raises(RequestFailed) as failure:
            client.generate_tokens([5, DEADLY], max_tokens=4).tokens()
        assert failure.value.code in ("peer_lost", "prefill_failed", "no_rank")
        assert first.wait(WAIT_S), "the process leaves"
        assert first.returncode == 1, "so that whoever supervises it starts it again"
        assert "error: mortal/0: its engine died: EngineDeadError" in first.tail()
        processes.engine(role, "mortal")
        ready(client, count)
        run(client, range(8, 16))
