"""Feeds over real sockets: a publisher of SGLang's kind that loses messages and restarts, and our own nodes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from prefix_hits import hits

from bus.endpoints import BusAddress
from bus.runtime.loop import Loop
from bus.runtime.sockets import Sockets
from bus.wire.codec import pack
from bus.wire.hashing import block_hashes
from bus.wire.kv_events import BlockStored, parse_batch, split_frames
from bus.wire.kv_names import Changes, Cleared, Stored
from bus.wire.messages import Load, MemberKey
from controller.feeds.engine import EngineFeed
from controller.feeds.settings import EngineSettings
from controller.policies.prefix_index import PrefixIndex

DEADLINE_S = 60.0
SIZE = 4


class Publisher:
    """One rank of an engine as SGLang builds it: PUB, a replay ROUTER, and the load on the same PUB port + 2."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub, self.port = self._bind(zmq.XPUB)
        self.replay, self.replay_port = self._bind(zmq.ROUTER)
        self.load, self.load_port = self._bind(zmq.XPUB)
        self.log: list[bytes] = []
        self.asked: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _bind(self, kind: int) -> tuple[zmq.Socket[bytes], int]:
        socket = self.context.socket(kind)
        socket.linger = 0
        return socket, socket.bind_to_random_port("tcp://127.0.0.1")

    def await_subscriber(self) -> None:
        for socket in (self.pub, self.load):
            assert socket.poll(int(DEADLINE_S * 1000)), "nobody subscribed"
            socket.recv()

    def event(self, event: dict[str, Any], *, lose: bool = False) -> None:
        self.log.append(pack([time.time(), [event], 0]))
        if not lose:
            self.pub.send_multipart([b"kv-events", (len(self.log) - 1).to_bytes(8, "big"), self.log[-1]])

    def stored(self, tokens: list[int], parent: int | None, first: int, **how: bool) -> None:
        hashes = list(range(first, first + len(tokens) // SIZE))
        self.event({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
                    "block_size": SIZE, "lora_id": None, "medium": "GPU"}, **how)  # fmt: skip

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self.replay.poll(20):
                continue
            identity, empty, start = self.replay.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            log = list(self.log)
            for seq in range(self.asked[-1], len(log)):
                self.replay.send_multipart([identity, b"", b"kv-events", seq.to_bytes(8, "big"), log[seq]])
            self.replay.send_multipart([identity, b"", b"kv-events", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for socket in (self.pub, self.replay, self.load):
            socket.close()
        self.context.term()


class Followed:
    def __init__(self, publisher: Publisher) -> None:
        self.index = PrefixIndex()
        self.loads: list[tuple[MemberKey, Load]] = []
        self.cleared = 0
        self.loop = Loop()
        self.sockets = Sockets()
        settings = EngineSettings(
            "sglang", "127.0.0.1", publisher.port, "p", replay=publisher.replay_port, load=publisher.load_port
        )
        self.counts: Counter[str] = Counter()
        self.feed = EngineFeed(
            self.loop, self.sockets, settings, self._changed, lambda *load: self.loads.append(load), self.counts
        )

    def _changed(self, key: MemberKey, changes: Changes) -> None:
        assert key == ("p", 0)
        for change in changes:
            if isinstance(change, Stored):
                self.index.stored(0, change.hashes)
            elif isinstance(change, Cleared):
                self.cleared += 1
                self.index.forget(0)
            else:
                self.index.removed(0, change.hashes)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        waker = self.loop.call_every(0.05, lambda: None)
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            self.loop.turn()
        waker.cancel()

    def close(self) -> None:
        self.feed.close()
        self.loop.close()
        self.sockets.close()


@pytest.fixture
def pair() -> Iterator[tuple[Publisher, Followed]]:
    publisher = Publisher()
    followed = Followed(publisher)
    publisher.await_subscriber()
    yield publisher, followed
    followed.close()
    publisher.close()


def test_an_engine_that_loses_messages_and_restarts(pair: tuple[Publisher, Followed]) -> None:
    publisher, followed = pair
    tokens = list(range(40))
    ours = block_hashes(tokens, SIZE)
    publisher.stored(tokens[:16], None, 1000)
    followed.until(lambda: hits(followed.index, ours) == {0: 4})
    publisher.stored(tokens[16:24], 1003, 1004, lose=True)
    publisher.stored(tokens[24:32], 1005, 1006, lose=True)
    publisher.stored(tokens[32:40], 1007, 1008)
    followed.until(lambda: hits(followed.index, ours) == {0: 10})
    assert publisher.asked == [1]
    assert followed.cleared == 0
    publisher.event({"type": "BlockRemoved", "block_hashes": [1009], "medium": "GPU"})
    followed.until(lambda: hits(followed.index, ours) == {0: 9})
    publisher.log.clear()  # a restart: numbers begin again, the cache is empty
    publisher.stored(tokens[:8], None, 7)
    followed.until(lambda: followed.cleared == 1)
    followed.until(lambda: hits(followed.index, ours) == {0: 2})
    publisher.event({"type": "AllBlocksCleared"})
    followed.until(lambda: hits(followed.index, ours) == {})


def test_a_history_missed_before_it_was_followed_is_fetched(pair: tuple[Publisher, Followed]) -> None:
    publisher, followed = pair
    tokens = list(range(16))
    publisher.stored(tokens[:12], None, 1, lose=True)
    publisher.stored(tokens[12:], 3, 4)
    followed.until(lambda: hits(followed.index, block_hashes(tokens, SIZE)) == {0: 4})
    assert publisher.asked == [0]


def test_loads_and_rubbish(pair: tuple[Publisher, Followed]) -> None:
    publisher, followed = pair
    rubbish: list[list[bytes]] = [[b"x"], [b"t", b"short", b""], [b"t", (0).to_bytes(8, "big"), b"\xc1"]]
    for frames in rubbish:
        publisher.pub.send_multipart(frames)
        publisher.load.send_multipart([b"load", *frames])
    stat = ["LoadStat", 3, 2, 4096, 65536, 0, 1500, 6000, 64, 1, 2]
    publisher.load.send_multipart([b"load", (5).to_bytes(8, "big"), pack(stat)])
    followed.until(lambda: bool(followed.loads))
    key, load = followed.loads[0]
    assert key == ("p", 0)
    assert (load.running, load.waiting, load.waiting_tokens) == (3, 2, 1500)
    tokens = list(range(8))
    publisher.log.append(b"\xc1")
    publisher.stored(tokens, None, 1)
    followed.until(lambda: hits(followed.index, block_hashes(tokens, SIZE)) == {0: 2})
    assert {"rejected_frames", "rejected_syntax"} <= set(followed.counts)


def test_our_nodes_publish_and_the_controller_uses_it(pdbus_cluster: Any) -> None:
    """The client hashes by itself; events of both blocks and shape arrive on the bus; one rank gets all that share."""
    cluster = pdbus_cluster(prefill=2, decode=1, prefill_method="cache_aware", decode_method="total_requests",
                            node_args=("--sim-timing", "zero"))  # fmt: skip
    prompt = [3 + n % 500 for n in range(40 * 16)]
    with Sockets() as sockets, cluster.client() as client:
        events = sockets.sub(BusAddress(cluster.bus).subscribe, (b"kv/",))
        seen: set[object] = set()
        deadline = time.monotonic() + DEADLINE_S
        turn = 0
        while not seen:  # until the subscription is there; each prompt is new to the caches
            assert time.monotonic() < deadline, "no KV events came"
            turn += 1
            first = [3 + turn, *prompt[1:]]
            assert client.generate_tokens(first, max_tokens=2).result.finish == "length"
            while events.poll(100):
                frames = events.recv_multipart()
                assert frames[0] in (b"kv/prefill-0/0/", b"kv/prefill-0/1/")
                assert split_frames(frames)[0] >= 0
                for event in parse_batch(frames[2]).events:
                    assert isinstance(event, BlockStored)
                    seen.update(event.hashes)
        assert seen >= set(block_hashes(first, 16)[:39])
        ranks, deadline = set(), time.monotonic() + DEADLINE_S
        for number in range(6):
            while any(rank.estimate_tokens for rank in client.status().ranks):  # what is on its way counts as queued
                assert time.monotonic() < deadline
                time.sleep(0.01)
            result = client.generate_tokens([*first, 7 + number], max_tokens=2).result
            assert result.prefill is not None
            ranks.add(result.prefill.dp_rank)
        assert len(ranks) == 1  # total_tokens would have rotated
        assert client.status().counts["prefix_blocks"] >= 40
