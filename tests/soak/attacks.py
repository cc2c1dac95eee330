"""The attacks: each is a function of the endpoints under attack, bounded in time, bytes and connections, run in a
process of its own (`attack.py NAME`, the endpoints as JSON on stdin). Nothing leaves this machine.

An attack only attacks; whether it did harm is judged by who runs it. Those of outsiders write ZMTP byte by byte and
have no key; INSIDERS are peers like any other, with the key of a client or of a node where there are keys.
"""

from __future__ import annotations

import os
import random
import socket as unix
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import zmq
from msgspec.structs import replace

from bus.endpoints import split_owner
from bus.rights import KeyRole
from bus.runtime.keys import load_keys
from bus.runtime.sockets import Socket, Sockets
from bus.wire import codec, topics
from bus.wire.messages import (
    PUBLICATIONS,
    Attach,
    Beacon,
    BrokerStatusQuery,
    Load,
    LoadReport,
    Params,
    Sent,
    SentTo,
    StatusQuery,
    Submit,
)
from soak.raw_zmtp import GREETING, MORE, connect, frame, greet, pour, ready

# publish, subscribe, bootstrap, clients, nodes; `data INSTANCE/DP_RANK`, and `epoch INSTANCE/DP_RANK` of each rank;
# `keys`: a directory with a client's and a node's keys, in the folders `clients` and `nodes`
Ports: TypeAlias = dict[str, str]
UNSEEDED = 0x6B8B4567  # what libzmq's counter of routing ids starts from while nobody calls srand
ROUTERS = ("bootstrap", "clients", "nodes")


def _routers(ports: Ports) -> list[str]:
    data = [split_owner(endpoint)[0] for name, endpoint in ports.items() if name.startswith("data")]
    return [*(ports[name] for name in ROUTERS), *data]


def _all(ports: Ports) -> list[str]:
    return [*_routers(ports), ports["publish"], ports["subscribe"]]


def claimed_ids(ports: Ports) -> None:
    """Claim the ids that an unseeded ROUTER gives out next, then connect until its counter comes to them."""
    for endpoint in _routers(ports):
        with ExitStack() as held:
            for number in range(20, 120, 5):
                with suppress(OSError):
                    held.enter_context(greet(endpoint, identity=b"\0" + struct.pack(">I", UNSEEDED + number)))
            for _ in range(150):
                with suppress(OSError):
                    greet(endpoint).close()


def long_topic(ports: Ports) -> None:
    """Subscribe to 200,000 bytes, and leave: to take that back, libzmq recurses once a byte."""
    for kind, endpoint in ((b"SUB", ports["subscribe"]), (b"XPUB", ports["publish"])):
        with suppress(OSError):
            peer = greet(endpoint, kind)
            pour(peer, frame(b"\1" + b"x" * 200_000), 1)
            time.sleep(0.2)  # for it to be taken in before the connection goes
            peer.close()


def subscriptions(ports: Ports) -> None:
    """24 MB of subscriptions under prefixes known and unknown, held for two seconds."""
    rng = random.Random(1)
    with ExitStack() as held:
        for prefix in (b"to/", b"", b"member/"):
            with suppress(OSError):
                peer = held.enter_context(greet(ports["subscribe"], b"SUB", timeout_s=2.0))
                for _ in range(80):
                    batch = b"".join(frame(b"\1" + prefix + rng.randbytes(240)) for _ in range(400))
                    if not pour(peer, batch, 1):
                        break
        time.sleep(2.0)


def endless_message(ports: Ports) -> None:
    """Frames that promise another one, without end: 48 MB of small ones to each port, never a whole message."""
    with ExitStack() as held:
        for endpoint in (*_routers(ports), ports["publish"]):
            kind = b"PUB" if endpoint == ports["publish"] else b"DEALER"
            with suppress(OSError):
                peer = held.enter_context(greet(endpoint, kind, timeout_s=2.0))
                pour(peer, frame(b"x" * 1000, MORE) * 64, 750)
        time.sleep(1.0)


def empty_frames(ports: Ports) -> None:
    """One message of a million empty frames to each ROUTER: whole at last, so it is read."""
    for endpoint in _routers(ports):
        with suppress(OSError):
            peer = greet(endpoint, timeout_s=5.0)
            pour(peer, frame(b"", MORE) * 10_000, 100)
            pour(peer, frame(b""), 1)
            time.sleep(0.5)
            peer.close()


def full_queue_and_gone(ports: Ports) -> None:
    """Pour in more than is read, and leave with a RST: over tcp libzmq aborts when it then comes to ping that peer."""
    with ExitStack() as held:
        for endpoint in _routers(ports):  # half a million frames to read, and nothing else meanwhile
            with suppress(OSError):
                busy = held.enter_context(greet(endpoint))
                pour(busy, frame(b"", MORE) * 10_000, 50)
                pour(busy, frame(b""), 1)
        for endpoint in _routers(ports) * 4:
            with suppress(OSError), greet(endpoint, timeout_s=0.3) as peer:
                pour(peer, frame(b"x") * 1000, 200)
                if endpoint.startswith("tcp:"):
                    peer.setsockopt(unix.SOL_SOCKET, unix.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(2.0)


def huge_frame(ports: Ports) -> None:
    """A frame of 200 MiB to the nodes' data ports, where a few hundred bytes are legal."""
    for name, endpoint in ports.items():
        if name.startswith("data"):
            with suppress(OSError), greet(split_owner(endpoint)[0], timeout_s=2.0) as peer:
                peer.sendall(struct.pack(">BQ", 2, 200 << 20))
                pour(peer, bytes(1 << 20), 199)


def idle_connections(ports: Ports) -> None:
    """Five hundred connections to each port, half of them greeted, held for two seconds."""
    with ExitStack() as held:
        for endpoint in _all(ports):
            for number in range(500):
                with suppress(OSError):
                    peer = held.enter_context(connect(endpoint, 0.5))
                    if number % 2:
                        peer.sendall(GREETING)
        time.sleep(2.0)


def connection_storm(ports: Ports) -> None:
    """Connect, greet, leave, as fast as one process can, for three seconds."""
    until = time.monotonic() + 3.0
    endpoints = _routers(ports)
    while time.monotonic() < until:
        for endpoint in endpoints:
            with suppress(OSError), connect(endpoint, 0.5) as peer:
                peer.sendall(GREETING + ready(b"DEALER"))


def unread_status(ports: Ports) -> None:
    """Ask for the status 20,000 times at controller and broker, and read no answer."""
    with ExitStack() as held:
        for name, query, envelope in (
            ("clients", StatusQuery(1), b""),
            ("bootstrap", BrokerStatusQuery(1), frame(b"", MORE)),
        ):
            with suppress(OSError):
                peer = held.enter_context(greet(ports[name], timeout_s=2.0))
                pour(peer, (envelope + frame(codec.encode(query))) * 100, 200)
        time.sleep(2.0)


def unread_publications(ports: Ports) -> None:
    """Publish 64 MiB to oneself, 1 MiB at a time, and read nothing of it, for three seconds."""
    topic = topics.KV + b"mallory/0/"
    with ExitStack() as held, suppress(OSError):
        listener = held.enter_context(greet(ports["subscribe"], b"SUB", timeout_s=2.0))
        listener.sendall(frame(b"\1" + topic))
        speaker = held.enter_context(greet(ports["publish"], b"PUB", timeout_s=2.0))
        time.sleep(0.2)  # for the subscription to be taken in
        pour(speaker, frame(topic, MORE) + frame(bytes((1 << 20) - 1)), 64)
        time.sleep(3.0)


def noise(ports: Ports) -> None:
    """Random greetings, commands, flags and sizes on every port, for two seconds."""
    rng = random.Random(int.from_bytes(os.urandom(4)))
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        for endpoint in _all(ports):
            kind = rng.choice((b"DEALER", b"REQ", b"SUB", b"XSUB", b"PUB", b"PAIR", rng.randbytes(5)))
            start = rng.choice((b"", GREETING[: rng.randrange(64)], GREETING, GREETING + ready(kind, rng.randbytes(9))))
            body = b"".join(
                rng.choice(
                    (
                        frame(rng.randbytes(rng.randrange(300)), rng.randrange(8)),
                        bytes((rng.randrange(256), rng.randrange(256))) + rng.randbytes(rng.randrange(64)),
                        struct.pack(">BQ", rng.randrange(256), rng.getrandbits(64)),
                    )
                )
                for _ in range(rng.randrange(30))
            )
            with suppress(OSError), connect(endpoint, 0.5) as peer:
                peer.sendall(start + body)


# --- insiders -------------------------------------------------------------------------------------------------------


@contextmanager
def insider(ports: Ports, role: KeyRole) -> Iterator[Sockets]:
    keys = ports.get("keys", "")
    with Sockets(keys=load_keys(Path(keys) / role, role) if keys else None) as sockets:
        yield sockets


def told(socket: Socket, frames: list[bytes]) -> None:
    with suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK)


def vanishing_clients(ports: Ports) -> None:
    """Forty clients, each of which submits ten long requests of the highest priority and leaves."""
    prompt, params = b"\3\0\0\0" * 200, codec.encode(Params())
    for number in range(40):
        with insider(ports, "clients") as sockets:
            controller = sockets.dealer(ports["clients"], role="controllers")
            for each in range(10):
                room = random.getrandbits(62)
                submit = Submit(f"v{number}-{each}-{room}", "pair", 200, 2000, room, priority=1000)
                told(controller, [codec.encode(submit), prompt, params])
            time.sleep(0.05)  # for it to leave


def attach_flood(ports: Ports) -> None:
    """Attach to requests that nobody runs, over four connections to each data port, for three seconds."""
    data = [endpoint for name, endpoint in ports.items() if name.startswith("data")]
    until = time.monotonic() + 3.0
    with insider(ports, "clients") as sockets:
        dealers = [sockets.dealer(endpoint, role="nodes") for endpoint in data * 4]
        while time.monotonic() < until:
            for dealer in dealers:
                for _ in range(100):
                    told(dealer, [codec.encode(Attach(f"{random.getrandbits(64):016x}", 1))])
                while dealer.poll(0):
                    dealer.recv_multipart()


def valid_megabytes(ports: Ports) -> None:
    """Submits whose headers are as large as they may be, for three seconds over four connections."""
    submit = Submit("big", "unified", 1, 1, model="nobody's", block_tokens=1, block_hashes=bytes(1 << 19))
    frames = [codec.encode(submit), b"\3\0\0\0", codec.encode(Params())]
    until = time.monotonic() + 3.0
    with insider(ports, "clients") as sockets:
        dealers = [sockets.dealer(ports["clients"], role="controllers", hwm=20) for _ in range(4)]
        while time.monotonic() < until:
            for dealer in dealers:
                told(dealer, frames)
                while dealer.poll(0):
                    dealer.recv_multipart()
            time.sleep(0.001)


def forged_publications(ports: Ports) -> None:
    """Loads of every rank, with a seq that it will never reach and with the one that comes next, beacons of other
    brokers, and 64 controllers that have sent it thousands of requests; for three seconds, with a node's key."""
    ranks = {
        (instance, int(number)): int(ports.get(f"epoch {instance}/{number}", "1"))
        for name in ports
        if name.startswith("data ")
        for instance, _, number in (name.removeprefix("data ").rpartition("/"),)
    }
    seqs = dict.fromkeys(ranks, 0)  # heard
    load = Load(
        seq=0, step=2**40, running=2**30, waiting=2**30, waiting_tokens=2**40, kv_tokens=2**40,
        kv_capacity=1, max_running=1,
    )  # fmt: skip
    until = time.monotonic() + 3.0
    with insider(ports, "nodes") as sockets:
        pub, sub = sockets.pub(ports["publish"]), sockets.sub(ports["subscribe"], (topics.LOAD,))
        while time.monotonic() < until:
            while sub.poll(0):
                heard = codec.decode(sub.recv_multipart()[1], PUBLICATIONS)
                if isinstance(heard, LoadReport) and heard.seq != 2**63 - 1:
                    seqs[heard.instance, heard.dp_rank] = heard.load.seq
            for (instance, number), started in ranks.items():
                for epoch, seq in ((1, 2**63 - 1), (started, 2**63 - 1), (started, seqs[instance, number] + 1)):
                    report = LoadReport(instance, number, epoch, 2**63 - 1, replace(load, seq=seq))
                    told(pub, [topics.of(report), codec.encode(report)])
            counters = tuple(SentTo(*rank, epoch, 2**30, 2**40) for rank, epoch in ranks.items())
            for number in range(64):
                sent = Sent(f"c{number}", 10_000 + number, int(1e6 * time.monotonic()), counters)
                told(pub, [topics.of(sent), codec.encode(sent)])
            beacon = Beacon(random.getrandbits(60) + 1, 1, 0.1)
            told(pub, [topics.of(beacon), codec.encode(beacon)])
            time.sleep(0.02)


OUTSIDERS: dict[str, Callable[[Ports], None]] = {
    each.__name__: each
    for each in (
        claimed_ids, long_topic, subscriptions, endless_message, empty_frames, full_queue_and_gone, huge_frame,
        idle_connections, connection_storm, unread_status, unread_publications, noise,
    )
}  # fmt: skip
INSIDERS: dict[str, Callable[[Ports], None]] = {
    each.__name__: each for each in (vanishing_clients, attach_flood, valid_megabytes, forged_publications)
}
ATTACKS = OUTSIDERS | INSIDERS
