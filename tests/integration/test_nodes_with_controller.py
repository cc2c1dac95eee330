"""The whole path with every part live: submit, dispatch, KV transfer, tokens, done; and ranks that drain meanwhile."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from bus.broker import Broker
from bus.endpoints import ControllerAddress
from bus.wire.codec import decode, encode
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    FROM_NODE_DATA,
    Accepted,
    Attach,
    Detach,
    Done,
    Failed,
    Legs,
    Location,
    Params,
    Submit,
    Tokens,
)
from nodes.own.engines.sim import sim_generate

DEADLINE_S = 120.0  # several processes that import torch at once, on a busy machine
VOCAB = 512


class Stack:
    """Broker in a thread, one controller process, two prefill and two decode processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bus = f"ipc://{directory}/bus"
        self.base = f"ipc://{directory}/c"
        self.broker = Broker(self.bus).start()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.start("controller", "controller", "--controller", self.base)
        for role in ("prefill", "decode"):
            for rank in ("0", "1"):
                self.node(f"{role}{rank}", role, rank)
        for process in self.processes.values():
            assert process.stdout is not None
            assert process.stdout.readline().startswith("READY")
        self.context: zmq.Context[Any] = zmq.Context()
        self.client = self.connect(ControllerAddress(self.base).clients)
        self.nodes: dict[str, Any] = {}
        self.rooms: list[str] = []
        self.finished: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.ends: dict[str, Done | Failed] = {}

    def node(self, name: str, role: str, rank: str) -> None:
        self.start(
            name, f"nodes.{role}", "--controller", self.base, "--instance", role, "--dp-size", "2", "--dp-rank", rank,
            "--data", f"ipc://{self.directory}", "--engine", "sim", "--sim-base-s", "0.002", "--block-tokens", "4",
        )  # fmt: skip

    def start(self, name: str, module: str, *options: str) -> None:
        command = [sys.executable, "-P", "-m", module, "--bus", self.bus, "--watch-parent", *options]
        self.processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def connect(self, endpoint: str) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        return socket

    def submit(self, rid: str, prompt: list[int], max_tokens: int, leg: Legs = "pair") -> None:
        submit = Submit(rid, leg, len(prompt), max_tokens, bootstrap_room=len(self.rooms))
        self.rooms.append(rid)
        self.client.send_multipart([encode(submit), token_bytes(prompt), encode(Params())])

    def until_ended(self, count: int) -> None:
        end = time.monotonic() + DEADLINE_S
        finished = self.finished
        while len(self.ends) < count or len(finished | {r for r, e in self.ends.items() if type(e) is Failed}) < count:
            assert time.monotonic() < end, (len(self.ends), len(finished))
            ready, _, _ = zmq.select([self.client, *self.nodes.values()], [], [], 0.2)
            for socket in ready:
                if socket is self.client:
                    self.from_controller(decode(socket.recv(), CONTROLLER_TO_CLIENT))
                    continue
                message = decode(socket.recv(), FROM_NODE_DATA)
                assert isinstance(message, Tokens)
                have = self.tokens.setdefault(message.rid, [])
                if message.attempt == self.attempts[message.rid]:
                    have[message.start :] = message.ids
                    if message.finish in ("stop", "length"):
                        finished.add(message.rid)
                        socket.send(encode(Detach(message.rid, message.attempt)))

    def from_controller(self, message: Any) -> None:
        if isinstance(message, Accepted):
            assert isinstance(message.decode, Location)
            endpoint = message.decode.endpoint
            if endpoint not in self.nodes:
                self.nodes[endpoint] = self.connect(endpoint)
            self.attempts[message.rid] = message.attempt
            have = len(self.tokens.get(message.rid, []))
            self.nodes[endpoint].send(encode(Attach(message.rid, message.attempt, have)))
        else:
            assert isinstance(message, Done | Failed), message
            assert message.rid not in self.ends, "ended twice"
            self.ends[message.rid] = message

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate(timeout=DEADLINE_S)
        for socket in (self.client, *self.nodes.values()):
            socket.close()
        self.context.term()
        self.broker.stop()


@pytest.fixture
def stack() -> Iterator[Stack]:
    directory = Path(tempfile.mkdtemp(prefix="pd"))
    stack = Stack(directory)
    yield stack
    stack.close()
    shutil.rmtree(directory)


def test_many_requests_at_once_each_give_the_reference(stack: Stack) -> None:
    prompts = {f"r{n}": [3 + (n * 31 + i * 7) % 500 for i in range(1 + n * 5 % 83)] for n in range(60)}
    for number, (rid, prompt) in enumerate(prompts.items()):
        stack.submit(rid, prompt, 1 + number % 20)
    stack.until_ended(60)
    for number, (rid, prompt) in enumerate(prompts.items()):
        end = stack.ends[rid]
        assert isinstance(end, Done), end
        assert [leg.code for leg in end.legs] == ["ok", "ok"]
        assert stack.tokens[rid] == sim_generate(prompt, 1 + number % 20, VOCAB)


def test_ranks_that_drain_lose_nothing_and_leave_with_0(stack: Stack) -> None:
    prompts = {f"r{n}": [5 + n % 50] * (20 + n) for n in range(40)}
    for rid, prompt in prompts.items():
        stack.submit(rid, prompt, 60)
    stack.until_ended(1)
    for name in ("prefill1", "decode1"):
        stack.processes[name].send_signal(signal.SIGTERM)
    stack.until_ended(40)
    for rid, prompt in prompts.items():
        assert isinstance(stack.ends[rid], Done), stack.ends[rid]
        assert stack.tokens[rid] == sim_generate(prompt, 60, VOCAB)
    assert stack.processes["decode1"].wait(DEADLINE_S) == 0
    assert stack.processes["prefill1"].wait(DEADLINE_S) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_second_start_of_a_rank_takes_its_place_and_the_first_leaves_with_4(stack: Stack, role: str) -> None:
    prompts = {f"r{n}": [5 + n % 50] * (20 + n) for n in range(20)}
    for rid, prompt in prompts.items():
        stack.submit(rid, prompt, 60)
    stack.until_ended(1)
    first = stack.processes[f"{role}1"]
    stack.node("again", role, "1")
    again = stack.processes["again"]
    assert again.stdout is not None
    line = again.stdout.readline()
    epoch = line.split("epochs=")[1].split()[0]
    assert first.wait(DEADLINE_S) == 4
    assert first.stderr is not None
    said = first.stderr.read().strip().splitlines()[-1]
    assert said.endswith(f"error: {role}/1 was started again elsewhere (epoch {epoch}); this one leaves")
    stack.until_ended(20)
    for rid, prompt in prompts.items():
        end, tokens = stack.ends[rid], stack.tokens.get(rid, [])
        if isinstance(end, Failed) and role == "decode":  # it had not finished; a client goes on elsewhere
            assert (end.code, end.retryable) == ("peer_lost", True), end
            assert tokens == sim_generate(prompt, 60, VOCAB)[: len(tokens)]
        else:
            assert isinstance(end, Done), end
            assert tokens == sim_generate(prompt, 60, VOCAB)
    assert again.poll() is None
