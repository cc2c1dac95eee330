"""examples/foreign_client.py and foreign_scheduler.py in a live cluster, where nothing of pdbus can be imported."""

from __future__ import annotations

import ast
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from foreign_wire import EXAMPLES, OURS, WAIT_S, Peers, Process, decode, encode, hidden_environment, receive

from bus.runtime.ports import free_ports
from nodes.own.engines.sim import sim_generate

CLIENT, SCHEDULER = EXAMPLES / "foreign_client.py", EXAMPLES / "foreign_scheduler.py"
PROMPT = [5, 6, 7, *range(100, 140)]


class Cluster:
    """A live broker and controller, and nodes of either kind; all end with it."""

    def __init__(self, directory: Path, base: str, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.bus, self.controller = (f"{base}/b", f"{base}/c") if base.startswith("ipc") else _ports(base)
        self.environment = hidden_environment(directory / "hide")
        self.start("-m", "controller", "--with-broker", "--bus", self.bus, "--controller", self.controller)

    @property
    def clients(self) -> str:
        return f"{self.controller}.clients" if self.controller.startswith("ipc") else self.controller

    def start(self, *arguments: str, foreign: bool = False) -> Process:
        process = Process(*arguments, env=self.environment, cwd=self.directory) if foreign else Process(*arguments)
        self.stack.enter_context(process)
        process.wait_ready()
        return process

    def ours(self, role: str) -> None:
        timing = ("--sim-base-s", "0.001", "--report-interval-s", "0.1")
        where = ("--bus", self.bus, "--controller", self.controller, "--data", f"ipc://{self.directory}")
        self.start(
            "-m", f"nodes.{role}", "--engine", "sim", "--model", "sim", "--instance", f"{role}-0", *where, *timing
        )

    def foreign(self, role: str) -> Process:
        where = ("--bus", self.bus, "--controller", self.controller, "--data", f"ipc://{self.directory}/foreign")
        return self.start(str(SCHEDULER), "--role", role, "--instance", "foreign-0", *where, foreign=True)

    def client(self, *options: str) -> Process:
        prompt = ",".join(map(str, PROMPT))
        command = (str(CLIENT), self.clients, "--prompt", prompt, "--timeout-s", str(WAIT_S), *options)
        return self.stack.enter_context(Process(*command, env=self.environment, cwd=self.directory))


def _ports(base: str) -> tuple[str, str]:
    """Two bases with free ports after them."""
    port = free_ports(base.removeprefix("tcp://"), 5)
    return f"{base}:{port}", f"{base}:{port + 3}"


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["ipc", "tcp"])
def cluster(request: pytest.FixtureRequest, directory: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(directory, f"ipc://{directory}" if request.param == "ipc" else "tcp://127.0.0.1", stack)


@pytest.mark.parametrize("program", [CLIENT, SCHEDULER])
def test_examples_import_pyzmq_and_msgpack_alone(program: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported - sys.stdlib_module_names == {"zmq", "msgpack"}


@pytest.mark.parametrize("name", OURS)
def test_nothing_of_ours_can_be_imported_there(directory: Path, name: str) -> None:
    """What makes the tests below mean something."""
    with Process("-c", f"import {name}", env=hidden_environment(directory / "hide"), cwd=directory) as process:
        assert process.wait() == 1
    assert "not for foreign programs" in process.errors


def tokens(client: Process) -> list[int]:
    assert client.wait() == 0, client.errors
    return [int(token) for token in client.out.split()]


def test_foreign_client_and_our_nodes(cluster: Cluster) -> None:
    cluster.ours("prefill")
    cluster.ours("decode")
    client = cluster.client("--max-tokens", "20")
    assert tokens(client) == sim_generate(PROMPT, 20)
    assert "prefill-0/0 and decode-0/0" in client.errors


def test_foreign_client_and_foreign_scheduler(cluster: Cluster) -> None:
    scheduler = cluster.foreign("unified")
    clients = [cluster.client("--max-tokens", str(n), "--leg", "unified") for n in (1, 8, 30)]
    for client, n in zip(clients, (1, 8, 30), strict=True):
        assert tokens(client) == sim_generate(PROMPT, n)
        assert "runs on foreign-0/0" in client.errors
    scheduler.process.terminate()
    assert scheduler.wait() == 0, scheduler.errors
    assert scheduler.errors == ""


def test_our_decode_rank_continues_from_a_foreign_prefill_rank(cluster: Cluster) -> None:
    """The KV cache crosses between two programs that share nothing but the document."""
    cluster.foreign("prefill")
    cluster.ours("decode")
    clients = [cluster.client("--max-tokens", str(n)) for n in (1, 2, 25)]
    for client, n in zip(clients, (1, 2, 25), strict=True):
        assert tokens(client) == sim_generate(PROMPT, n)
        assert "foreign-0/0 and decode-0/0" in client.errors


def test_a_failure_is_one_clear_line(cluster: Cluster) -> None:
    cluster.foreign("unified")
    client = cluster.client("--max-tokens", "0", "--leg", "unified")
    assert client.wait() == 1
    assert client.errors.startswith("failed: bad_request: ")
    assert client.errors.count("\n") == 1


def test_nobody_there_is_one_clear_line(directory: Path) -> None:
    endpoint = f"ipc://{directory}/nobody"
    options = ("--prompt", "1,2", "--timeout-s", "0.5")
    with Process(str(CLIENT), endpoint, *options, env=hidden_environment(directory / "hide")) as client:
        assert client.wait() == 3
    assert client.errors == f"error: the controller has said nothing for 0.5 s at {endpoint}\n"


@pytest.mark.parametrize("prompt", ["", "a,b", "1,,2", "5000000000"])
def test_a_bad_prompt_is_refused(directory: Path, prompt: str) -> None:
    with Process(str(CLIENT), "ipc:///x", "--prompt", prompt, env=hidden_environment(directory / "hide")) as client:
        assert client.wait() == 2
    assert "want numbers" in client.errors


def test_a_client_takes_each_token_once_and_of_its_attempt_alone(directory: Path) -> None:
    """M62 M74: repeats, overlaps, a gap and a rank of an older attempt, made by a raw controller and raw ranks."""
    peers = Peers()
    controller = peers.make(zmq.ROUTER, bind=f"ipc://{directory}/c")
    ranks = [peers.make(zmq.ROUTER, bind=f"ipc://{directory}/d{at}") for at in range(2)]
    heard: list[list[object]] = []

    def serve() -> None:
        peer, header, prompt, params = receive(controller)
        submit = decode(header)
        rid, room = submit[1], submit[5]
        assert (submit[2], submit[3], submit[4]) == ("pair", 2, 6)
        assert struct.unpack("<2i", prompt) == (1, 2)
        assert decode(params) == ["params"]

        def accept(attempt: int) -> bytes:
            where = [["p", 0, 1, "ipc:///p"], ["d", attempt - 1, 2, f"ipc://{directory}/d{attempt - 1}"]]
            controller.send_multipart([peer, encode("accepted", rid, attempt, room, *where)])
            reader, attach = receive(ranks[attempt - 1])
            heard.append(decode(attach))
            return reader

        controller.send_multipart([peer, encode("accepted", rid, 1, room, None, None)])  # it waits for a rank
        first = accept(1)
        controller.send_multipart([peer, encode("done", rid, 1, [])])  # which is not the end of its output
        for start, ids in [(0, [10, 11]), (0, [10, 11]), (1, [11, 12]), (9, [99])]:
            ranks[0].send_multipart([first, encode("tokens", rid, 1, start, ids)])
        heard.append(decode(receive(ranks[0])[1]))
        second = accept(2)
        ranks[0].send_multipart([first, encode("tokens", rid, 1, 3, [66])])
        ranks[1].send_multipart([second, encode("tokens", rid, 1, 3, [77])])
        ranks[1].send_multipart([second, encode("tokens", rid, 2, 3, [13, 14, 15], "length", "ok", "", "told")])
        heard.append(decode(receive(ranks[1])[1]))

    server = threading.Thread(target=serve)
    server.start()
    options = ("--prompt", "1,2", "--max-tokens", "6")
    environment = hidden_environment(directory / "hide")
    try:
        with Process(str(CLIENT), f"ipc://{directory}/c", *options, env=environment) as client:
            assert client.wait() == 0, client.errors
        server.join()
        assert client.out.split() == ["10", "11", "12", "13", "14", "15"]
        rid = heard[0][1]
        assert heard == [
            ["attach", rid, 1, 0],
            ["attach", rid, 1, 3],  # after the gap
            ["attach", rid, 2, 3],
            ["detach", rid, 2],
        ]
    finally:
        server.join()
        peers.close()
