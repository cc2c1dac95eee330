"""KvPeers: which rank of the process hears what a peer answers, and how long a connection to a peer is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bus.runtime.loop import Loop
from bus.runtime.sockets import Socket, Sockets
from bus.wire.codec import decode, encode
from bus.wire.messages import TO_NODE_DATA, KvBlock, KvDone, KvFail, KvMeta, KvPull
from nodes.link.data import IDLE_S, KvPeers

WAIT_S = 60.0


class Peer:
    """A prefill node that answers when the test says so."""

    def __init__(self, sockets: Sockets) -> None:
        self.router, self.endpoint = sockets.ephemeral_router("tcp://127.0.0.1")
        self.heard: list[Any] = []
        self.connections: list[bytes] = []

    def receive(self, frames: list[bytes]) -> None:
        self.connections.append(frames[0])
        self.heard.append(decode(frames[1], TO_NODE_DATA))

    def say(self, message: KvMeta | KvFail) -> None:
        self.router.send_multipart([self.connections[-1], encode(message)])


class World:
    def __init__(self, sockets: Sockets) -> None:
        self.now = 0.0
        self.sockets = sockets
        self.loop = Loop(clock=lambda: self.now)
        self.router: Socket
        self.router, _ = sockets.ephemeral_router("tcp://127.0.0.1")
        self.kv = KvPeers(sockets, self.loop, self.router, linger_ms=0)
        self.heard: list[tuple[str, Any]] = []
        self.ranks: dict[str, Callable[..., None]] = {name: self._rank(name) for name in ("one", "two")}

    def _rank(self, name: str) -> Callable[..., None]:
        return lambda message, data: self.heard.append((name, message))

    def peer(self) -> Peer:
        peer = Peer(self.sockets)
        self.loop.add(peer.router, peer.receive)
        return peer

    def pull(self, rank: str, peer: Peer, room: int, attempt: int = 1) -> None:
        self.kv.request(peer.endpoint, KvPull(room, attempt, 5, 0, 0), self.ranks[rank])

    def done(self, rank: str, peer: Peer, room: int, attempt: int = 1) -> None:
        self.kv.request(peer.endpoint, KvDone(room, attempt), self.ranks[rank])

    def until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, f"not in {WAIT_S} s; heard {self.heard}"
            self.loop.turn()


@pytest.fixture
def world() -> Iterator[World]:
    with Sockets() as sockets:
        world = World(sockets)
        yield world
        world.loop.close()


def meta(room: int, attempt: int = 1) -> KvMeta:
    return KvMeta(room, attempt, 3, 9, 1, 4, "layout")


def test_each_rank_that_pulls_a_room_hears_of_it_until_it_is_done(world: World) -> None:
    peer = world.peer()
    world.pull("one", peer, 7)
    world.pull("two", peer, 7)
    world.until(lambda: len(peer.heard) == 2)
    peer.say(meta(7))
    world.until(lambda: len(world.heard) == 2)
    assert world.heard == [("one", meta(7)), ("two", meta(7))]
    world.done("one", peer, 7)
    world.until(lambda: len(peer.heard) == 3)
    peer.say(meta(7))
    world.until(lambda: len(world.heard) == 3)
    assert world.heard[2:] == [("two", meta(7))], "the one that is left still pulls"


def test_bytes_received_are_of_blocks_as_those_that_are_sent(world: World) -> None:
    """An engine's own handle is no KV cache."""
    peer = world.peer()
    world.pull("one", peer, 7)
    world.until(lambda: peer.heard)
    peer.router.send_multipart([peer.connections[-1], encode(meta(7)), b"handle"])
    peer.router.send_multipart([peer.connections[-1], encode(KvBlock(7, 1, 0, 4, 0)), b"a block"])
    world.until(lambda: len(world.heard) == 2)
    assert world.kv.received_bytes == len(b"a block")


def test_what_is_said_of_a_room_is_heard_by_who_pulls_it_for_that_client(world: World) -> None:
    """M87: who says no client is heard by all."""
    peer = world.peer()
    alice, bob = "clients/alice", "clients/bob"
    for rank, client in (("one", alice), ("one", bob), ("two", bob)):
        world.kv.request(peer.endpoint, KvPull(7, 1, 5, 0, 0, client=client), world.ranks[rank])
    world.until(lambda: len(peer.heard) == 3)
    for client in (alice, bob, ""):
        peer.say(KvFail(7, 1, "cancelled", client=client))
    world.until(lambda: len(world.heard) == 5)
    assert [(rank, fail.client) for rank, fail in world.heard] == [
        ("one", alice), ("one", bob), ("two", bob), ("one", ""), ("two", ""),
    ]  # fmt: skip
    world.kv.request(peer.endpoint, KvDone(7, 1, client=bob), world.ranks["one"])
    world.until(lambda: len(peer.heard) == 4)
    peer.say(KvFail(7, 1, "cancelled", client=alice))
    world.until(lambda: len(world.heard) == 6)
    assert world.heard[5][0] == "one", "for the other client it still pulls"


def test_two_attempts_at_a_room_are_pulled_from_two_peers(world: World) -> None:
    old, new = world.peer(), world.peer()
    world.pull("one", old, 7, attempt=1)
    world.pull("two", new, 7, attempt=2)
    world.until(lambda: old.heard and new.heard)
    new.say(meta(7, 2))
    old.say(KvFail(7, 1, "cancelled"))
    world.until(lambda: len(world.heard) == 2)
    assert sorted(world.heard, key=lambda each: each[0]) == [("one", KvFail(7, 1, "cancelled")), ("two", meta(7, 2))]


def test_an_endpoint_that_is_none_fails_the_rank_that_asked(world: World) -> None:
    world.kv.request("nowhere", KvPull(7, 1, 5, 0, 0), world.ranks["two"])
    world.until(lambda: world.heard)
    ((rank, fail),) = world.heard
    assert (rank, type(fail), fail.code) == ("two", KvFail, "kv_failed")


def test_an_idle_peer_is_closed_while_another_is_pulled_from(world: World) -> None:
    idle, busy = world.peer(), world.peer()
    world.pull("one", idle, 1)
    world.done("one", idle, 1)
    world.pull("one", busy, 2)
    world.until(lambda: len(idle.heard) == 2 and len(busy.heard) == 1)
    world.now = IDLE_S
    world.kv.tick(world.now)
    world.pull("two", idle, 3)
    world.until(lambda: len(idle.heard) == 3)
    assert len(set(idle.connections)) == 2, "it was closed, and is opened anew"
    busy.say(meta(2))
    world.until(lambda: world.heard)
    assert world.heard == [("one", meta(2))], "the pull that took so long has kept its connection"
