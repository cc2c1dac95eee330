"""`pdbus top` on a terminal, and `pdbus status` beside it, while a rank is killed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from pdbus.launcher import Cluster, ClusterSpec

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WAIT_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterSpec(prefill=1, decode=2, engine="sim", node_args=("--sim-timing", "zero"))) as running:
        yield running


def where(cluster: Cluster) -> tuple[str, ...]:
    return ("--controller", cluster.controller, "--bus", cluster.bus)


def pdbus(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | env,
    )  # fmt: skip


class Screen:
    """`pdbus top` on a terminal of ours."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.usual = termios.tcgetattr(theirs)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdbus", "top", *arguments],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env | {"TERM": "xterm"}, text=True,
        )  # fmt: skip
        self.theirs = theirs
        self.said = ""

    def press(self, keys: str) -> None:
        """From here on `until` looks at what comes after."""
        self.said = ""
        os.write(self.ours, keys.encode())

    def until(self, *words: str) -> None:
        """All of them were shown."""
        deadline = time.monotonic() + WAIT_S
        while not all(word in STYLES.sub("", self.said) for word in words):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"not shown: {words}; the last was:\n{STYLES.sub('', self.said)[-3000:]}"
            self.said += os.read(self.ours, 65536).decode(errors="replace")

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        while self.process.poll() is None:  # it may have more to write than a terminal holds
            if select.select([self.ours], [], [], 0.05)[0]:
                os.read(self.ours, 65536)
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors.strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        for end in (self.ours, self.theirs):
            os.close(end)


@pytest.fixture
def on_screen() -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def start(*arguments: str) -> Screen:
        screens.append(Screen(*arguments))
        return screens[-1]

    yield start
    for screen in screens:
        screen.close()


def test_a_killed_rank_shows_in_top_and_status(cluster: Cluster, on_screen: Callable[..., Screen]) -> None:
    healthy = pdbus("status", PDBUS_CONTROLLER=cluster.controller, PDBUS_BUS=cluster.bus)
    assert healthy.returncode == 0, healthy.stderr
    assert "!" not in healthy.stdout
    assert "broker, up" in healthy.stdout

    screen = on_screen(*where(cluster), "--interval-s", "0.2")
    screen.until("3 ready", "prefill-0/0", "decode-0/0", "decode-0/1", "0 expired", "tpot99", "q  quit")
    os.kill(cluster.children["decode-0/1"].pid, signal.SIGKILL)
    screen.until("2 ready  1 lost", "! decode-0/1 has been lost for", "decode-0/1 is lost: ")
    screen.press("\x1b[F\r")  # the last rank, in detail
    screen.until("decode-0/1  decode  lost", "epoch", "of 256")
    screen.press("\r?")
    screen.until("sort by another column")
    screen.press("q")
    assert screen.end() == (0, "")
    assert termios.tcgetattr(screen.theirs) == screen.usual

    hurt = pdbus("status", *where(cluster))
    assert (hurt.returncode, hurt.stderr) == (1, "")
    assert "! decode-0/1 has been lost for" in hurt.stdout
    told = pdbus("status", *where(cluster), "--json")
    assert told.returncode == 1
    (line,) = json.loads(told.stdout)["trouble"]
    assert line.startswith("decode-0/1 has been lost for ")


def test_a_controller_that_stands_still_is_said_so(cluster: Cluster, on_screen: Callable[..., Screen]) -> None:
    screen = on_screen(*where(cluster), "--interval-s", "0.2")
    screen.until("3 ready")
    controller = cluster.children["controller-0"].pid
    os.kill(controller, signal.SIGSTOP)
    try:
        screen.until("the controller does not answer; what is shown is old")
    finally:
        os.kill(controller, signal.SIGCONT)
    os.kill(screen.process.pid, signal.SIGTERM)
    assert screen.end() == (130, "")
    assert termios.tcgetattr(screen.theirs) == screen.usual


def test_without_a_terminal_it_says_what_to_use(cluster: Cluster) -> None:
    done = pdbus("top", *where(cluster))
    assert (done.returncode, done.stderr) == (
        2, "pdbus: error: top needs a terminal; elsewhere: pdbus top --http PORT, or pdbus status --watch\n"
    )  # fmt: skip


def test_status_again_and_again_as_json_is_an_object_a_line(cluster: Cluster) -> None:
    command = [sys.executable, "-P", "-m", "pdbus", "status", *where(cluster), "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors.strip()) == (130, "")
    uptimes = [each["controller"]["uptime_s"] for each in seen]
    assert uptimes == sorted(set(uptimes))
    assert all(each["trouble"] == [] for each in seen)
