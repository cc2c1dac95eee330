"""Nothing that arrives on a socket hurts a process: raw tcp bytes, garbage and truncated frames, versions, floods."""

from __future__ import annotations

import random
import socket as unix
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq
from fault_rig import Rig, rig
from soak.usage import usage_of

from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.sockets import DATA_MAX, HEADER_MAX, PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec, topics
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    FROM_NODE_DATA,
    Accepted,
    Answer,
    Attach,
    BrokerStatusQuery,
    Bye,
    CancelLeg,
    Dispatch,
    Done,
    DrainRank,
    Ended,
    Hello,
    KvDone,
    KvPull,
    LoadReport,
    Member,
    Message,
    Params,
    Progress,
    Query,
    Registration,
    Resync,
    Rooms,
    StatusQuery,
    Submit,
    Tokens,
    Unwatch,
    Welcome,
)
from nodes.own.engines.sim import sim_generate
from pdbus.launcher import Cluster, ClusterSpec

pytestmark = pytest.mark.fault
BIG = 2**63 - 1
QUICK = ("--sim-base-s", "0.002", "--sim-prefill-s-per-token", "0.0001")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(
        prefill=1, decode=1, engine="sim", model="sim", transport="tcp", node_args=QUICK,
    )  # fmt: skip
    with Cluster(spec) as running:
        yield running


@pytest.fixture
def live(cluster: Cluster) -> Iterator[Rig]:
    with rig(cluster) as made:
        yield made
        made.ended(made.begin(60))  # whatever was done to it, it serves
        made.check()
        assert not cluster.poll()


def ports(live: Rig) -> dict[str, str]:
    """Every socket that somebody binds, by name."""
    bus, controller = BusAddress(live.cluster.bus), ControllerAddress(live.cluster.controller)
    found = {"publish": bus.publish, "subscribe": bus.subscribe, "bootstrap": bus.bootstrap}
    found |= {"clients": controller.clients, "nodes": controller.nodes}
    ranks = {rank.role: rank.endpoint for rank in live.status().ranks}
    return found | {"prefill data": ranks["prefill"], "decode data": ranks["decode"]}


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 16 + b"\0" + b"\0" * 31  # ZMTP 3.0, 64 bytes
READY = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
RAW = {
    "nothing": b"",
    "http": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    "zeros": b"\0" * 4096,
    "noise": random.Random(1).randbytes(65536),
    "half a greeting": GREETING[:20],
    "an old version": b"\xff\0\0\0\0\0\0\0\1\x7f\1\5" + b"\0" * 52,
    "another mechanism": GREETING.replace(b"NULL", b"EVIL"),
    "a greeting and noise": GREETING + random.Random(2).randbytes(4096),
    "a frame of an exabyte": GREETING + READY + b"\x02" + struct.pack(">Q", 2**60) + b"x" * 4096,
    "a frame above the limit": GREETING + READY + b"\x02" + struct.pack(">Q", 2**29) + b"x" * 4096,
    "an endless message": GREETING + READY + b"\x01\x01x" * 4096,
    "bad command": GREETING + b"\x04\xff" + b"R" * 255,
}


@pytest.mark.parametrize("name", list(RAW))
def test_raw_tcp_bytes_on_every_port(live: Rig, name: str) -> None:
    for endpoint in ports(live).values():
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        for half_closed in (True, False):
            with unix.create_connection((host, int(port)), timeout=30) as peer:
                try:
                    peer.sendall(RAW[name])
                    if half_closed:
                        peer.shutdown(unix.SHUT_WR)
                except OSError:
                    pass  # it hung up on us: fine


def test_many_half_open_connections_keep_nobody_out(live: Rig) -> None:
    """Connections that never finish their handshake; they are dropped after HANDSHAKE_IVL."""
    with ExitStack() as held:
        for endpoint in ports(live).values():
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for _ in range(100):
                peer = held.enter_context(unix.create_connection((host, int(port)), timeout=30))
                peer.sendall(GREETING[:11])
        live.ended(live.begin(60))


# One good message of each kind that some socket takes, with the most awkward values its fields allow.
TOPICS = (b"member/prefill-0/0/", b"load/", b"rooms/x/1/", b"beacon/", b"to/decode-0/0/", b"")
LOCATION_AT = "tcp://127.0.0.1:1"
SAMPLES: list[Message] = [
    Submit("x" * 128, "pair", -5, 0, bootstrap_room=BIG, routed_dp_rank=-(2**62), instance="\0", model="é" * 128),
    DrainRank(BIG, "nobody", 4095),
    StatusQuery(BIG),
    Hello(
        instance="evil", dp_rank=5, epoch=1, role="decode", model="sim", dp_size=1, state="ready",
        endpoint=LOCATION_AT, max_context=BIG, kv_capacity=BIG, max_running=BIG, block_tokens=BIG,
        running=(("a", 1),) * 2000,
    ),
    Progress("prefill-0", 0, 1, (("a", 1),) * 2000, (Ended("a", 1, "decode", "ok"),) * 2000),
    Bye("prefill-0", 0, 1),
    Query(BIG, tuple(range(4096)), 3600.0),
    Unwatch(tuple(range(4096))),
    BrokerStatusQuery(BIG),
    Attach("x", 1_000_000, BIG),
    KvPull(BIG, 1_000_000, BIG, BIG, 1024),
    KvDone(0, 1, "engine_failed"),
    Dispatch("r", 1, "decode", 0, 1, BIG, BIG, BIG, BIG, BIG, 0),
    CancelLeg("r", 1_000_000),
    Welcome("w", 1, True, 1e9, 0),
    Answer(BIG, (), tuple(range(4096))),
    Tokens("t", 1, BIG, tuple(range(4096)), "stop"),
    Done("t", 1, ()),
    Params(seed=BIG),
]  # fmt: skip


def awkward(rng: random.Random) -> Iterator[list[bytes]]:
    """Multipart messages, bad in every way we could think of."""
    for sample in SAMPLES:
        good = codec.encode(sample)
        yield [good]
        yield [good, b"", good]
        yield [b"", good]
        yield [b"\x02" + good[1:]]
        yield [bytes([255]) + good]
        for _ in range(6):
            yield [good[: rng.randrange(len(good))]]
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= rng.randrange(1, 256)
            yield [bytes(bad), rng.randbytes(rng.randrange(64))]
    yield [b""]
    yield [b"", b""]
    yield [b"\x01"]
    yield [b"x"] * 500
    yield [b"\x01\xdd\xff\xff\xff\xff"]  # an array of four billion
    yield [b"\x01" + b"\x91" * 100_000]  # as deep as it is long
    yield [b"\x01" + b"\x81" * 1000]
    yield [rng.randbytes(900_000)]
    for length in range(0, 200, 7):
        yield [b"\x01" + rng.randbytes(length)]


def everywhere(sockets: Sockets, live: Rig) -> Iterator[tuple[str, Socket, list[bytes]]]:
    for name, endpoint in ports(live).items():
        if name == "subscribe":
            continue
        prefix = [b""] if name == "bootstrap" else []
        socket = sockets.pub(endpoint) if name == "publish" else sockets.dealer(endpoint)
        yield name, socket, prefix


def test_bad_messages_on_every_socket(live: Rig) -> None:
    rng = random.Random(3)
    stream = live.begin(60, 200)
    live.got(stream, 1)
    with Sockets() as sockets:
        for name, socket, prefix in list(everywhere(sockets, live)):
            for frames in awkward(rng):
                if name == "publish":
                    frames = [rng.choice(TOPICS), *frames]
                try:
                    socket.send_multipart([*prefix, *frames], zmq.NOBLOCK)
                except zmq.Again:
                    break  # more than its queue takes
            if name not in ("publish",):
                socket.send_multipart([*prefix, codec.encode(StatusQuery(1))])
    live.ended(stream)
    for part in ("broker", "controller-0", "decode-0/0", "prefill-0/0"):
        log = live.cluster.log(part)
        assert "Traceback" not in log
        assert "message.rejected" in log or "publication.rejected" in log, part


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else(live: Rig) -> None:
    with Sockets() as sockets:
        for name, socket, prefix in list(everywhere(sockets, live)):
            limit = DATA_MAX if name.endswith("data") else PAYLOAD_MAX if name == "clients" else HEADER_MAX
            socket.send_multipart([*prefix, b"topic", bytes(limit + 1)])
        live.ended(live.begin(60))


def test_a_strangers_publications_under_others_names_change_nothing(live: Rig) -> None:
    """Loads, rooms and memberships under wrong topics or epochs: the rank keeps its place and its state."""
    live.until(lambda: all(rank.load is not None for rank in live.status().ranks), "all have reported")
    before = {rank.role: rank for rank in live.status().ranks}
    decode = before["decode"]
    with Sockets() as sockets:
        pub = sockets.pub(BusAddress(live.cluster.bus).publish)
        probe = sockets.sub(BusAddress(live.cluster.bus).subscribe, (b"sent/probe/",))
        heard = []

        def ready() -> bool:
            pub.send_multipart([b"sent/probe/", b"x"])
            if probe.poll(20):
                heard.append(probe.recv_multipart())
            return bool(heard)

        live.until(ready, "our publications arrive")
        assert decode.load is not None
        for epoch in (1, decode.epoch ^ 1):
            gone = Member("decode-0", 0, epoch, BIG, None, "decode", "sim", 1, "gone", LOCATION_AT, True, BIG, 0.1)
            load = LoadReport("decode-0", 0, epoch, BIG, decode.load)
            rooms = Rooms("prefill-0", 0, epoch, BIG, None, LOCATION_AT, tuple(map(Registration, range(4096))))
            for message in (gone, load, rooms, Resync("decode-0", 0, epoch)):
                pub.send_multipart([topics.of(message), codec.encode(message)])
                pub.send_multipart([b"load/decode-0/0/", codec.encode(message)])
        pub.send_multipart([b"sent/probe/", b"last"])
        live.until(lambda: probe.poll(20) and probe.recv_multipart()[1] == b"last", "they have passed the broker")
    rids = [live.begin(60) for _ in range(4)]
    live.ended(*rids)
    after = {rank.role: rank for rank in live.status().ranks}
    assert (after["decode"].state, after["decode"].epoch) == ("ready", decode.epoch)


def test_a_flood_from_one_peer_does_not_keep_another_from_being_served(live: Rig) -> None:
    """Thousands of requests, queries and garbage from one connection a socket; meanwhile requests of another go on."""
    rng = random.Random(4)
    submit = Submit("", "pair", 4, 8, bootstrap_room=1)
    payload = (token_bytes([5, 6, 7, 8]), codec.encode(Params()))
    flood = [codec.encode(sample) for sample in SAMPLES]
    sent = 0
    with Sockets() as sockets:
        floods = [each for each in everywhere(sockets, live) if each[0] != "publish"]
        rids = []
        for turn in range(20):
            rids.append(live.begin(60))
            for name, socket, prefix in floods:
                for number in range(300):
                    frames: list[bytes] = [rng.choice(flood)]
                    if name == "clients" and number % 2:
                        room = turn * 1000 + number
                        one = Submit(f"flood-{room}", submit.leg, 4, 8, bootstrap_room=room)
                        frames = [codec.encode(one), *payload]
                    try:
                        socket.send_multipart([*prefix, *frames], zmq.NOBLOCK)
                        sent += 1
                    except zmq.Again:
                        break
            live.read()
        assert sent > 10_000
        live.ended(*rids)
    live.check()
    assert live.status().counts["requests"] <= 65_536


def test_a_reader_that_does_not_read_holds_up_no_rank(live: Rig) -> None:
    """It attaches and then sleeps: the rank finishes at its own pace, serves others, and the tokens wait, in order."""
    prompt, count = [9] * 20, 400
    with Sockets() as sockets:
        client = sockets.dealer(ControllerAddress(live.cluster.controller).clients)
        submit = Submit("sleepy", "pair", 20, count, bootstrap_room=77)
        client.send_multipart([codec.encode(submit), token_bytes(prompt), codec.encode(Params())])
        accepted = codec.decode(client.recv_multipart()[0], CONTROLLER_TO_CLIENT)
        assert isinstance(accepted, Accepted)
        assert accepted.decode is not None
        node = sockets.dealer(accepted.decode.endpoint, hwm=1)
        node.send(codec.encode(Attach("sleepy", accepted.attempt)))
        live.ended(live.begin(60))
        assert client.poll(60_000)
        done = codec.decode(client.recv_multipart()[0], CONTROLLER_TO_CLIENT)  # while nothing was read
        assert isinstance(done, Done)
        tokens: list[int] = []
        finish = ""
        while not finish:
            assert node.poll(60_000)
            message = codec.decode(node.recv_multipart()[0], FROM_NODE_DATA)
            assert isinstance(message, Tokens)
            assert message.start == len(tokens)
            tokens += message.ids
            finish = message.finish
        assert tokens == sim_generate(prompt, count)


def test_open_files_do_not_grow_with_what_was_thrown_at_them(live: Rig) -> None:
    pids = [child.pid for child in live.cluster.children.values()]
    live.idle()
    before = usage_of(pids).fds
    for endpoint in ports(live).values():
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(50):
            unix.create_connection((host, int(port)), timeout=30).close()
    live.until(lambda: usage_of(pids).fds <= before + 2, "their connections are closed")
