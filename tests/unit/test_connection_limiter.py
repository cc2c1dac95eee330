"""Connections are counted and cut: how many an endpoint takes, how much a subscriber may say, whom a cut hits."""

from __future__ import annotations

import os
import resource
import shutil
import socket as unix
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from patience import patience_s
from soak.raw_zmtp import COMMAND, MORE, frame, greet, pour
from structlog.testing import capture_logs

from bus.errors import StartError
from bus.runtime import connection_limiter
from bus.runtime.connection_limiter import TALK_MAX, hang_up
from bus.runtime.file_limit import FILES_MIN
from bus.runtime.frames import FRAMES_MAX
from bus.runtime.loop import Loop
from bus.runtime.sockets import TOPIC_MAX, Sockets

WAIT_S = patience_s(120.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MIN, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def hung_up(peer: unix.socket) -> bool:
    """Whether the other side has closed; what it said before is read and forgotten."""
    peer.setblocking(False)
    try:
        while peer.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def greets(endpoint: str) -> bool:
    try:
        greet(endpoint, timeout_s=WAIT_S / 8).close()  # long: one that gives up queues again behind itself
    except OSError:
        return False
    return True


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_an_endpoint_takes_its_share_of_connections_and_those_it_has_stay(
    directory: Path, few_files: None, transport: str
) -> None:
    with Sockets() as sockets, ExitStack() as held:
        router = sockets.router(f"ipc://{directory}/r" if transport == "ipc" else "tcp://127.0.0.1:*")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        assert sockets.limiter is not None
        most = sockets.limiter.most_each
        first = [held.enter_context(greet(endpoint)) for _ in range(most)]
        more = []
        for _ in range(20):
            try:
                more.append(held.enter_context(greet(endpoint)))
            except OSError:
                continue  # cut off before its handshake was over
        until(lambda: all(map(hung_up, more)), "the connections above the share are cut off")
        assert not any(map(hung_up, first))
        assert sockets.limiter.cut["too_many_connections"] >= 20
        first.pop().close()
        until(lambda: greets(endpoint), "there is room again")


def test_all_endpoints_together_leave_descriptors_to_the_rest(directory: Path, few_files: None) -> None:
    with Sockets() as sockets, ExitStack() as held:
        for name in ("a", "b"):
            sockets.router(f"ipc://{directory}/{name}")
            for _ in range(105):
                with suppress(OSError):  # cut off before its handshake was over
                    held.enter_context(greet(f"ipc://{directory}/{name}"))
        made = sockets.limiter
        assert made is not None
        assert made.most_each > 105
        until(lambda: made.cut["too_many_connections"] >= 210 - FILES_MIN * 3 // 8, "those beyond the sum are cut off")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_subscriber_that_subscribes_without_end_is_cut_off_and_another_hears_all(
    directory: Path, transport: str
) -> None:
    with Sockets() as sockets:
        out = sockets.bus_out(f"ipc://{directory}/s" if transport == "ipc" else "tcp://127.0.0.1:*")
        endpoint = out.getsockopt_string(zmq.LAST_ENDPOINT)
        topics = tuple(b"to/instance/%d/" % rank for rank in range(500))
        honest = sockets.sub(endpoint, topics)
        with greet(endpoint, b"SUB") as peer:

            def cut_off() -> bool:
                pour(peer, frame(b"\1to/" + os.urandom(200)), 50)
                out.send(b"", zmq.NOBLOCK)  # a PUB takes subscriptions in when it sends
                return hung_up(peer)

            until(cut_off, "it is cut off")
        assert sockets.limiter is not None
        assert sockets.limiter.cut == {"too_many_subscriptions": 1}

        def heard() -> bool:
            out.send_multipart([topics[-1], b"x"])
            return bool(honest.poll(20))

        until(heard, "the honest subscriber hears its last topic")


def test_a_subscriber_that_reads_nothing_is_cut_off_and_one_that_reads_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limiter, "LOOK_S", 0.02)
    monkeypatch.setattr(connection_limiter, "UNREAD_S", 1.0)
    with Sockets() as sockets, Sockets() as other:
        out = sockets.bus_out("tcp://127.0.0.1:*")
        endpoint = out.getsockopt_string(zmq.LAST_ENDPOINT)
        honest = other.sub(endpoint, (b"to/",))
        assert sockets.limiter is not None
        with greet(endpoint, b"SUB") as peer:
            pour(peer, frame(b"\1to/"), 1)

            def cut_off() -> bool:
                with suppress(zmq.Again):
                    out.send_multipart([b"to/x", bytes(1 << 16)], zmq.NOBLOCK)
                while honest.poll(0):
                    honest.recv_multipart()
                return sockets.limiter is not None and bool(sockets.limiter.cut)

            until(cut_off, "it is cut off")
        assert sockets.limiter.cut == {"reads_nothing": 1}
        out.send_multipart([b"to/x", b"last"])

        def heard() -> bool:
            return bool(honest.poll(20)) and honest.recv_multipart()[1] == b"last"

        until(heard, "who reads is served")


def test_a_subscription_may_be_as_long_as_a_topic_and_no_longer(directory: Path) -> None:
    with Sockets() as sockets:
        endpoint = f"ipc://{directory}/s"
        sockets.bus_out(endpoint)
        with greet(endpoint, b"SUB") as peer:
            pour(peer, frame(b"\1" + b"x" * (TOPIC_MAX - 1)), 1)
            pour(peer, frame(b"\1" + b"x" * TOPIC_MAX), 1)
            until(lambda: hung_up(peer), "it is cut off")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_what_a_subscriber_says_is_counted_in_bytes_whether_it_was_read_or_not(directory: Path, transport: str) -> None:
    at = f"{directory}/s" if transport == "ipc" else ("127.0.0.1", 0)
    with unix.socket(unix.AF_UNIX if transport == "ipc" else unix.AF_INET) as server:
        server.bind(at)
        server.listen()
        with unix.socket(server.family) as peer:
            peer.connect(server.getsockname())
            with server.accept()[0] as accepted:
                connection_limiter._count_reads(accepted.fileno())
                peer.sendall(bytes(TALK_MAX))
                until(
                    lambda: connection_limiter._bytes_received(accepted.fileno(), 0) == TALK_MAX,
                    "it is counted before it is read",
                )
                assert accepted.recv(1000) == bytes(1000)
                assert connection_limiter._bytes_received(accepted.fileno(), 0) == TALK_MAX
                peer.sendall(b"x")
                until(
                    lambda: connection_limiter._bytes_received(accepted.fileno(), 0) == TALK_MAX + 1,
                    "what comes later adds to it",
                )


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_subscribers_pings_are_no_subscriptions(directory: Path, transport: str) -> None:
    with Sockets() as sockets:
        out = sockets.bus_out(f"ipc://{directory}/s" if transport == "ipc" else "tcp://127.0.0.1:*")
        with greet(out.getsockopt_string(zmq.LAST_ENDPOINT), b"SUB", timeout_s=WAIT_S) as peer:
            for _ in range(200):
                pour(peer, frame(b"\4PING\0\x1e", COMMAND), 1)
                assert b"PONG" in peer.recv(4096)
            pour(peer, frame(b"\1to/"), 1)
            peer.setblocking(False)

            def heard() -> bool:
                out.send_multipart([b"to/x", b"y"])
                with suppress(BlockingIOError):
                    return b"to/x" in peer.recv(4096)
                return False

            until(heard, "it still hears what it subscribes to")
        assert sockets.limiter is not None
        assert not sockets.limiter.cut


def test_only_the_connection_that_was_meant_is_hung_up_on() -> None:
    ours, theirs = unix.socketpair()
    with ours, theirs:
        hang_up(ours.fileno(), "10.0.0.1")  # the descriptor is another's by now
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        hang_up(ours.fileno(), f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}")
        assert theirs.recv(1) == b""
    with tempfile.TemporaryFile() as file:
        hang_up(file.fileno(), "10.0.0.1")  # no socket at all
        file.write(b"still open")
    hang_up(-1, "")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_sender_of_a_message_of_too_many_frames_is_cut_off(directory: Path, transport: str) -> None:
    loop = Loop()
    with Sockets() as sockets:
        router = sockets.router(f"ipc://{directory}/r" if transport == "ipc" else "tcp://127.0.0.1:*")
        loop.add(router, lambda frames: None)
        with greet(router.getsockopt_string(zmq.LAST_ENDPOINT)) as peer:
            pour(peer, frame(b"", MORE) * (FRAMES_MAX + 1) + frame(b""), 1)

            def cut_off() -> bool:
                loop.call_threadsafe(lambda: None)  # so that the turn does not wait
                loop.turn()
                return hung_up(peer)

            with capture_logs() as logs:
                until(cut_off, "it is cut off")
    loop.close()
    assert [(entry["event"], entry["why"]) for entry in logs] == [("peer.cut_off", "too_many_frames")]


def test_too_low_a_limit_on_open_files_is_refused_with_a_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (FILES_MIN - 1, FILES_MIN - 1))
    with Sockets() as sockets, pytest.raises(StartError, match=r"raise the limit to 512 or more \(ulimit -n\)"):
        sockets.router(f"ipc://{directory}/r")


@pytest.mark.parametrize(("limit", "code", "line"), [(64, 3, "ulimit -n"), (4096, None, "")])
def test_idle_connections_beyond_the_limit_on_open_files_abort_nobody(
    directory: Path, limit: int, code: int | None, line: str
) -> None:
    """Over ipc libzmq aborts its process when a connection comes and there is no descriptor left for it."""
    bus = f"ipc://{directory}/bus"
    argv = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "-", sys.executable, "-m", "bus", "--bus", bus]
    log = directory / "log"  # no pipe: a line for each that is cut off, and nobody reads them
    with (
        log.open("w") as errors,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True) as broker,
        ExitStack() as held,
    ):
        try:
            assert broker.stdout is not None
            if code is not None:
                assert broker.wait(WAIT_S) == code
                said = log.read_text()
                assert (said.count("\n"), line in said) == (1, True)
                return
            assert broker.stdout.readline().startswith("READY")
            for suffix in ("pub", "sub", "bootstrap"):
                for _ in range(limit * 2 // 5):
                    peer = held.enter_context(unix.socket(unix.AF_UNIX))
                    peer.setblocking(False)
                    with suppress(BlockingIOError):  # more than the kernel queues
                        peer.connect(f"{directory}/bus.{suffix}")
            held.close()
            until(lambda: broker.poll() is not None or greets(f"{bus}.bootstrap"), "it serves")
            assert broker.poll() is None
        finally:
            broker.kill()


ROUTER = """
import sys, zmq
from bus.runtime.sockets import TOPIC_MAX, Sockets
with Sockets() as sockets:
    router = sockets.router(sys.argv[1], answers_one_frame=sys.argv[2] == "one")
    while True:
        peer, what = router.recv_multipart()
        router.send_multipart([peer, peer])
"""


@pytest.mark.parametrize(("answers", "survives"), [("one", True), ("several", False)])
def test_who_claims_the_id_that_a_router_comes_to_next_harms_only_one_that_answers_with_several_frames(
    directory: Path, answers: str, survives: bool
) -> None:
    """The second half is libzmq's own: when it fails, libzmq has mended it and `answers_one_frame` can go."""
    endpoint = f"ipc://{directory}/r"
    argv = [sys.executable, "-c", ROUTER, endpoint, answers]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process, Sockets() as sockets:
        claim = sockets.context.socket(zmq.DEALER)
        try:
            until((directory / "r").exists, "it is bound")
            dealer = sockets.dealer(endpoint)
            dealer.send(b"who am I?")
            assert dealer.poll(WAIT_S * 1000)
            (number,) = struct.unpack(">xI", dealer.recv())
            claim.setsockopt(zmq.LINGER, 0)
            claim.setsockopt(zmq.ROUTING_ID, struct.pack(">xI", number + 3))
            claim.connect(endpoint)
            claim.send(b"x")
            if survives:
                assert claim.poll(WAIT_S * 1000)
                assert claim.recv() != struct.pack(">xI", number + 3)
                dealer.send(b"still there?")
                assert dealer.poll(WAIT_S * 1000)
                assert dealer.recv() == struct.pack(">xI", number)
            else:
                assert claim.poll(WAIT_S * 1000)
                for _ in range(6):
                    sockets.dealer(endpoint).send(b"x")
                assert process.wait(WAIT_S) < 0
        finally:
            claim.close(0)
            process.kill()


def test_routers_of_two_processes_number_their_peers_from_different_starts(directory: Path) -> None:
    numbers = set()
    for name in ("a", "b"):
        endpoint = f"ipc://{directory}/{name}"
        with subprocess.Popen([sys.executable, "-c", ROUTER, endpoint, "several"]) as process, Sockets() as sockets:
            try:
                until((directory / name).exists, "it is bound")
                dealer = sockets.dealer(endpoint)
                dealer.send(b"who am I?")
                assert dealer.poll(WAIT_S * 1000)
                numbers.add(dealer.recv())
            finally:
                process.kill()
    assert len(numbers) == 2
