"""The processes of `rooms` on our side: one that publishes registrations, one that watches and asks. (A
room is the number of a request; its registration tells the broker which rank prefills it.)

Both use the cores that nodes use on their own loop (`bus.embed.publications`, `bus.embed.resolution`) where one room's
way is timed; registrations in bulk are encoded beforehand, so that the broker is what is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import zmq

from benchmarks.child import Parent
from bus.broker.rooms import Owner, RoomTable
from bus.broker.shell import BEHIND_TICK_S, TICK_S
from bus.embed.publications import PublisherCore
from bus.embed.resolution import Resolved, ResolverCore
from bus.endpoints import BusAddress
from bus.runtime.epochs import new_epoch
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    FROM_BROKER,
    MAX_ROOM,
    Answer,
    BrokerStatus,
    BrokerStatusQuery,
    Location,
    Member,
    Message,
    Query,
    Registration,
    Rooms,
)

INSTANCE = "prefill-bench"
RANKS = 8  # publishers of the bulk
BATCH = 256
REGISTRATIONS_PER_S = 200_000
WAIT_S = 60.0


def room_number(index: int) -> int:
    """Return the room for an index: distinct numbers that look random, as bootstrap rooms do."""
    return index * 0x9E3779B97F4A7C15 & MAX_ROOM


def publisher(parent: Parent, bus: str) -> None:
    """Run the process that publishes registrations. A command's `do` is `bulk` or `paced` of `_Publisher`, the rest are
    its arguments."""
    address = BusAddress(bus)
    with Sockets() as sockets:
        one = _Publisher(sockets.pub(address.publish), sockets.dealer(address.bootstrap))
        doings: dict[str, Callable[..., Any]] = {"bulk": one.bulk, "paced": one.paced}
        parent.serve(lambda do, **settings: doings[do](**settings))


class _Publisher:
    def __init__(self, pub: Socket, dealer: Socket) -> None:
        self._pub, self._dealer = pub, dealer
        self._epochs = [new_epoch() for _ in range(RANKS)]
        self._seqs = [0] * RANKS
        self._core = PublisherCore(
            instance="prefill-one", dp_rank=0, epoch=new_epoch(), role="prefill", model="bench", dp_size=1,
            endpoint="ipc:///run/user/1000/pdbus/prefill-one-0", interval_s=3600.0,
        )  # fmt: skip

    def bulk(self, first: int, count: int, batch: int) -> dict[str, float]:
        """Register `count` rooms, spread over RANKS publishers; seconds until the broker holds them all."""
        frames = []
        for number, at in enumerate(range(first, first + count, batch)):
            rank = number % RANKS
            self._seqs[rank] += 1
            claims = tuple(Registration(room_number(index)) for index in range(at, min(at + batch, first + count)))
            message = Rooms(INSTANCE, rank, self._epochs[rank], self._seqs[rank], None, _endpoint(rank), claims)
            frames.append((topics.of(message), codec.encode(message)))
        if not first:
            self._announce()
        goal = self._count("rooms_held") + count
        began = time.perf_counter()
        for topic, frame in frames:
            self._pub.send_multipart((topic, frame))
        while (held := self._count("rooms_held")) < goal:
            if time.perf_counter() - began > WAIT_S:
                raise TimeoutError(f"the broker holds {held} of {goal} rooms")
            time.sleep(0.01)
        return {"elapsed_s": time.perf_counter() - began}

    def paced(self, first: int, count: int, rate: float) -> list[int]:
        """Register `count` rooms, one each 1/`rate` s; when, in nanoseconds."""
        stamps: list[int] = []
        began = time.perf_counter()
        for index in range(first, first + count):
            time.sleep(max(0.0, began + len(stamps) / rate - time.perf_counter()))
            stamps.append(time.monotonic_ns())
            now = time.monotonic()
            for action in [*self._core.register(room_number(index), 1, now), *self._core.flush(now)]:
                self._pub.send_multipart((topics.of(action.message), codec.encode(action.message)))
        return stamps

    def _announce(self) -> None:
        """Wait until the broker knows all ranks: what a PUB socket sends before it is connected is lost."""
        seq = 0
        while self._count("ranks") < RANKS:
            seq += 1
            for rank, epoch in enumerate(self._epochs):
                member = Member(
                    INSTANCE, rank, epoch, seq, None, "prefill", "bench", RANKS, "ready", _endpoint(rank),
                    follow_bootstrap_room=False, rooms_seq=0, interval_s=3600.0,
                )  # fmt: skip
                self._pub.send_multipart((topics.of(member), codec.encode(member)))
            time.sleep(0.02)

    def _count(self, name: str) -> int:
        return count_of(self._dealer, name)


def _endpoint(rank: int) -> str:
    return f"ipc:///run/user/1000/pdbus/{INSTANCE}-{rank}"


def watcher(parent: Parent, bus: str) -> None:
    """Run the process that watches for rooms and asks the broker. A command's `do` is a method of `_Watcher`, the rest
    are its arguments."""
    with Sockets() as sockets:
        one = _Watcher(sockets.dealer(BusAddress(bus).bootstrap))
        doings: dict[str, Callable[..., Any]] = {
            "watch": one.watch,
            "collect": one.collect,
            "ask_batches": one.ask_batches,
            "probe": one.probe,
            "count": one.count,
        }
        parent.serve(lambda do, **settings: doings[do](**settings))


class _Watcher:
    def __init__(self, dealer: Socket) -> None:
        self._dealer = dealer
        self._core = ResolverCore()
        self._settled: dict[int, int] = {}  # room -> when, in nanoseconds

    def watch(self, first: int, count: int) -> int:
        """Want rooms that no rank has registered; return how many the broker watches."""
        now = time.monotonic()
        for index in range(first, first + count):
            self._core.want(room_number(index), now, deadline_s=WAIT_S)
        self._send(self._core.flush(now))
        answer = receive(self._dealer)
        while not isinstance(answer, Answer):
            self._core.on_message(answer, time.monotonic())
            answer = receive(self._dealer)
        return len(answer.pending)

    def collect(self, first: int, count: int) -> list[int]:
        """Wait for all of them; when each was known, in nanoseconds."""
        while len(self._settled) < count:
            actions = self._core.on_message(receive(self._dealer), time.monotonic())
            at = time.monotonic_ns()
            self._settled.update((action.room, at) for action in actions if isinstance(action, Resolved))
        stamps = [self._settled[room_number(index)] for index in range(first, first + count)]
        self._settled.clear()
        self._send(self._core.flush(time.monotonic()))
        return stamps

    def ask_batches(self, batch: int, count: int, live: int) -> list[float]:
        """Seconds from the encoding of a query to its decoded answer; rooms are drawn evenly from `live` ones."""
        times = []
        stride = max(1, live // (batch * count))
        for number in range(count):
            rooms = tuple(room_number((number * batch + i) * stride % live) for i in range(batch))
            began = time.perf_counter()
            answer = ask(self._dealer, Query(number, rooms))
            times.append(time.perf_counter() - began)
            assert isinstance(answer, Answer)
            assert sum(len(found.rooms) for found in answer.found) == batch, (batch, live)
        return times

    def probe(self, seconds: float, gap_s: float) -> list[float]:
        """Round trips of one-room queries for so long."""
        times = []
        deadline = time.perf_counter() + seconds
        while (began := time.perf_counter()) < deadline:
            ask(self._dealer, Query(1, (0,)))
            times.append(time.perf_counter() - began)
            time.sleep(gap_s)
        return times

    def count(self, name: str) -> int:
        """One of the broker's counts."""
        return count_of(self._dealer, name)

    def _send(self, actions: list[Any]) -> None:
        for action in actions:
            send(self._dealer, action.message)


def send(dealer: Socket, message: Message) -> None:
    """Send a message to the broker, without waiting."""
    dealer.send_multipart((b"", codec.encode(message)))


def receive(dealer: Socket) -> Message:
    """Wait for the broker's next message. Raises TimeoutError after WAIT_S."""
    if not dealer.poll(int(WAIT_S * 1000), zmq.POLLIN):
        raise TimeoutError("the broker does not answer")
    return codec.decode(dealer.recv_multipart()[-1], FROM_BROKER)


def ask(dealer: Socket, message: Message) -> Message:
    """Send a message, and wait for and return the broker's next message. Raises TimeoutError after WAIT_S."""
    send(dealer, message)
    return receive(dealer)


def count_of(dealer: Socket, name: str) -> int:
    """Ask the broker for one of its counts, by name."""
    status = ask(dealer, BrokerStatusQuery(1))
    assert isinstance(status, BrokerStatus)
    return status.counts[name]


def expiry_turns(rooms: int, ttl_s: float = 12.0) -> list[float]:
    """Return the CPU seconds of each turn of the broker's sweep while `rooms` rooms expire, in virtual time in this
    process."""
    table = RoomTable(ttl_s)
    owners = [Owner(Location(INSTANCE, rank, 1, _endpoint(rank))) for rank in range(RANKS)]
    for index in range(rooms):
        table.register(owners[index // BATCH % RANKS], room_number(index), 1, index / REGISTRATIONS_PER_S)
    now, turns = ttl_s, []
    gc.freeze()  # as a broker's process does when it is ready
    while table.size:
        now += BEHIND_TICK_S if table.behind else TICK_S
        began = time.thread_time()
        table.expire(now)
        turns.append(time.thread_time() - began)
    return turns
