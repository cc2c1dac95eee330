"""The processes of the `controllers` benchmark: nodes with thousands of ranks at work, and a controller that counts.
The nodes are those of `benchmarks.node`, but each load report is a new one, and costs this machine as little as it can.

Five loads, every fifth of them with the membership, were encoded beforehand: only their numbers change. A thread of
its own publishes them, since a loop that polls hundreds of connections has no time for it.
"""

from __future__ import annotations

import itertools
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import structs

from benchmarks import node
from benchmarks.child import Parent
from bus.runtime import frames
from bus.runtime.loop import Loop
from bus.wire import codec, topics
from bus.wire.messages import Ack, Load, Message
from controller.config import ControllerConfig
from controller.shell import Controller

MEMBER_EVERY = 5  # publications, at 20 a second
NUMBER = 1 << 61  # before the first load's; MessagePack writes those that follow in eight bytes too
LEASE_S = 30.0
_EIGHT = struct.Struct(">Q")


def ours(parent: Parent, **settings: Any) -> None:
    """Run a node process of such ranks; `settings` are those of `node.ours`."""
    node.ours(parent, make=Busy, reporting=_by_thread, **settings)


class Counting(Controller):
    """A controller that counts, in `read`, the publications that it has read."""

    read = 0

    def _open(self, exits: ExitStack) -> None:
        super()._open(exits)
        self.loop.remove(self._sub)
        self.loop.add(self._sub, self._published, budget=512)

    def _published(self, frames: list[bytes]) -> None:
        self.read += 1
        self._traffic.published(frames)


def controller(parent: Parent, bus: str, address: str) -> None:
    """Run a controller at `address` on the bus `bus`, with a long lease, because its ranks share a few cores. Each
    command of the parent is answered with the number of publications read."""
    config = ControllerConfig(bus=bus, controller=address, unified_method="total_tokens", lease_s=LEASE_S)
    with Counting(config) as running:
        parent.serve(lambda: running.read)


class Busy(node.Rank):
    """One rank, whose reports were encoded beforehand. `report` belongs to the thread that publishes."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        load = Load(
            seq=0, step=NUMBER, running=1, waiting=0, waiting_tokens=0, kv_tokens=1_000, kv_capacity=node.KV_TOKENS,
            max_running=node.MANY,
        )  # fmt: skip
        publisher, now = self._publisher, self._clock()
        publisher.report(load, now)
        publications = publisher.tick(now)  # the membership
        publisher.report(structs.replace(load, step=0), now)  # something else
        publications += publisher.tick(now + 2 * publisher.report_gap_s)  # one gap later may be an ulp too early
        member, report = [structs.replace(each.message, seq=NUMBER) for each in publications]
        self._messages = [_other(each, at) for at, each in enumerate([member, *[report] * (MEMBER_EVERY - 1)])]
        self._acks: tuple[Ack, ...] | None = None

    def report(self) -> None:
        """Publish the next report: another load each time, and each fifth time the membership too."""
        if self._acks != self._reports.acks:
            self._acks = self._reports.acks
            self._prepared = [prepared(_with(message, self._acks)) for message in self._messages]
        topic, frame, places = self._prepared[self.published % MEMBER_EVERY]
        self.published += 1
        for place in places:
            _EIGHT.pack_into(frame, place, NUMBER + self.published)
        frames.send(self._pub, (topic, bytes(frame)))

    def steps(self) -> tuple[int, bool, int]:
        """Return step, true (it computes) and the load's number, for a pong to the controller."""
        number = NUMBER + self.published
        return number, True, number


def _other(message: Any, at: int) -> Message:
    load = structs.replace(message.load, running=at + 1, kv_tokens=1_000 * (at + 1))
    changed: Message = structs.replace(message, load=load)
    return changed


def _with(message: Any, acks: tuple[Ack, ...]) -> Message:
    load = structs.replace(message.load, seq=NUMBER, step=NUMBER, acks=acks)
    changed: Message = structs.replace(message, load=load)
    return changed


def prepared(message: Message) -> tuple[bytes, bytearray, list[int]]:
    """Return topic, encoded frame, and the offsets of NUMBER in it."""
    frame = codec.encode(message)
    number = re.escape(_EIGHT.pack(NUMBER))
    return topics.of(message), bytearray(frame), [found.start() for found in re.finditer(number, frame)]


@contextmanager
def _by_thread(loop: Loop, ranks: Sequence[node.Rank], report_hz: float) -> Iterator[None]:
    """Send evenly. A late process sends at once, but makes up for one interval at most."""
    over = threading.Event()

    def publish() -> None:
        due = time.monotonic()
        for rank in itertools.cycle(ranks):
            now = time.monotonic()
            if due > now and over.wait(due - now):
                return
            rank.report()
            due = max(due, now - 1 / report_hz) + 1 / report_hz / len(ranks)

    thread = threading.Thread(target=publish, name="reports")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
