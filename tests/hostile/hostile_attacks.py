"""The attacks: each is a function of the endpoints under attack, bounded in time, bytes and connections, run in a
process of its own (`python hostile_attacks.py NAME`, the endpoints as JSON on stdin). Nothing leaves this machine.

An attack only attacks; whether it did harm is judged by who runs it.
"""

from __future__ import annotations

import json
import os
import random
import socket as unix
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeAlias

from raw_zmtp import GREETING, MORE, connect, frame, greet, pour, ready

from bus.wire import codec
from bus.wire.messages import BrokerStatusQuery, StatusQuery

Ports: TypeAlias = dict[str, str]  # publish, subscribe, bootstrap, clients, nodes, and data ports by instance
UNSEEDED = 0x6B8B4567  # what libzmq's counter of routing ids starts from while nobody calls srand
ROUTERS = ("bootstrap", "clients", "nodes")


def _routers(ports: Ports) -> list[str]:
    return [endpoint for name, endpoint in ports.items() if name in ROUTERS or name.startswith("data")]


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
            with suppress(OSError), greet(endpoint, timeout_s=2.0) as peer:
                peer.sendall(struct.pack(">BQ", 2, 200 << 20))
                pour(peer, bytes(1 << 20), 199)


def idle_connections(ports: Ports) -> None:
    """Five hundred connections to each port, half of them greeted, held for two seconds."""
    with ExitStack() as held:
        for endpoint in ports.values():
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


def noise(ports: Ports) -> None:
    """Random greetings, commands, flags and sizes on every port, for two seconds."""
    rng = random.Random(int.from_bytes(os.urandom(4)))
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        for endpoint in ports.values():
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


ATTACKS: dict[str, Callable[[Ports], None]] = {
    each.__name__: each
    for each in (
        claimed_ids, long_topic, subscriptions, endless_message, empty_frames, full_queue_and_gone, huge_frame,
        idle_connections, connection_storm, unread_status, noise,
    )
}  # fmt: skip

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](json.load(sys.stdin))
