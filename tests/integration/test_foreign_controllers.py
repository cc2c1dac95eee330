"""Raw nodes and raw clients against the real controller: docs/protocol.md from the other two sides."""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from foreign_wire import WAIT_S, Peers, Process, decode, encode, receive

PROMPT = struct.pack("<3i", 5, 6, 7)
PARAMS = encode("params", 0.5, 7)


class Party:
    """A raw DEALER to the controller; keeps what it was not asked for."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.payload: list[bytes] = []
        self._inbox: list[list[bytes]] = []

    def say(self, *fields: Any, payload: tuple[bytes, ...] = ()) -> None:
        self.socket.send_multipart([encode(*fields), *payload])

    def hear(self, *tags: str, test: Callable[[list[Any]], object] = lambda fields: True) -> list[Any]:
        """The next message with one of the tags; its further frames are in `payload`."""
        for at, frames in enumerate(self._inbox):
            if self._takes(frames, tags, test):
                del self._inbox[at]
                return decode(frames[0])
        end = time.monotonic() + WAIT_S
        while True:
            frames = receive(self.socket, end - time.monotonic())
            if self._takes(frames, tags, test):
                return decode(frames[0])
            self._inbox.append(frames)

    def _takes(self, frames: list[bytes], tags: tuple[str, ...], test: Callable[[list[Any]], object]) -> bool:
        tag, *fields = decode(frames[0])
        if tag not in tags or not test(fields):
            return False
        self.payload = frames[1:]
        return True

    def quiet(self, tag: str, seconds: float = 0.3) -> bool:
        """Whether nothing with that tag comes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.socket.poll(int(left * 1000) + 1):
                self._inbox.append(self.socket.recv_multipart())
        return not any(decode(frames[0])[0] == tag for frames in self._inbox)


class Node(Party):
    def __init__(self, stage: Stage, role: str, dp_rank: int, epoch: int, dp_size: int = 1) -> None:
        super().__init__(stage.peers.make(zmq.DEALER, connect=f"{stage.base}.nodes"))
        self.key = (f"{role}-0", dp_rank, epoch)
        self.about = ("hello", *self.key, role, "m", dp_size, "ready", f"ipc:///{role}{dp_rank}", 4096, 4096, 8, 16)
        self.say(*self.about)
        self.welcome = self.hear("welcome")

    def progress(self, started: list[Any], ended: list[Any]) -> None:
        self.say("progress", *self.key, started, ended)


class Stage:
    """The real controller (with the broker inside) and raw sockets."""

    def __init__(self, directory: Path) -> None:
        self.base = f"ipc://{directory}/c"
        self.bus = f"ipc://{directory}/b"
        # the raw nodes answer no ping and publish nothing: within that lease they count as alive
        command = ("-m", "controller", "--with-broker", "--lease-s", str(2 * WAIT_S))
        self.process = Process(*command, "--bus", self.bus, "--controller", self.base)
        self.process.wait_ready()
        self.peers = Peers()
        self.client = Party(self.peers.make(zmq.DEALER, connect=f"{self.base}.clients"))
        self.pub = self.peers.make(zmq.PUB, connect=f"{self.bus}.pub")

    def submit(self, rid: str, leg: str = "pair", *, room: int | None = 7, max_tokens: int = 4, **extra: Any) -> None:
        fields = {"routed": None, "prefill_rank": None, "prompt_tokens": 3, "prompt": PROMPT} | extra
        header = ("submit", rid, leg, fields["prompt_tokens"], max_tokens, room)
        self.client.say(*header, fields["routed"], fields["prefill_rank"], payload=(fields["prompt"], PARAMS))

    def rank(self, instance: str, test: Callable[[list[Any]], object] = lambda rank: True) -> list[Any]:
        """Its RankStatus, once it passes the test."""
        end = time.monotonic() + WAIT_S
        while True:
            self.client.say("status", 1)
            ranks = self.client.hear("status_is")[7]
            found = next((rank for rank in ranks if rank[0] == instance), None)
            if found is not None and test(found):
                return list(found)
            assert time.monotonic() < end, ranks
            time.sleep(0.01)

    def close(self) -> None:
        self.peers.close()
        with self.process:
            pass


@pytest.fixture
def stage() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="pd"))
    stage = Stage(directory)
    yield stage
    stage.close()
    shutil.rmtree(directory)


def ended(rid: str, leg: str, code: str = "ok", attempt: int = 1) -> list[Any]:
    return [rid, attempt, leg, code]


def test_a_stranger_is_asked_who_it_is(stage: Stage) -> None:
    """M44."""
    stranger = Party(stage.peers.make(zmq.DEALER, connect=f"{stage.base}.nodes"))
    for message in (("pong", 1, 0, False), ("progress", "x", 0, 1), ("bye", "x", 0, 1)):
        stranger.say(*message)
        assert stranger.hear("who") == ["who"]


def test_a_pair_is_dispatched_and_done(stage: Stage) -> None:
    """M45 M51 M52 M53: numbered from 1 for each rank, payload untouched, one end."""
    prefill, decode_ = Node(stage, "prefill", 0, 11), Node(stage, "decode", 0, 12)
    assert prefill.welcome[1] == "controller-0"
    assert prefill.welcome[5] == 0
    for number in (1, 2, 3):
        rid = f"r{number}"
        stage.submit(rid, room=number)
        accepted = stage.client.hear("accepted", "failed")
        where = ["prefill-0", 0, 11, "ipc:///prefill0"]
        assert accepted == ["accepted", rid, 1, number, where, ["decode-0", 0, 12, "ipc:///decode0"]]
        for node, payload in ((prefill, [PROMPT, PARAMS]), (decode_, [PARAMS])):
            dispatch = node.hear("dispatch")
            assert dispatch[1:3] == [rid, 1]
            assert dispatch[5:7] == [prefill.welcome[2], number]
            assert dispatch[8:12] == [3, 4, 0, number]
            assert node.payload == payload
        assert dispatch[12] == where, "decode is told where its prefill runs"
        decode_.progress([[rid, 1]], [])
        decode_.progress([], [ended(rid, "decode")])
        assert stage.client.quiet("done", 0.1)
        prefill.progress([[rid, 1]], [ended(rid, "prefill")])
        prefill.progress([], [ended(rid, "prefill")])  # said twice
        done = stage.client.hear("done", "failed")
        assert done[:3] == ["done", rid, 1]
        assert sorted(leg[2] for leg in done[3]) == ["decode", "prefill"]
    assert stage.client.quiet("done")


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("empty_prompt", {"prompt_tokens": 0, "prompt": b""}),
        ("empty_prompt", {"prompt_tokens": -5}),
        ("bad_request", {"prompt_tokens": 4}),
        ("bad_request", {"max_tokens": 0}),
        ("bad_room", {"room": None}),
        ("bad_room", {"room": -1}),
        ("bad_room", {"room": 2**63}),
        ("no_rank", {"max_tokens": 5000}),  # within a lease of the controller's start, for what rests on who is there
        ("no_rank", {"routed": 1}),
        ("no_rank", {"routed": -1}),
        ("bad_rank", {"prefill_rank": 2**40}),
    ],
)
def test_a_wrong_submit_fails_and_goes_nowhere(stage: Stage, code: str, change: dict[str, Any]) -> None:
    """M52 M55 M56."""
    prefill, decode_ = Node(stage, "prefill", 0, 11), Node(stage, "decode", 0, 12)
    stage.rank("decode-0", lambda rank: rank[4] == "ready")
    stage.submit("r", **change)
    failed = stage.client.hear("failed", "accepted")
    assert failed[:2] == ["failed", "r"]
    assert failed[3] == code
    assert failed[4]
    assert failed[5] is (code == "no_rank")
    assert prefill.quiet("dispatch", 0.1)
    assert decode_.quiet("dispatch", 0.1)


def test_garbage_from_clients_and_nodes_hurts_nobody(stage: Stage) -> None:
    """M10."""
    node = Node(stage, "unified", 0, 11)
    for frame in (
        b"",
        b"\x01",
        b"\x02\x91\xa3who",
        b"\x01\xc1",
        encode("submit"),
        encode("hello", 1),
        encode("tokens"),
    ):
        for party in (node, stage.client):
            party.socket.send(frame)
            party.socket.send_multipart([frame, frame, frame, frame])
    stage.submit("r", "unified", room=None)
    assert stage.client.hear("accepted", "failed", test=lambda fields: fields[0] == "r")[0] == "accepted"
    assert node.hear("dispatch")[1] == "r"


def test_a_lost_rank_is_replaced_under_the_next_attempt(stage: Stage) -> None:
    """M27 M53 M54: `accepted` again, attempt 2, elsewhere; what the lost start was sent counts no more."""
    nodes = {at: Node(stage, "unified", at, 11 + at, dp_size=2) for at in (0, 1)}
    stage.submit("r", "unified", room=None)
    first = stage.client.hear("accepted")
    at = first[5][1]
    nodes[at].hear("dispatch")
    again = Node(stage, "unified", at, 99, dp_size=2)
    second = stage.client.hear("accepted", "failed")
    assert second[:3] == ["accepted", "r", 2]
    where = second[5][1]
    runner = again if where == at else nodes[where]
    dispatch = runner.hear("dispatch")
    assert dispatch[2] == 2
    assert runner.payload == [PROMPT, PARAMS]
    nodes[at].progress([], [ended("r", "unified")])  # the old start wakes up
    runner.progress([["r", 2]], [ended("r", "unified", attempt=2)])
    assert stage.client.hear("done", "failed")[:3] == ["done", "r", 2]
    assert stage.client.quiet("done")


def test_an_estimate_counts_each_request_once(stage: Stage) -> None:
    """M24 M25 M26: what was sent and is not in the report yet is added to it; old reports change nothing."""
    node = Node(stage, "unified", 0, 11)

    def report(seq: int, running: int, acks: list[Any], epoch: int = 11) -> None:
        load = [seq, 1, running, 0, 0, 0, 4096, 8, acks]
        stage.pub.send_multipart([b"load/unified-0/0/", encode("load", "unified-0", 0, epoch, seq, load)])

    def estimate(want: int) -> None:
        """Wait until the estimate is `want` requests."""
        stage.rank("unified-0", lambda rank: rank[12] == want)

    end = time.monotonic() + WAIT_S
    seq = 0
    while stage.rank("unified-0")[8] < 0:  # until the bus has heard of this new publisher
        seq += 1
        report(seq, 0, [])
        assert time.monotonic() < end
    for rid in ("a", "b", "c"):
        stage.submit(rid, "unified", room=None)
    mine = node.hear("dispatch", test=lambda fields: fields[0] == "c")[5]
    report(seq + 1, 0, [])
    estimate(3)
    report(seq + 2, 2, [[mine, 2, 6]])
    estimate(3)
    report(seq + 1, 0, [])
    report(seq + 2, 7, [])
    report(seq + 9, 7, [], epoch=10)
    report(seq + 3, 3, [[mine ^ 1, 50, 50], [mine, 3, 9]])
    estimate(3)
    report(seq + 4, 0, [[mine, 3, 9]])
    estimate(0)


def test_a_named_rank_is_taken_or_nothing_is(stage: Stage) -> None:
    """M55."""
    nodes = {at: Node(stage, "unified", at, 11 + at, dp_size=2) for at in (0, 1)}
    for number in range(4):
        stage.submit(f"r{number}", "unified", room=None, routed=1)
        assert stage.client.hear("accepted", "failed")[5][1] == 1
    nodes[1].say("bye", *nodes[1].key)
    end = time.monotonic() + WAIT_S
    code = ""
    while code != "rank_unavailable":
        stage.submit(f"x{time.monotonic()}", "unified", room=None, routed=1)
        answer = stage.client.hear("accepted", "failed", test=lambda fields: fields[0].startswith("x"))
        code = answer[3] if answer[0] == "failed" else ""
        assert time.monotonic() < end, answer
    assert nodes[0].quiet("dispatch", 0.1)
