"""`python -m benchmarks peers` measures the peers that are installed, in one run; here a made-up peer replaces SGLang
and vLLM."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from benchmarks import parts, peers
from benchmarks.harness import Scope, Workspace
from benchmarks.peers_parts import ID, MARK

SUPPORT = str(Path(__file__).parents[1] / "support")
WAIT_MS = 20_000


def fake(space: Workspace, scope: Scope, python: str) -> list[peers.Sized]:
    """In front of the ranks of SGLang's, fed as SGLang's is."""
    assert python == sys.executable
    endpoints = [space.endpoint(f"rank-{rank}") for rank in range(peers.rank_count(scope))]
    nodes = tuple(
        space.part("peers_parts:pulling_rank", takes=each, replies=space.endpoint("replies")) for each in endpoints
    )
    takes, requests = space.endpoint("takes"), {}
    for tokens in peers.TOKENS:
        request = space.folder / str(tokens)
        request.write_bytes(b"head " + ID.format(number=1, sent_ns=0).encode() + bytes(4 * tokens))
        requests[str(tokens)] = str(request)
    middle = space.program("fake_peer", takes, *endpoints, env={"PYTHONPATH": SUPPORT}, python=python)
    client = space.part(
        "peers_parts:sender", replies=space.endpoint("replies"), sockets={"fake": takes}, requests={"fake": requests}
    )
    for process in (*nodes, middle, client):
        process.wait_ready()
    middle.pause()

    def sized(path: parts.Path, tokens: int) -> peers.Side:
        return peers.Side("fake", path, {"to": "fake", "tokens": tokens}, spins=True)

    return [partial(sized, parts.Path(client, middle, nodes))]


@pytest.mark.slow
def test_every_side_is_measured_in_one_run_and_who_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = peers.Peer("fake", "json", fake, "peers_parts:pick_of_ours")
    absent = replace(there, name="Absent", package="no_such_engine")
    monkeypatch.setattr(peers, "PEERS", {"fake": there, "absent": absent})
    notes: list[str] = []
    rows = peers.run(Scope(runs=1, quick=True, note=notes.append))
    sides = ("bare broker", peers.LEAN, f"pdbus, {peers.CORES}", "fake")
    sized = {metric: [f"{tokens:,} tokens" for tokens in peers.TOKENS] for metric in (peers.CPU, peers.PER_S)}
    sized[peers.ONE_WAY] = sized[peers.CPU][:2]
    expected = [
        (f"{case}: {side}", metric) for metric in (peers.CPU, peers.PER_S, peers.ONE_WAY)
        for case in sized[metric] for side in sides
    ]  # fmt: skip
    expected += [(f"no requests: {side}", peers.IDLE) for side in sides]
    expected += [(f"{ranks} ranks: {side}", peers.PICK) for ranks in peers.PICK_RANKS for side in sides[2:]]
    assert [(row.case, row.metric) for row in rows] == expected
    found = {(row.case, row.metric): row for row in rows}
    for case, metric in expected:  # a request costs the fake so little that it may drown in what it is not charged for
        assert found[case, metric].value > 0 or metric == peers.IDLE or (metric == peers.CPU and "fake" in case)
    assert found["no requests: fake", peers.IDLE].value > found[f"no requests: {sides[2]}", peers.IDLE].value
    assert found["128 tokens: fake", peers.CPU].floor == found[f"128 tokens: {peers.LEAN}", peers.CPU].value
    (note,) = notes
    assert note.startswith("Absent is left out: --peer absent=PYTHON")


@dataclass
class Part:
    """A process that uses `cpu_us` by what it was last asked to do."""

    looks: int = 0
    used_s: float = 0.0

    def cpu_s(self) -> float:
        return self.used_s

    def ask(self, **command: Any) -> Any:
        return self.looks


def test_what_spins_is_not_charged_for_looking_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes 2 us, a request 30 more; half of the looks of a burst find one."""
    middle = Part()

    def look(times: int) -> None:
        middle.looks += times
        middle.used_s += times * 2e-6

    class Client:
        def ask(self, do: str, count: int, window: int, tokens: int) -> dict[str, float]:
            assert (do, tokens) == ("burst", 128)
            look(2 * count)
            middle.used_s += count * 30e-6
            return {"elapsed_s": count / 1_000}

    monkeypatch.setattr(time, "sleep", lambda seconds: look(int(seconds * 100_000)))
    path = parts.Path(Client(), middle, ())  # type: ignore[arg-type]
    cpu_us, per_s = peers.Side("spins", path, {"tokens": 128}, spins=True).burst(500)
    assert cpu_us == pytest.approx(32)
    assert per_s == pytest.approx(1_000)
    assert peers.Side("sleeps", path, {"tokens": 128}).burst(500)[0] == pytest.approx(34)


def test_a_rank_of_vllms_answers_as_it_was_told_to() -> None:
    with (
        Workspace() as space, zmq.Context() as context,
        context.socket(zmq.ROUTER) as takes, context.socket(zmq.PULL) as replies,
        context.socket(zmq.PULL) as loads, context.socket(zmq.XPUB) as waves,
    ):  # fmt: skip
        at = {name: space.endpoint(name) for name in ("takes", "replies", "loads", "waves")}
        for socket, endpoint in zip((takes, replies, loads, waves), at.values(), strict=True):
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            socket.bind(endpoint)
        ended = [0, [[MARK.decode(), [1], "length"]], None, [MARK.decode()]]
        load = msgpack.packb([0, [], {"waiting": 0}]).hex()
        rank = space.part("peers_parts:dealing_rank", number=3, ended=ended, load=load, **at)
        identity, ready = takes.recv_multipart()
        assert (identity, ready) == ((3).to_bytes(2, "little"), b"")
        assert waves.recv() == b"\x01"
        rank.wait_ready()
        ids = [ID.format(number=number, sent_ns=time.monotonic_ns()) for number in range(3)]
        for each in ids:
            takes.send_multipart([identity, b"\x00", b"some header " + each.encode() + bytes(100)])
        told: list[str] = []
        while len(told) < len(ids):
            number, outputs, _, finished = msgpack.unpackb(replies.recv())
            assert number == 3
            assert outputs == [[each, [1], "length"] for each in finished]
            told += finished
        assert told == ids
        assert msgpack.unpackb(loads.recv()) == [3, [], {"waiting": 0}]
        waves.send(b"wake up")
        journeys = rank.ask(do="take")
        assert len(journeys) == 3
        assert all(0 < ns < WAIT_MS * 1e6 for ns in journeys)
