"""Sockets: endpoints that are taken, limits that hold, warnings that are heard, nothing left open."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket as unix
import struct
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq
from patience import patience_s
from soak.raw_zmtp import COMMAND, frame, greet, pour
from structlog.testing import capture_logs
from test_service import in_a_forked_child

from bus.errors import ConfigError, StartError
from bus.runtime.keys import load_keys, new_keys
from bus.runtime.ports import free_ports
from bus.runtime.sockets import HEADER_MAX, UNREAD, Socket, Sockets
from controller.shell import UNREAD_LARGE
from pdbus.client import AsyncClient, Client

WAIT_MS = int(1000 * patience_s(60.0))


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with Sockets() as made:
        yield made


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


def test_a_taken_ipc_endpoint_is_refused_and_left_alone(directory: Path, sockets: Sockets) -> None:
    endpoint = f"ipc://{directory}/taken"
    router = sockets.router(endpoint)
    with Sockets() as others, pytest.raises(StartError, match="is taken") as caught:
        others.router(endpoint)
    assert endpoint in str(caught.value)
    sockets.dealer(endpoint).send(b"still there")
    assert receive(router)[1:] == [b"still there"]


def test_a_forked_child_that_closes_leaves_its_parents_endpoints(directory: Path, sockets: Sockets) -> None:
    endpoint = f"ipc://{directory}/mine"
    router = sockets.router(endpoint)
    assert in_a_forked_child(sockets.close) == "None"
    sockets.dealer(endpoint).send(b"still there")
    assert receive(router)[1:] == [b"still there"]


def test_an_ipc_path_left_by_a_dead_process_is_taken_over(directory: Path, sockets: Sockets) -> None:
    path = directory / "stale"
    with unix.socket(unix.AF_UNIX) as dead:
        dead.bind(str(path))  # never listens: what a killed process leaves behind
    assert path.exists()
    router = sockets.router(f"ipc://{path}")
    sockets.dealer(f"ipc://{path}").send(b"hello")
    assert receive(router)[1:] == [b"hello"]


def test_a_taken_tcp_port_is_refused(sockets: Sockets) -> None:
    _, endpoint = sockets.ephemeral_router("tcp://127.0.0.1")
    with pytest.raises(StartError, match=r"is taken: .* another address"):
        sockets.router(endpoint)


def test_an_address_that_is_not_here_is_refused(sockets: Sockets) -> None:
    with pytest.raises(StartError, match="cannot bind"):
        sockets.router("tcp://192.0.2.1:5550")


def test_an_ipc_directory_open_to_others_is_refused(directory: Path, sockets: Sockets) -> None:
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        sockets.router(f"ipc://{directory}/x")


def test_the_directory_is_made_private(directory: Path, sockets: Sockets) -> None:
    sockets.router(f"ipc://{directory}/made/x")
    assert (directory / "made").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_write_is_not_connected_to(directory: Path, sockets: Sockets) -> None:
    """Whoever writes there may listen in the other part's place."""
    directory.chmod(0o777)
    for connect in (sockets.pub, sockets.dealer, partial(sockets.sub, topics=(b"",))):
        with pytest.raises(ConfigError, match="chmod go-w"):
            connect(f"ipc://{directory}/x")
    with pytest.raises(StartError, match="chmod go-w"):  # a peer has named it: no setting of ours is wrong
        sockets.dealer(f"ipc://{directory}/x", role="nodes")
    with pytest.raises(ConfigError, match="chmod go-w"):
        Client(f"ipc://{directory}/x")

    async def enter() -> None:
        async with AsyncClient(f"ipc://{directory}/x"):
            pass

    with pytest.raises(ConfigError, match="chmod go-w"):
        asyncio.run(enter())
    directory.chmod(0o700)
    sockets.dealer(f"ipc://{directory}/x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
def test_a_folder_of_another_user_is_not_connected_to(directory: Path, sockets: Sockets) -> None:
    """Root is let in everywhere, and refuses it all the same."""
    os.chown(directory, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Client(f"ipc://{directory}/x")
    with pytest.raises(StartError, match="belongs to another user"):
        sockets.dealer(f"ipc://{directory}/x", role="nodes")


def test_with_keys_a_port_proves_whose_it_is_in_any_directory(directory: Path) -> None:
    new_keys(directory / "keys")
    directory.chmod(0o777)
    with Sockets(keys=load_keys(directory / "keys", "clients")) as keyed:
        keyed.check(f"ipc://{directory}/x")


@pytest.mark.parametrize(("host", "warns"), [("tcp://127.0.0.1", False), ("tcp://0.0.0.0", True)])
def test_an_exposed_endpoint_warns_loudly(sockets: Sockets, host: str, warns: bool) -> None:
    with capture_logs() as logs:
        sockets.ephemeral_router(host)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == (["endpoint.exposed"] if warns else [])


def test_an_ephemeral_router_says_where_it_is(directory: Path, sockets: Sockets) -> None:
    for host in ("tcp://127.0.0.1", f"ipc://{directory}/data"):
        router, endpoint = sockets.ephemeral_router(host)
        assert endpoint.startswith(host)
        sockets.dealer(endpoint).send(b"x")
        assert receive(router)[1:] == [b"x"]


def test_a_router_of_one_process_takes_the_port_that_is_named(sockets: Sockets) -> None:
    """As a firewall or a NetworkPolicy needs it; with keys the endpoint says whose it is there too."""
    port = free_ports("127.0.0.1", 1)
    _, endpoint = sockets.ephemeral_router(f"tcp://127.0.0.1:{port}")
    assert endpoint == f"tcp://127.0.0.1:{port}"
    with pytest.raises(StartError, match=f"tcp://127.0.0.1:{port} is taken"):
        sockets.ephemeral_router(f"tcp://127.0.0.1:{port}")


def test_a_fresh_ipc_endpoint_removes_those_that_dead_processes_left(directory: Path, sockets: Sockets) -> None:
    _, living = sockets.ephemeral_router(f"ipc://{directory}/node-1")
    (directory / "node-file").touch()
    for name in ("node-2", "node-young", "bus.pub"):
        with unix.socket(unix.AF_UNIX) as dead:
            dead.bind(str(directory / name))
    for name in ("node-1", "node-2", "node-file", "bus.pub"):
        os.utime(directory / name, (1.0, 1.0))
    sockets.ephemeral_router(f"ipc://{directory}/node-3")
    assert {path.name for path in directory.iterdir()} == {"node-1", "node-3", "node-young", "node-file", "bus.pub"}
    sockets.dealer(living).send(b"x")


def test_an_ipc_endpoint_with_a_full_queue_is_not_taken_from_its_process(directory: Path, sockets: Sockets) -> None:
    with unix.socket(unix.AF_UNIX) as busy, unix.socket(unix.AF_UNIX) as waiting:
        busy.bind(str(directory / "busy"))
        busy.listen(0)
        waiting.connect(str(directory / "busy"))
        with pytest.raises(StartError, match="is taken"):
            sockets.router(f"ipc://{directory}/busy")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_frame_above_the_limit_never_arrives(directory: Path, sockets: Sockets, transport: str) -> None:
    """M4: the peer that sends it loses its connection, others don't notice."""
    base = f"ipc://{directory}/small" if transport == "ipc" else "tcp://127.0.0.1:*"
    router = sockets.router(base)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    big, small = sockets.dealer(endpoint), sockets.dealer(endpoint)
    monitor = big.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    big.send(b"x" * (HEADER_MAX + 1))
    small.send(b"fine")
    assert receive(router)[1:] == [b"fine"]
    left = monitor.poll(WAIT_MS)
    big.disable_monitor()
    monitor.close()
    assert left, "its connection stands"
    big.send(b"x" * HEADER_MAX)  # ZeroMQ connects again by itself
    assert [len(frame) for frame in receive(router)[1:]] == [HEADER_MAX]
    assert not router.poll(0)


def test_a_router_says_when_its_peer_has_gone(directory: Path, sockets: Sockets) -> None:
    router = sockets.router(f"ipc://{directory}/r")
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"])
    assert caught.value.errno == errno.EHOSTUNREACH


def test_a_full_queue_is_an_error_not_a_wait(directory: Path, sockets: Sockets) -> None:
    dealer = sockets.dealer(f"ipc://{directory}/absent", hwm=3)
    for _ in range(3):
        dealer.send(b"x", zmq.NOBLOCK)
    with pytest.raises(zmq.Again):
        dealer.send(b"x", zmq.NOBLOCK)


def test_so_many_messages_of_a_connection_are_read_ahead_and_no_more(directory: Path, sockets: Sockets) -> None:
    usual, large = sockets.router(f"ipc://{directory}/u"), sockets.router(f"ipc://{directory}/l", unread=32)
    assert (usual.getsockopt(zmq.RCVHWM), large.getsockopt(zmq.RCVHWM)) == (UNREAD, 32)
    assert UNREAD_LARGE == 32


def test_what_is_under_none_of_our_topics_stays_with_its_publisher(directory: Path, sockets: Sockets) -> None:
    bus = sockets.bus_in((b"load/", b"kv/"), f"ipc://{directory}/in")
    publisher = sockets.pub(f"ipc://{directory}/in")
    for _ in range(WAIT_MS // 20):  # until it knows what is wanted
        publisher.send_multipart([b"other/", b"x"])
        publisher.send_multipart([b"load/p/0/", b"x"])
        if bus.poll(20):
            break
    assert receive(bus) == [b"load/p/0/", b"x"]


def test_what_a_subscriber_says_stays_at_the_broker(directory: Path, sockets: Sockets) -> None:
    """Its port can't be read."""
    out = sockets.bus_out(f"ipc://{directory}/out")
    with greet(f"ipc://{directory}/out", b"SUB") as peer:
        pour(peer, frame(b"load/p/0/"), 1)
        with pytest.raises(zmq.ZMQError) as caught:
            out.recv(zmq.NOBLOCK)
    assert caught.value.errno == errno.ENOTSUP


def test_every_socket_is_bounded_and_lingers_not(directory: Path, sockets: Sockets) -> None:
    made = [
        sockets.pub(f"ipc://{directory}/in"),
        sockets.sub(f"ipc://{directory}/out", (b"load/",)),
        sockets.bus_in((b"load/",), f"ipc://{directory}/xin"),
        sockets.bus_out(f"ipc://{directory}/xout"),
        sockets.dealer(f"ipc://{directory}/r"),
        sockets.router(f"ipc://{directory}/r"),
    ]
    for socket in made:
        assert socket.getsockopt(zmq.LINGER) == 0
        assert socket.getsockopt(zmq.SNDHWM) > 0
        assert socket.getsockopt(zmq.RCVHWM) > 0
        assert 0 < socket.getsockopt(zmq.MAXMSGSIZE) <= HEADER_MAX
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) > 0
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0, "the kernel closes what a dead process leaves"


def test_over_tcp_dead_peers_are_found_by_heartbeats(sockets: Sockets) -> None:
    router, endpoint = sockets.ephemeral_router("tcp://127.0.0.1")
    for socket in (sockets.dealer(endpoint), sockets.sub(endpoint, (b"load/",))):
        assert 0 < socket.getsockopt(zmq.HEARTBEAT_IVL) < socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)
        assert socket.getsockopt(zmq.HEARTBEAT_TTL) == socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)
        assert 0 < socket.getsockopt(zmq.CONNECT_TIMEOUT) < 5000
    assert router.getsockopt(zmq.TCP_KEEPALIVE) == 1
    assert 0 < router.getsockopt(zmq.TCP_MAXRT) < 10_000, "else keepalive waits for what is not acknowledged"


def test_who_binds_takes_a_peer_that_promised_to_ping_for_dead_when_it_does_not(sockets: Sockets) -> None:
    _, endpoint = sockets.ephemeral_router("tcp://127.0.0.1")
    with greet(endpoint) as peer:
        peer.sendall(frame(b"\4PING" + struct.pack(">H", 2), COMMAND))  # it will within 0.2 s
        peer.settimeout(60.0)
        while peer.recv(4096):
            pass


def test_a_peer_that_leaves_while_its_queue_is_full_aborts_nobody(sockets: Sockets) -> None:
    """As libzmq does when the side that is flooded is to ping the peer."""
    router = sockets.router("tcp://127.0.0.1:*", hwm=10)
    with greet(router.getsockopt_string(zmq.LAST_ENDPOINT), timeout_s=0.5) as peer:
        peer.sendall(frame(b"\4PING" + struct.pack(">H", 5), COMMAND))
        pour(peer, frame(b"x") * 100, 20_000)
        peer.setsockopt(unix.SOL_SOCKET, unix.SO_LINGER, struct.pack("ii", 1, 0))  # it leaves with a RST
    time.sleep(1.5)  # until a ping would have been due
    while router.poll(100):
        router.recv_multipart()


def test_closing_closes_all_even_with_messages_unsent(directory: Path) -> None:
    with Sockets() as sockets:
        dealer = sockets.dealer(f"ipc://{directory}/absent")
        for _ in range(100):
            dealer.send(b"x" * 1000)
        closed = sockets.dealer(f"ipc://{directory}/other")
        sockets.close_socket(closed)
        assert closed.closed
    assert dealer.closed
    assert sockets.context.closed
