"""`python -m bus`: READY, signals, the parent's end, and one clear line for what a user got wrong."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
import zmq

from bus import BusAddress, codec
from bus.messages import FROM_BROKER, BrokerStatus, BrokerStatusQuery

DEADLINE_S = 60.0


@pytest.fixture
def base() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="pd")
    yield f"ipc://{folder}/bus"
    shutil.rmtree(folder)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bus", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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
    sent_at = time.monotonic()
    process.send_signal(number)
    code, errors = finish(process)
    assert code == 0, errors
    assert time.monotonic() - sent_at < 5.0
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
        (("--bus", "ipc:///tmp/pdx/bus", "--beacon-s", "-1"), "beacon_s -1"),
        (("--bus", "ipc:///tmp/pdx/bus", "--max-rooms", "0"), "--max-rooms"),
        (("--what",), "No such option"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    code, errors = finish(start(*arguments))
    assert code == 2
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
