"""Real node processes under a real broker and a controller that is a bare ROUTER, so that each frame is the test's."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from test_broker_live import Asker

from bus.broker import Broker
from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.epochs import new_epoch
from bus.runtime.ports import free_ports
from bus.wire import topics
from bus.wire.codec import decode, encode
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    FROM_NODE_DATA,
    NODE_TO_CONTROLLER,
    PUBLICATIONS,
    Ack,
    Attach,
    Bye,
    CancelLeg,
    Detach,
    Dispatch,
    Drain,
    Ended,
    Hello,
    KvFail,
    KvPull,
    Load,
    LoadReport,
    Location,
    Member,
    Message,
    Params,
    Ping,
    Pong,
    Progress,
    Refused,
    Tokens,
    Welcome,
    Who,
)
from nodes.own.engines.sim import sim_generate

VOCAB = 512
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]
DEADLINE_S = 120.0  # several processes that import torch at once, on a busy machine


class Controller:
    """Speaks frames, decides nothing."""

    def __init__(self, context: zmq.Context[Any], base: str) -> None:
        self.base = base
        self.epoch = new_epoch()
        self.follow = False
        self.hellos: dict[tuple[str, int], Hello] = {}
        self.peers: dict[tuple[str, int], bytes] = {}
        self.started: list[tuple[str, int]] = []
        self.ended: list[tuple[str, Ended]] = []
        self.byes: list[str] = []
        self.pongs: list[Pong] = []
        self.numbers: dict[tuple[str, int], int] = {}
        self.refusal: Refused | None = None  # what every hello is answered with instead of a welcome
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.bind(ControllerAddress(base).nodes)

    def close(self) -> None:
        self.router.close()

    def until(self, done: Callable[[], object], what: str = "") -> None:
        end = time.monotonic() + DEADLINE_S
        while not done():
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {what or 'progress'} in {DEADLINE_S} s; ended: {self.ended}"
            if self.router.poll(min(200, left_s * 1000)):
                self.take()

    def take(self) -> None:
        peer, *frames = self.router.recv_multipart()
        message = decode(frames[0], NODE_TO_CONTROLLER)
        if isinstance(message, Hello):
            key = (message.instance, message.dp_rank)
            self.hellos[key], self.peers[key] = message, peer
            self.tell(key, self.refusal or Welcome("fake", self.epoch, self.follow, 30.0, message.dp_rank))
        elif isinstance(message, Progress):
            self.started += message.started
            self.ended += [(message.instance, end) for end in message.ended]
        elif isinstance(message, Bye):
            self.byes.append(message.instance)
        elif isinstance(message, Pong):
            self.pongs.append(message)

    def tell(self, key: tuple[str, int], message: Message, *frames: bytes) -> None:
        self.router.send_multipart([self.peers[key], encode(message), *frames])

    def dispatch(self, key: tuple[str, int], rid: str, prompt: list[int], **changes: Any) -> None:
        hello = self.hellos[key]
        self.numbers[key] = self.numbers.get(key, 0) + 1
        fields: dict[str, Any] = {
            "rid": rid, "attempt": 1, "leg": hello.role, "dp_rank": key[1], "controller_epoch": self.epoch,
            "number": self.numbers[key], "charge": len(prompt), "prompt_tokens": len(prompt), "max_tokens": 8,
        } | changes  # fmt: skip
        frames = [encode(Params())]
        self.tell(key, Dispatch(**fields), *(frames if hello.role == "decode" else [token_bytes(prompt), *frames]))

    def location(self, key: tuple[str, int]) -> Location:
        hello = self.hellos[key]
        return Location(hello.instance, hello.dp_rank, hello.epoch, hello.endpoint)

    def codes(self, rid: str) -> dict[str, str]:
        return {instance: end.code for instance, end in self.ended if end.rid == rid}


class Reader:
    """A client's connection to one node."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def attach(self, rid: str, attempt: int = 1, have: int = 0) -> None:
        self.socket.send(encode(Attach(rid, attempt, have)))

    def read(
        self, rid: str, attempt: int = 1, have: int = 0, stop_after: int | None = None, *, attached: bool = False
    ) -> tuple[list[int], Tokens]:
        """From `have` on, to the end or until there are `stop_after` tokens."""
        if not attached:
            self.attach(rid, attempt, have)
        ids: list[int] = []
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if not self.socket.poll(100):
                continue
            message = decode(self.socket.recv(), FROM_NODE_DATA)
            assert isinstance(message, Tokens)
            if message.rid != rid or (not ids and message.start > have):
                continue  # of what was read before
            assert message.start == have + len(ids)
            ids += message.ids
            if message.finish:
                self.socket.send(encode(Detach(rid, attempt)))
                return ids, message
            if stop_after is not None and len(ids) >= stop_after:
                return ids, message
        raise AssertionError(f"{rid} did not finish; got {ids}")


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.context: zmq.Context[Any] = zmq.Context()
        self.bus = f"ipc://{directory}/bus"
        self.broker = Broker(self.bus).start()
        self.controller = Controller(self.context, f"ipc://{directory}/c")
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[Reader] = []

    def node(self, role: str, *options: str, instance: str = "", controller: str = "") -> subprocess.Popen[str]:
        command = [
            sys.executable, "-P", "-m", f"nodes.{role}", "--bus", self.bus, "--controller",
            controller or self.controller.base, "--instance", instance or role, "--data", f"ipc://{self.directory}",
            "--engine", "sim", "--block-tokens", "4", "--sim-timing", "zero", "--watch-parent", *options,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def ready(self, *keys: tuple[str, int]) -> None:
        self.controller.until(lambda: all(key in self.controller.hellos for key in keys), f"hello of {keys}")
        for process in self.processes:
            if not hasattr(process, "was_ready"):
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line.startswith("READY part=node"), (line, process.poll())
                process.was_ready = True  # type: ignore[attr-defined]

    def answered(self, key: tuple[str, int]) -> None:
        """The node has done what the controller told it so far."""
        pings = len(self.controller.pongs)
        self.controller.tell(key, Ping(1))
        self.controller.until(lambda: len(self.controller.pongs) > pings, "pong")

    def reader(self, key: tuple[str, int]) -> Reader:
        reader = Reader(self.context, self.controller.hellos[key].endpoint)
        self.readers.append(reader)
        return reader

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=DEADLINE_S)
        for reader in self.readers:
            reader.socket.close()
        self.controller.close()
        self.broker.stop()
        self.context.term()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="pd"))
    cluster = Cluster(directory)
    yield cluster
    cluster.close()
    shutil.rmtree(directory)


P, D, U = ("prefill", 0), ("decode", 0), ("unified", 0)


def pair(cluster: Cluster, rid: str, prompt: list[int], room: int, **changes: Any) -> None:
    controller = cluster.controller
    controller.dispatch(D, rid, prompt, bootstrap_room=room, prefill=controller.location(P), **changes)
    controller.dispatch(P, rid, prompt, bootstrap_room=room, **changes)


def test_a_node_names_who_has_welcomed_it_and_says_how_far_its_loads_have_come(cluster: Cluster) -> None:
    """What others publish in its name is found out by that."""
    with cluster.context.socket(zmq.SUB) as bus:
        for kind in (topics.LOAD, topics.MEMBER):
            bus.subscribe(kind)
        bus.connect(BusAddress(cluster.bus).subscribe)
        cluster.node("unified")
        cluster.ready(U)
        said: list[Load] = []

        def named() -> bool:
            while bus.poll(0):
                publication = decode(bus.recv_multipart()[1], PUBLICATIONS)
                assert isinstance(publication, LoadReport | Member)
                said.extend([publication.load] if publication.load is not None else [])
            return bool(said and said[-1].acks == (Ack(cluster.controller.epoch, 0, 0),))

        cluster.controller.until(named, "report that names the controller")
        cluster.answered(U)
        assert cluster.controller.pongs[-1].load_seq >= said[-1].seq > 0


def test_a_told_pair_streams_the_reference_tokens(cluster: Cluster) -> None:
    cluster.node("prefill")
    cluster.node("decode")
    cluster.ready(P, D)
    reader = cluster.reader(D)
    for number in range(6):
        prompt = PROMPT[: 3 * number + 1]
        pair(cluster, f"r{number}", prompt, number, max_tokens=5 + number)
        ids, last = reader.read(f"r{number}")
        assert ids == sim_generate(prompt, 5 + number, VOCAB)
        assert (last.finish, last.found_by) == ("length", "told")
    controller = cluster.controller
    controller.until(lambda: len(controller.ended) == 12, "end of all legs")
    assert {end.code for _, end in controller.ended} == {"ok"}
    assert len(controller.started) == 12


def test_decode_asks_the_broker_and_the_broker_answers_when_prefill_registers(cluster: Cluster) -> None:
    cluster.node("prefill")
    cluster.node("decode")
    cluster.ready(P, D)
    cluster.controller.dispatch(D, "d", PROMPT, bootstrap_room=99, prefill_instance="prefill")
    cluster.controller.dispatch(P, "p", PROMPT, bootstrap_room=99, attempt=4)
    ids, last = cluster.reader(D).read("d")
    assert ids == sim_generate(PROMPT, 8, VOCAB)
    assert last.found_by == "asked"


def test_two_ranks_of_a_process_that_want_one_room_both_hear_of_its_end(cluster: Cluster) -> None:
    cluster.node("prefill", "--sim-base-s", "30")
    cluster.node("decode", "--dp-size", "2", "--dp-rank", "0-1")
    second = ("decode", 1)
    cluster.ready(P, D, second)
    controller = cluster.controller
    controller.dispatch(D, "first", PROMPT, bootstrap_room=99, prefill_instance="prefill")
    controller.dispatch(second, "second", PROMPT, bootstrap_room=99, prefill_instance="prefill")
    controller.dispatch(P, "p", PROMPT, bootstrap_room=99)
    controller.tell(P, CancelLeg("p", 1))
    controller.until(lambda: len(controller.ended) == 3, "end of both decode legs")
    assert {rid: controller.codes(rid) for rid in ("first", "second")} == {
        "first": {"decode": "prefill_failed"}, "second": {"decode": "prefill_failed"}
    }  # fmt: skip


def test_decode_computes_the_rank_where_the_instance_follows_the_room(cluster: Cluster) -> None:
    cluster.controller.follow = True
    cluster.node("prefill", "--dp-size", "2", "--dp-rank", "0-1")
    cluster.node("decode")
    second = ("prefill", 1)
    cluster.ready(P, second, D)
    with Asker(cluster.bus) as asker:
        asker.until_followed("prefill", 2)
    controller = cluster.controller
    reader = cluster.reader(D)
    controller.dispatch(second, "p", PROMPT, bootstrap_room=7, attempt=2)  # 7 % 2 == 1
    controller.dispatch(D, "d", PROMPT, bootstrap_room=7, prefill_instance="prefill")
    ids, last = reader.read("d")
    assert ids == sim_generate(PROMPT, 8, VOCAB)
    assert last.found_by == "computed"
    controller.dispatch(P, "p2", PROMPT, bootstrap_room=9)  # the caller's own choice: rank 0
    controller.dispatch(D, "d2", PROMPT, bootstrap_room=9, prefill_instance="prefill", disagg_prefill_dp_rank=0)
    ids, last = reader.read("d2")
    assert ids == sim_generate(PROMPT, 8, VOCAB)
    assert last.found_by == "told"
    controller.until(lambda: len(controller.ended) == 4)
    assert {end.code for _, end in controller.ended} == {"ok"}


def test_a_unified_process_of_several_ranks_over_tcp(cluster: Cluster) -> None:
    cluster.node("unified", "--dp-size", "3", "--dp-rank", "0-2", "--data", "tcp://127.0.0.1")
    keys = [("unified", rank) for rank in range(3)]
    cluster.ready(*keys)
    assert cluster.controller.hellos[keys[0]].endpoint.startswith("tcp://127.0.0.1:")
    assert len({cluster.controller.hellos[key].epoch for key in keys}) == 3
    reader = cluster.reader(U)
    for key in keys:
        cluster.controller.dispatch(key, f"r{key[1]}", PROMPT)
        assert reader.read(f"r{key[1]}")[0] == sim_generate(PROMPT, 8, VOCAB)


def test_an_attach_may_come_before_the_dispatch_and_a_stream_may_be_read_again(cluster: Cluster) -> None:
    cluster.node("unified", "--sim-base-s", "0.01")
    cluster.ready(U)
    reader = cluster.reader(U)
    reader.attach("r")
    cluster.answered(U)
    cluster.controller.dispatch(U, "r", PROMPT, max_tokens=40)
    want = sim_generate(PROMPT, 40, VOCAB)
    first, _ = reader.read("r", stop_after=5, attached=True)
    assert first == want[: len(first)]
    again = cluster.reader(U)  # another connection, from where the first one was
    rest, last = again.read("r", have=len(first))
    assert first + rest == want
    assert last.finish == "length"


def test_cancel_reaches_both_legs(cluster: Cluster) -> None:
    cluster.node("prefill")
    cluster.node("decode", "--sim-base-s", "0.05")
    cluster.ready(P, D)
    pair(cluster, "r", PROMPT, 5, max_tokens=1000)
    cluster.reader(D).read("r", stop_after=3)
    cluster.controller.tell(D, CancelLeg("r", 1))
    _, last = cluster.reader(D).read("r", have=0)  # a connection on which nothing of before is under way
    assert last.finish == "cancelled"
    cluster.controller.until(lambda: cluster.controller.codes("r") == {"decode": "cancelled", "prefill": "ok"})


def test_prefill_that_is_killed_fails_the_decode_leg(cluster: Cluster) -> None:
    prefill = cluster.node("prefill", "--sim-base-s", "30")
    cluster.node("decode")
    cluster.ready(P, D)
    pair(cluster, "r", PROMPT, 5)
    reader = cluster.reader(D)
    prefill.kill()
    ids, last = reader.read("r")
    assert (ids, last.code) == ([], "prefill_failed")


def test_a_pull_for_another_start_of_the_node_is_refused(cluster: Cluster) -> None:
    cluster.node("prefill")
    cluster.ready(P)
    reader = cluster.reader(P)
    reader.socket.send(encode(KvPull(1, 1, cluster.controller.hellos[P].epoch ^ 1, 0, 0)))
    assert reader.socket.poll(int(DEADLINE_S * 1000))
    answer = decode(reader.socket.recv(), FROM_NODE_DATA)
    assert isinstance(answer, KvFail)
    assert answer.code == "prefill_failed"


def test_garbage_on_every_socket_changes_nothing(cluster: Cluster) -> None:
    cluster.node("unified")
    cluster.ready(U)
    controller = cluster.controller
    reader = cluster.reader(U)
    for frame in (b"", b"\x01", b"\x01\xc1", b"\x02\x91\xa4ping", encode(Params()), os.urandom(500)):
        reader.socket.send(frame)
        reader.socket.send_multipart([frame, frame, frame])
        controller.router.send_multipart([controller.peers[U], frame])
        controller.router.send_multipart([controller.peers[U], frame, frame])
    controller.dispatch(U, "r", PROMPT)
    assert reader.read("r")[0] == sim_generate(PROMPT, 8, VOCAB)


@pytest.mark.parametrize("by", ["signal", "message"])
def test_drain_finishes_what_runs_takes_nothing_new_and_leaves_with_0(cluster: Cluster, by: str) -> None:
    process = cluster.node("unified", "--sim-base-s", "0.02")
    cluster.ready(U)
    controller = cluster.controller
    controller.dispatch(U, "r", PROMPT, max_tokens=40)
    reader = cluster.reader(U)
    reader.read("r", stop_after=3)
    if by == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        controller.tell(U, Drain(0))
    controller.until(lambda: controller.hellos[U].state == "draining", "a draining hello")
    controller.dispatch(U, "late", PROMPT)
    ids, last = reader.read("r")
    assert ids == sim_generate(PROMPT, 40, VOCAB)
    assert last.finish == "length"
    controller.until(lambda: controller.byes == ["unified"], "bye")
    assert controller.codes("late") == {"unified": "draining"}
    assert controller.codes("r") == {"unified": "ok"}
    assert process.wait(DEADLINE_S) == 0


def test_a_second_signal_leaves_at_once(cluster: Cluster) -> None:
    process = cluster.node("unified", "--sim-base-s", "30")
    cluster.ready(U)
    cluster.controller.dispatch(U, "r", PROMPT)
    cluster.answered(U)  # else the signal may come first, and it leaves for want of work
    process.send_signal(signal.SIGTERM)
    cluster.controller.until(lambda: cluster.controller.hellos[U].state == "draining")
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


AGAIN = "unified/1 was started again elsewhere (epoch 9)"


def test_a_process_with_a_rank_that_was_started_again_ends_what_it_runs_and_exits_4(cluster: Cluster) -> None:
    process = cluster.node("unified", "--dp-size", "2", "--dp-rank", "0-1", "--sim-base-s", "0.05")
    second = ("unified", 1)
    cluster.ready(U, second)
    controller = cluster.controller
    assert abs(controller.hellos[U].started_us / 1e6 - time.time()) < 2 * DEADLINE_S
    for key, rid in ((U, "a"), (second, "b")):
        controller.dispatch(key, rid, PROMPT, max_tokens=1000)
    reader = cluster.reader(U)
    reader.read("a", stop_after=2)
    controller.tell(second, Refused("fenced", AGAIN))
    _, last = reader.read("a")
    assert last.code == "shutting_down", "its reader is told, and resumes elsewhere"
    controller.until(lambda: len(controller.byes) == 2, "goodbyes of both ranks")
    assert {end.rid: end.code for _, end in controller.ended} == {"a": "shutting_down", "b": "shutting_down"}
    assert process.wait(DEADLINE_S) == 4
    assert process.stderr is not None
    lines = process.stderr.read().strip().splitlines()
    assert lines[-1].endswith(f"error: {AGAIN}; this one leaves")
    assert not any("Traceback" in line for line in lines)


def test_a_fenced_process_whose_engine_hangs_leaves_all_the_same(cluster: Cluster) -> None:
    process = cluster.node("unified", "--dp-size", "2", "--dp-rank", "1", "--sim-base-s", "1000")
    second = ("unified", 1)
    cluster.ready(second)
    cluster.controller.dispatch(second, "r", PROMPT)
    cluster.controller.tell(second, Refused("fenced", AGAIN))
    assert process.wait(DEADLINE_S) == 4


def test_a_start_that_is_fenced_before_it_served_asks_until_it_is_welcome_or_gives_up(cluster: Cluster) -> None:
    controller = cluster.controller
    controller.refusal = Refused("fenced", AGAIN)
    process = cluster.node("unified", "--dp-size", "2", "--dp-rank", "1", "--wait-s", "2.6")
    second = ("unified", 1)
    controller.until(lambda: second in controller.hellos)
    assert process.stderr is not None
    stderr = process.stderr.read()
    assert process.wait(DEADLINE_S) == 4
    assert stderr.strip().endswith(f"error: {AGAIN}; this one leaves")
    cluster.processes.remove(process)
    process.communicate(timeout=DEADLINE_S)

    gone = controller.hellos[second].epoch
    cluster.node("unified", "--dp-size", "2", "--dp-rank", "1")
    controller.until(lambda: controller.hellos[second].epoch != gone, "a hello of the next start")
    controller.refusal = None
    controller.hellos.clear()
    cluster.ready(second)


def test_a_node_leaves_with_its_parent(cluster: Cluster) -> None:
    process = cluster.node("unified")
    cluster.ready(U)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    process.stdin = None


def test_a_controller_that_returns_hears_what_runs_and_takes_it_over(cluster: Cluster) -> None:
    cluster.node("unified", "--sim-base-s", "0.03")
    cluster.ready(U)
    old = cluster.controller
    old.dispatch(U, "r", PROMPT, max_tokens=80)
    old.until(lambda: ("r", 1) in old.started)
    old.hellos.clear()
    while U not in old.hellos:  # one that comes right behind a hello is taken for answered by it
        old.tell(U, Who())
        if old.router.poll(100):
            old.take()
    assert old.hellos[U].running == (("r", 1),)
    old.epoch = new_epoch()  # as a restarted controller
    old.numbers.clear()
    old.dispatch(U, "r", PROMPT, max_tokens=80)  # the client sent it again: it must not run twice
    reader = cluster.reader(U)
    ids, _ = reader.read("r")
    assert ids == sim_generate(PROMPT, 80, VOCAB)
    old.until(lambda: len(old.ended) >= 1)
    assert [end.code for _, end in old.ended] == ["ok"]


@pytest.mark.parametrize("what", ["bus", "controller"])
def test_a_node_says_what_it_waits_for_and_gives_up(cluster: Cluster, what: str) -> None:
    nowhere = f"ipc://{cluster.directory}/nowhere"
    options = {"bus": ("--bus", nowhere), "controller": ()}[what]
    process = cluster.node("unified", *options, "--wait-s", "2.6", controller=nowhere if what == "controller" else "")
    if what == "bus":
        cluster.controller.until(lambda: U in cluster.controller.hellos)
    assert process.stderr is not None
    stderr = process.stderr.read()
    assert process.wait(DEADLINE_S) == 3
    lines = stderr.strip().splitlines()
    assert f"the {what} at {nowhere} did not answer (waited 2.6 s)" in lines[-1]
    assert any("node.waiting" in line and nowhere in line for line in lines)


def test_a_node_serves_without_one_of_two_controllers_once_it_has_waited_for_it(cluster: Cluster) -> None:
    """Or no rank could be started again while one of them is away. It joins that one when it comes."""
    nowhere = f"ipc://{cluster.directory}/late"
    process = cluster.node("unified", "--controller", nowhere, "--wait-s", "1.2")
    cluster.ready(U)
    cluster.controller.dispatch(U, "r", PROMPT, max_tokens=8)
    ids, _ = cluster.reader(U).read("r")
    assert ids == sim_generate(PROMPT, 8, VOCAB)
    late = Controller(cluster.context, nowhere)
    try:
        late.until(lambda: U in late.hellos, "hello to the late one")
    finally:
        late.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr is not None
    assert any("node.serves_without" in line and nowhere in line for line in process.stderr)


def named(name: str, **labels: str) -> str:
    """A metric of the decode rank as it is scraped."""
    labels |= {"instance": "decode", "dp_rank": "0", "role": "decode"}
    said = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return f"pdbus_node_{name}{{{said}}}"


def test_metrics_show_what_went_on(cluster: Cluster) -> None:
    port = free_ports("127.0.0.1", 1)
    cluster.node("prefill")
    cluster.node("decode", "--metrics-port", str(port))
    cluster.ready(P, D)
    cluster.controller.dispatch(D, "r", PROMPT, bootstrap_room=5, prefill_instance="prefill")
    cluster.controller.dispatch(P, "r", PROMPT, bootstrap_room=5)
    reader = cluster.reader(D)
    reader.socket.send(b"garbage")
    reader.read("r")
    blocks = -(-len(PROMPT) // 4)
    wanted = {
        named("kv_received_bytes_total"): float(blocks * 4 * 4),
        named("legs_ended_total", code="ok"): 1.0,
        named("first_token_seconds_count"): 1.0,
        named("kv_fetch_seconds_count"): 1.0,
        named("rooms_located_total", what="asked"): 1.0,
        named("rooms_total", what="registered"): 0.0,  # which only prefill ranks do
        named("rejected_messages_total", reason="version", socket="data"): 1.0,
        named("running"): 0.0,
        named("unsent_messages_total", what="controller"): 0.0,
        named("unsent_messages_total", what="kv_block"): 0.0,
        named("unsent_messages_total", what="tokens"): 0.0,
        named("attaches_dropped_total"): 0.0,
        named("output_tokens_total"): 8.0,
    }

    def scraped() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return all(float(found.get(name, "nan")) == value for name, value in wanted.items())

    cluster.controller.until(scraped, "metrics")


def test_ready_tells_whether_legs_may_come(cluster: Cluster) -> None:
    port = free_ports("127.0.0.1", 1)

    def asked(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    cluster.node("unified", "--metrics-port", str(port), "--sim-decode-s", "0.5")
    cluster.ready(U)
    cluster.controller.until(lambda: asked("/ready") == (200, "ok\n"), "ready")
    assert asked("/health") == (200, "ok\n")
    assert asked("/")[0] == 404
    cluster.controller.dispatch(U, "r", PROMPT, max_tokens=400)
    cluster.controller.until(lambda: ("r", 1) in cluster.controller.started, "start")
    cluster.controller.tell(U, Drain(0))
    cluster.controller.until(lambda: asked("/ready") == (503, "draining\n"), "draining")
    assert asked("/health") == (200, "ok\n")


def test_the_tiny_model_through_the_pair_equals_the_unified_rank(cluster: Cluster) -> None:
    torch = ("--engine", "torch", "--model", "tiny", "--block-tokens", "8")
    cluster.node("prefill", *torch)
    cluster.node("decode", *torch)
    cluster.node("unified", *torch)
    cluster.ready(P, D, U)
    split, whole = cluster.reader(D), cluster.reader(U)
    for number, length in enumerate((1, 7, 8, 30)):
        prompt = [5 + (number * 37 + i * 11) % 200 for i in range(length)]
        pair(cluster, f"r{number}", prompt, number, max_tokens=12)
        cluster.controller.dispatch(U, f"r{number}", prompt, max_tokens=12)
        assert split.read(f"r{number}")[0] == whole.read(f"r{number}")[0]
