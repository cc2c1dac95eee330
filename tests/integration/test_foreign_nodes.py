"""Our nodes and the foreign scheduler, told apart by nothing: one raw controller drives both, message by message."""

from __future__ import annotations

import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import pytest
import zmq
from foreign_wire import EXAMPLES, WAIT_S, Peers, Process, decode, encode, hidden_environment, receive

PROMPT = list(range(5, 25))
CONTROLLER_EPOCH = 77


def states(prompt: list[int]) -> list[int]:
    state, out = 0, []
    for token in prompt:
        state = crc32(struct.pack("<i", token), state)
        out.append(state)
    return out


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(3 + states(tokens)[-1] % 509)
    return tokens[len(prompt) :]


def launch(directory: Path, program: str, role: str, bus: str, controller_base: str) -> Process:
    options = ["--bus", bus, "--controller", controller_base, "--instance", "n-0", "--model", "sim"]
    options += ["--report-interval-s", "0.1"]
    if program == "foreign":
        script = [str(EXAMPLES / "foreign_scheduler.py"), "--role", role, "--data", f"ipc://{directory}/d"]
        return Process(*script, *options, env=hidden_environment(directory / "hide"), cwd=directory)
    sim = ["--engine", "sim", "--data", f"ipc://{directory}", "--sim-base-s", "0"]
    return Process("-m", f"nodes.{role}", *sim, *options)


class Stage:
    """The real broker, a controller made of one raw ROUTER, and one node under test."""

    def __init__(self, directory: Path, program: str, role: str, controller_base: str) -> None:
        self.directory, self.role = directory, role
        self.peers = Peers()
        self.bus = f"ipc://{directory}/b"
        self.controller = self.peers.make(zmq.ROUTER, bind=f"{controller_base}.nodes")
        self.seen = self.peers.make(zmq.SUB, connect=f"{self.bus}.sub")
        for kind in (b"load/", b"rooms/", b"member/"):  # KV events are on the bus too, and no messages of ours
            self.seen.setsockopt(zmq.SUBSCRIBE, kind)
        self.broker = Process("-m", "bus", "--bus", self.bus, "--beacon-s", "0.05")
        self.broker.wait_ready()
        self.seen.setsockopt(zmq.SUBSCRIBE, b"beacon")
        receive(self.seen, WAIT_S)  # from here on it hears everything
        self.seen.setsockopt(zmq.UNSUBSCRIBE, b"beacon")
        self.node = launch(directory, program, role, self.bus, controller_base)
        self.peer = b""
        self.number = 0
        self.inbox: list[list[Any]] = []

    def close(self) -> None:
        self.peers.close()
        with self.broker, self.node:
            pass

    def say(self, *fields: Any, payload: tuple[bytes, ...] = ()) -> None:
        self.controller.send_multipart([self.peer, encode(*fields), *payload])

    def hear(self, tag: str, test: Callable[[list[Any]], object] = lambda fields: True) -> list[Any]:
        """The next message with that tag (and `test`); others are kept in order."""
        for at, message in enumerate(self.inbox):
            if message[0] == tag and test(message[1:]):
                return self.inbox.pop(at)[1:]
        end = time.monotonic() + WAIT_S
        while True:
            peer, frame = receive(self.controller, end - time.monotonic())
            message = decode(frame)
            if not self.peer:
                assert message[0] == "hello", "hello comes first"
                self.peer = peer
            assert peer == self.peer
            if message[0] == tag and test(message[1:]):
                return message[1:]
            self.inbox.append(message)

    def published(self, tag: str, test: Callable[[list[Any]], object] = lambda fields: True) -> list[Any]:
        end = time.monotonic() + WAIT_S
        passed: list[Any] = []
        while True:
            left_s = max(0.0, end - time.monotonic())
            assert self.seen.poll(int(left_s * 1000)), f"no such {tag} among {passed[-20:]}, {len(passed)} in all"
            topic, frame = self.seen.recv_multipart()
            found, *fields = decode(frame)
            passed += [(found, *fields[3:])] if found == tag else []
            if found == tag and fields[0] == "n-0" and test(fields):
                assert topic == b"%s/n-0/0/" % tag.encode()
                return fields

    def reported(self, test: Callable[[list[Any]], object]) -> list[Any]:
        """The next load, with whichever publication it came, that passes the test."""
        end = time.monotonic() + WAIT_S
        while True:
            tag, *fields = decode(receive(self.seen, end - time.monotonic())[1])
            if tag in ("load", "rooms", "member") and fields[0] == "n-0" and fields[4] and test(fields[4]):
                return list(fields[4])

    def greet(self) -> list[Any]:
        hello = self.hear("hello")
        self.say("welcome", "raw", CONTROLLER_EPOCH, False, 3.0, 0)
        return hello

    def dispatch(self, rid: str, attempt: int = 1, *, max_tokens: int = 4, room: int | None = None) -> None:
        self.number += 1
        header = ["dispatch", rid, attempt, self.role, 0, CONTROLLER_EPOCH, self.number, 10, len(PROMPT), max_tokens, 0]
        prompt = struct.pack(f"<{len(PROMPT)}i", *PROMPT)
        self.say(*header, room, payload=(prompt, encode("params")))

    def ended(self, rid: str, attempt: int = 1) -> str:
        """The code with which a leg ended."""

        def ends(fields: list[Any]) -> list[Any]:
            return [end for end in fields[4] if end[:2] == [rid, attempt]]

        return str(ends(self.hear("progress", ends))[0][3])


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["ours", "foreign"])
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def unified(directory: Path, program: str) -> Iterator[Stage]:
    stage = Stage(directory, program, "unified", f"ipc://{directory}/c")
    yield stage
    stage.close()


@pytest.fixture
def prefill(directory: Path, program: str) -> Iterator[Stage]:
    stage = Stage(directory, program, "prefill", f"ipc://{directory}/c")
    yield stage
    stage.close()


def test_a_node_introduces_itself_and_answers(unified: Stage) -> None:
    """M42 M43: hello first, again on `who`; a pong for each ping. M15 M12: and it is on the bus."""
    hello = unified.greet()
    assert hello[0] == "n-0"
    assert hello[3:7] == ["unified", "sim", 1, "ready"]
    unified.node.wait_ready()
    for n in (5, 2**40):
        unified.say("ping", n)
        assert unified.hear("pong")[0] == n
    unified.say("who")
    assert unified.hear("hello")[:3] == hello[:3]
    member = unified.published("member")
    assert (member[2], member[5], member[9]) == (hello[2], "unified", hello[7])


def test_a_node_runs_a_request_and_acknowledges_it(unified: Stage) -> None:
    """M22 M28 M48 M57 M58."""
    hello = unified.greet()
    client = unified.peers.make(zmq.DEALER, connect=hello[7])
    client.send(encode("attach", "r", 1, 0))  # before the dispatch
    unified.dispatch("r", max_tokens=6)
    ids: list[int] = []
    while True:
        _, rid, attempt, start, chunk, finish, *_ = decode(receive(client)[0])
        assert (rid, attempt, start) == ("r", 1, len(ids))
        ids += chunk
        if finish:
            break
    assert (ids, finish) == (answer(PROMPT, 6), "length")
    client.send(encode("detach", "r", 1))
    assert ["r", 1] in unified.hear("progress", lambda fields: fields[3])[3]
    assert unified.ended("r") == "ok"
    idle = [[CONTROLLER_EPOCH, 1, 10]]
    load = unified.reported(lambda load: load[2:5] == [0, 0, 0] and load[8] == idle)
    assert load[1] >= 6, "steps were counted"


def test_a_node_survives_what_is_not_a_message(unified: Stage) -> None:
    """M10: on each of its sockets."""
    hello = unified.greet()
    data = unified.peers.make(zmq.DEALER, connect=hello[7])
    pub = unified.peers.make(zmq.PUB, connect=f"{unified.bus}.pub")
    garbage = [b"", b"\x01", b"\x02\x91\xa3who", b"\x01\xc1", b"\x01" + b"\x91" * 5000, encode("dispatch"), encode()]
    garbage += [encode("attach", 5), encode("kv_pull", -1, "x", None, 1, 2), b"\x01" + msgpack.packb({"who": 1})]
    for frame in garbage:
        unified.controller.send_multipart([unified.peer, frame])
        data.send(frame)
        pub.send_multipart([b"to/n-0/0/", frame])
        pub.send_multipart([b"beacon/", frame])
    unified.say("ping", 9)
    assert unified.hear("pong")[0] == 9
    assert unified.node.process.poll() is None


def test_a_node_fences_and_drains(unified: Stage) -> None:
    """M47 M49 M50."""
    hello = unified.greet()
    unified.node.wait_ready()
    unified.published("member", lambda fields: fields[8] == "ready")  # our subscription reaches the broker
    unified.dispatch("r", 2)
    assert unified.ended("r", 2) == "ok"
    unified.dispatch("r", 1)
    assert unified.ended("r", 1) == "fenced"
    client = unified.peers.make(zmq.DEALER, connect=hello[7])
    client.send(encode("attach", "long", 1))
    unified.dispatch("long", max_tokens=1000)
    unified.hear("progress", lambda fields: ["long", 1] in fields[3])
    unified.node.process.send_signal(signal.SIGTERM)
    unified.hear("hello", lambda fields: fields[6] == "draining")
    unified.dispatch("late")
    assert unified.ended("late") == "draining"
    assert unified.ended("long") == "ok"
    client.send(encode("detach", "long", 1))
    unified.hear("bye", lambda fields: fields == hello[:3])
    unified.published("member", lambda fields: fields[8] == "gone")
    assert unified.node.wait() == 0


def test_a_goodbye_that_was_lost_is_said_again(directory: Path, program: str) -> None:
    """M50: over a bus, made of raw sockets, that loses the first one; and ready means that the bus hears the node."""
    peers, bus, base = Peers(), f"ipc://{directory}/b", f"ipc://{directory}/c"
    publish, subscribe = peers.make(zmq.XSUB, bind=f"{bus}.pub"), peers.make(zmq.XPUB, bind=f"{bus}.sub")
    controller = peers.make(zmq.ROUTER, bind=f"{base}.nodes")
    poller = zmq.Poller()
    for socket in (publish, subscribe, controller):
        poller.register(socket, zmq.POLLIN)
    heard: list[str] = []
    stopped = False
    with launch(directory, program, "unified", bus, base) as node:
        end = time.monotonic() + WAIT_S
        while node.process.poll() is None:
            assert time.monotonic() < end, (heard, node.errors)
            subscribe.send_multipart([b"beacon/", encode("beacon", 5, 1, 0.1)])
            for socket, _ in poller.poll(50):
                frames = socket.recv_multipart()
                if socket is controller:
                    if decode(frames[1])[0] == "hello":
                        controller.send_multipart(
                            [frames[0], encode("welcome", "raw", CONTROLLER_EPOCH, False, 3.0, 0)]
                        )
                elif socket is subscribe:
                    publish.send(frames[0])
                elif frames[0] == b"member/n-0/0/":
                    heard.append(decode(frames[1])[9])
                    if heard.count("gone") != 1:
                        subscribe.send_multipart(frames)
            if node.out and not stopped:
                assert "ready" in heard
                node.process.send_signal(signal.SIGTERM)
                stopped = True
        assert node.wait() == 0
        assert heard.count("gone") >= 2, heard[-5:]  # more where the second was slow to come back
    peers.close()


def test_a_node_states_everything_again_when_asked(prefill: Stage) -> None:
    """M14 M16 M17."""
    hello = prefill.greet()
    prefill.node.wait_ready()
    prefill.dispatch("r", room=7)
    first = prefill.published("rooms", lambda fields: fields[6])
    assert first[6] == [[7, 1]]
    pub = prefill.peers.make(zmq.PUB, connect=f"{prefill.bus}.pub")
    end = time.monotonic() + WAIT_S
    tags: list[str] = []
    snapshot: list[Any] = []
    while not snapshot:  # a new publisher is heard after a moment
        assert time.monotonic() < end
        pub.send_multipart([b"to/n-0/0/", encode("resync", *hello[:3])])
        again = time.monotonic() + 0.3
        while not snapshot and time.monotonic() < again and prefill.seen.poll(100):
            tag, *fields = decode(prefill.seen.recv_multipart()[1])
            tags += [tag] if tag in ("member", "rooms") else []
            if tag == "rooms" and len(fields) > 8 and fields[8]:
                snapshot = fields
    assert tags[-2:] == ["member", "rooms"]
    assert (snapshot[2], snapshot[6]) == (hello[2], [[7, 1]])
    assert snapshot[3] > first[3]


def test_a_prefill_node_serves_its_kv_cache(prefill: Stage) -> None:
    """M30 M63 M64 M65 M66 M68: registered with the broker, pulled block by block, freed."""
    hello = prefill.greet()
    broker = prefill.peers.make(zmq.REQ, connect=f"{prefill.bus}.bootstrap")
    asker = prefill.peers.make(zmq.DEALER, connect=f"{prefill.bus}.bootstrap")
    asker.send_multipart([b"", encode("query", 1, [7], 20.0)])
    assert decode(receive(asker)[1])[:4] == ["answer", 1, [], [7]]
    prefill.dispatch("r", room=7)
    where = [hello[0], hello[1], hello[2], hello[7]]
    assert decode(receive(asker)[1])[:3] == ["answer", 1, [[where, 1, [7]]]], "pushed without another question"
    broker.send(encode("query", 2, [7, 8]))
    assert decode(receive(broker)[0]) == ["answer", 2, [[where, 1, [7]]], [], []]

    puller = prefill.peers.make(zmq.DEALER, connect=hello[7])
    puller.send(encode("kv_pull", 7, 1, hello[2] ^ 1, 0, 0))
    assert decode(receive(puller)[0])[0] == "kv_fail", "another start of it was meant"
    puller.send(encode("kv_pull", 7, 1, hello[2], 0, 0))
    meta = decode(receive(puller)[0])
    while not meta[8]:
        meta = decode(receive(puller)[0])
    assert meta[:9] == ["kv_meta", 7, 1, 20, answer(PROMPT, 1)[0], 2, 16, "sim/sim/16x4", True]
    want = struct.pack("<20I", *states(PROMPT)).ljust(128, b"\0")
    puller.send(encode("kv_pull", 7, 1, hello[2], 1, 5))
    header, block = receive(puller)
    place = struct.pack("<QII", 7, 1, 1)
    assert decode(header)[:6] == ["kv_block", 7, 1, 1, 4, crc32(place + want[64:])]
    assert block == want[64:]
    for _ in range(2):
        puller.send(encode("kv_done", 7, 1))
    assert prefill.ended("r") == "ok"
    prefill.reported(lambda load: load[1] > 0 and load[5] == 0)
    end, found = time.monotonic() + WAIT_S, True
    while found:  # its last publication may still be on the way to the broker
        assert time.monotonic() < end
        broker.send(encode("query", 3, [7]))
        found = decode(receive(broker)[0])[2]
