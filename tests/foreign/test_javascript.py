"""A client and a unified rank in JavaScript, written from docs/protocol.md alone with nothing but node, beside ours."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bus.runtime.ports import free_ports
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

HERE = Path(__file__).parent
WAIT_S = 60.0  # of a busy machine; a wait that succeeds ends with its event
PROMPT = [5, 6, 7, *range(100, 140)]
LEASE_S = 1.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
BROKEN = (  # message frames
    b"", b"\x01", b"\x02\x91\xa3who", b"\x01\xc1", b"\x01\x91\xa3w", b"\x01\x91\xa3who\0", b"\x01\x91\xd4\x01\x01",
    b"\x01\xdd\xff\xff\xff\xff\xa3who", b"\x01\x91\xa4nope", b"\x01\x92\xa5hello\x01", b"\x01\x92\xa6submit\xc0",
    b"\x01\x93\xa6attach\xa1r\xa11", b"\x01\x93\xa6attach\xa1r\x00", b"\x01" + b"\x91" * 200,
)  # fmt: skip


@pytest.fixture(scope="session")
def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.fail("these tests need node 18 or later: sudo apt-get install --no-install-recommends nodejs")
    return path


class Part:
    """A process whose lines are waited for; `everything` is what it said so far."""

    def __init__(self, *line: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PDBUS_")}
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.everything: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def until(self, start: str) -> str:
        """The next line that begins so."""
        while True:
            try:
                line = self._lines.get(timeout=WAIT_S)
            except queue.Empty:
                line = None
            assert line is not None, f"no line {start}: {self.everything[-40:]}"
            if line.startswith(start):
                return line

    def ends(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.everything.append(line.rstrip())
            self._lines.put(line.rstrip())
        self._lines.put(None)


class World:
    """A controller with a broker; what is started beside it ends with it."""

    def __init__(self, transport: str, node: str, place: Path, stack: ExitStack) -> None:
        self.node, self.stack, self.parts = node, stack, list[Part]()
        if transport == "tcp":
            port = free_ports("127.0.0.1", 5)
            self.bus, self.controller = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 3}"
            self.data, self.js_data = "tcp://127.0.0.1", "tcp://127.0.0.1:0"
        else:
            self.bus, self.controller = f"ipc://{place}/b", f"ipc://{place}/c"
            self.data, self.js_data = f"ipc://{place}", f"ipc://{place}/js"
        self.where = ("--bus", self.bus, "--controller", self.controller)
        self.head = self.start(
            sys.executable, "-P", "-m", "controller", "--with-broker", *self.where, "--lease-s", str(LEASE_S)
        )
        self.head.until("READY")

    def start(self, *line: str) -> Part:
        part = Part(*line)
        self.stack.callback(part.close)
        self.parts.append(part)
        return part

    def ours(self) -> None:
        made = [
            self.start(
                sys.executable, "-P", "-m", f"nodes.{role}", *self.where, "--data", self.data, "--engine", "sim",
                "--model", "sim", "--sim-base-s", "0.01",
            )
            for role in ("prefill", "decode")
        ]  # fmt: skip
        for part in made:
            part.until("READY")

    def rank(self, *options: str) -> Part:
        rank = self.start(self.node, str(HERE / "rank.js"), *self.where, "--data", self.js_data, *options)
        self.endpoint = rank.until("READY").removeprefix("READY ")
        return rank

    def client(self, *options: str) -> dict[str, object]:
        """What the client in JavaScript says of its request."""
        prompt = ",".join(map(str, PROMPT))
        client = self.start(self.node, str(HERE / "client.js"), self.controller, "--prompt", prompt, *options)
        outcome: dict[str, object] = json.loads(client.until("{"))
        assert client.ends() == 0, client.everything
        self.parts.remove(client)
        return outcome

    def everybody_lives(self) -> None:
        for part in self.parts:
            assert part.process.poll() is None, part.everything[-40:]


@pytest.fixture(params=["ipc", "tcp"])
def world(request: pytest.FixtureRequest, node: str) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="pd") as place, ExitStack() as stack:
        yield World(request.param, node, Path(place), stack)


def counted(count: int) -> list[int]:
    """What rank.js answers to PROMPT."""
    return [(sum(PROMPT) + i) % 1000 for i in range(count)]


def throw(endpoint: str, *writes: bytes) -> None:
    """Each over a connection of its own, as far as the other side takes it."""
    for data in writes:
        kind, where = (
            (socket.AF_UNIX, endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc") else
            (socket.AF_INET, ("127.0.0.1", int(endpoint.rpartition(":")[2])))
        )  # fmt: skip
        with socket.socket(kind) as end:
            end.settimeout(WAIT_S)
            end.connect(where)
            try:
                end.sendall(data)
                end.shutdown(socket.SHUT_WR)
                while end.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass


def garbage() -> list[bytes]:
    """What is no ZMTP at all, ZMTP that breaks off or lies, and whole messages that are broken."""
    noise = random.Random(3).randbytes(5000)
    messages = b"".join(bytes([0, len(frame)]) + frame for frame in BROKEN)
    return [
        b"", noise, GREETING[:20], GREETING + noise, GREETING + READY + noise, GREETING + READY + messages,
        GREETING + READY + b"\x01\x00" * 70, GREETING + READY + b"\x02" + b"\x7f" * 8, GREETING + b"\x00\x01x",
    ]  # fmt: skip


def test_a_client_streams_cancels_and_has_a_deadline_at_our_ranks(world: World) -> None:
    world.ours()
    whole = world.client("--max-tokens", "20")
    assert (whole["code"], whole["finish"], whole["ids"]) == ("ok", "length", sim_generate(PROMPT, 20))
    cancelled = world.client("--max-tokens", "4000", "--cancel-after", "3")
    some = cancelled["ids"]
    assert isinstance(some, list)
    assert cancelled["code"] == "cancelled"
    assert len(some) >= 3
    assert some == sim_generate(PROMPT, len(some))
    late = world.client("--max-tokens", "4000", "--deadline-s", "0.5")
    assert late["code"] == "deadline", late
    world.everybody_lives()


def test_a_rank_serves_our_client_and_drains(world: World) -> None:
    rank = world.rank()
    with Client(world.controller, connect_timeout_s=WAIT_S) as client:
        streams = [client.generate_tokens(PROMPT, max_tokens=50) for _ in range(8)]
        assert [stream.tokens() for stream in streams] == [counted(50)] * 8
        end = time.monotonic() + WAIT_S  # a client is done with its last token, the controller soon after
        while (status := client.status().ranks[0]).ended_total < 8:
            assert time.monotonic() < end, status
        assert (status.state, status.dispatched_total, status.failed_total) == ("ready", 8, 0)
        assert world.client("--leg", "unified", "--max-tokens", "5")["ids"] == counted(5)
        stream = client.generate_tokens(PROMPT, max_tokens=500)
        pieces = iter(stream)  # one that is dropped cancels the request
        first = next(pieces)
        drain = world.start(sys.executable, "-m", "pdbus", "drain", "js-0/0", "--controller", world.controller)
        rank.until("draining")
        assert [token for piece in (first, *pieces) for token in piece.ids] == counted(500), "what it has begun it ends"
    rank.until("bye")
    assert (rank.ends(), drain.ends()) == (0, 0), (rank.everything, drain.everything)


def test_a_rank_is_there_again_after_a_controller_was_silent_for_a_lease(world: World) -> None:
    rank = world.rank()
    with Client(world.controller, connect_timeout_s=WAIT_S) as client:
        assert client.generate_tokens(PROMPT, max_tokens=3).tokens() == counted(3)
        world.head.process.send_signal(signal.SIGSTOP)
        try:
            rank.until("hello silence")
        finally:
            world.head.process.send_signal(signal.SIGCONT)
        rank.until("welcome")
        assert client.generate_tokens(PROMPT, max_tokens=3).tokens() == counted(3)
    rank.process.terminate()
    rank.until("bye")
    assert rank.ends() == 0, rank.everything


def test_garbage_hurts_nobody(world: World) -> None:
    """At the ports of the controller, the broker and the rank in JavaScript."""
    world.rank()
    if world.endpoint.startswith("tcp"):
        bus, controller = (int(base.rpartition(":")[2]) for base in (world.bus, world.controller))
        ports = [f"tcp://127.0.0.1:{port}" for port in (bus, bus + 1, bus + 2, controller, controller + 1)]
    else:
        ports = [f"{world.bus}.{name}" for name in ("pub", "sub", "bootstrap")]
        ports += [f"{world.controller}.{name}" for name in ("clients", "nodes")]
    with Client(world.controller, connect_timeout_s=WAIT_S) as client:
        stream = client.generate_tokens(PROMPT, max_tokens=200)
        for port in (world.endpoint, *ports):
            throw(port, *garbage())
        assert stream.tokens() == counted(200)
        assert client.generate_tokens(PROMPT, max_tokens=5).tokens() == counted(5)
    assert world.client("--leg", "unified", "--max-tokens", "5")["ids"] == counted(5)
    world.everybody_lives()
