"""`python -m bus`: READY, signals, the parent's end, and one clear line for what a user got wrong."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import IO

import pytest
import zmq

from bus import BusAddress
from bus.runtime.ports import free_ports
from bus.wire import codec
from bus.wire.messages import FROM_BROKER, BrokerStatus, BrokerStatusQuery, Refused

DEADLINE_S = 60.0


@pytest.fixture
def base() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{folder}/bus"
    shutil.rmtree(folder)


def start(*arguments: str, stderr: IO[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bus", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr or subprocess.PIPE,
        text=True,
    )


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "no READY in time"
    return process.stdout.readline()


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_then_serves_then_leaves_on_a_signal(base: str, number: int) -> None:
    process = start("--bus", base)
    words = ready_line(process).split()
    assert words[0] == "READY"
    facts = dict(word.split("=", 1) for word in words[1:])
    assert facts["bus"] == base
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        asker.connect(BusAddress(base).bootstrap)
        asker.send(codec.encode(BrokerStatusQuery(1)))
        status = codec.decode(asker.recv(), FROM_BROKER)
        assert isinstance(status, BrokerStatus)
        assert str(status.epoch) == facts["epoch"]
    process.send_signal(number)
    code, errors = finish(process)
    assert code == 0, errors
    assert "Traceback" not in errors


def test_leaves_with_its_parent(base: str) -> None:
    process = start("--bus", base, "--watch-parent")
    ready_line(process)
    assert process.stdin is not None
    os.close(os.dup(process.stdin.fileno()))
    assert finish(process)[0] == 0  # communicate closes stdin


def test_a_taken_endpoint_is_one_line_and_exit_3(base: str) -> None:
    first = start("--bus", base)
    ready_line(first)
    code, errors = finish(start("--bus", base))
    assert code == 3
    assert [line for line in errors.splitlines() if line.startswith("python -m bus: error:")] == [
        f"python -m bus: error: {base}.pub is taken: stop what runs there or choose another address"
    ]
    assert "Traceback" not in errors
    first.terminate()
    assert finish(first)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bus", "http://x"), "starts with ipc:// or tcp://"),
        (("--bus", "ipc:///tmp/pdx/bus", "--room-ttl-s", "0"), "room_ttl_s 0"),
        (("--bus", "ipc:///tmp/pdx/bus", "--beacon-s", "-1"), "'--beacon-s': -1.0 is not in the range"),
        (("--bus", "ipc:///tmp/pdx/bus", "--max-rooms", "0"), "--max-rooms"),
        (("--what",), "No such option"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    code, errors = finish(start(*arguments))
    assert code == 2
    assert said in errors
    assert len(errors.strip().splitlines()) == 1


def refused(base: str, times: int) -> None:
    """So many strangers send a message that is none; the broker logs the first of each."""
    with zmq.Context() as context:
        for _ in range(times):
            with context.socket(zmq.REQ) as stranger:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
                stranger.connect(BusAddress(base).bootstrap)
                stranger.send(b"garbage")
                assert isinstance(codec.decode(stranger.recv(), FROM_BROKER), Refused)


@pytest.mark.parametrize("where", ["closed pipe", "full disk"])
def test_a_log_that_cannot_be_written_ends_no_broker(base: str, where: str) -> None:
    port = free_ports("127.0.0.1", 1)
    with open("/dev/full", "w") as full:
        process = start("--bus", base, "--metrics-port", str(port), stderr=full if where == "full disk" else None)
    ready_line(process)
    if process.stderr is not None:
        process.stderr.close()
        process.stderr = None
    refused(base, 3)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as page:
        lost = re.search(r"^pdbus_log_events_lost_total (\d+)", page.read().decode(), re.M)
    assert lost is not None
    assert int(lost[1]) >= 3
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
