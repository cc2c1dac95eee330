"""What peers say, on a terminal: it cannot control it, and a narrow one shows whole words."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from pdbus.launcher import Cluster, ClusterSpec

MODEL = "sim\x1b]0;gotcha\x07[red]\u202e"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
OWN_STYLES = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ranks whose tokens are bytes, each as likely as any other."""
    node_args = ("--sim-vocab-size", "259", "--sim-timing", "zero")
    with Cluster(ClusterSpec(prefill=2, decode=2, engine="sim", model=MODEL, node_args=node_args)) as running:
        yield running


def on_terminal(columns: int, *arguments: str) -> str:
    """What `pdbus` writes to a terminal of that width on stdout."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with open(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdbus", *arguments],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        said = b""
        try:
            while data := screen.read(65536):
                said += data
        except OSError:  # EIO: the last process has closed it
            pass
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return OWN_STYLES.sub("", said.decode().replace("\r\n", "\n"))


def test_output_of_a_model_cannot_control_the_terminal(cluster: Cluster) -> None:
    arguments = ("generate", "hi", "--raw", "--max-tokens", "300", "--tokenizer", "bytes")
    arguments += ("--controller", cluster.controller)
    shown = on_terminal(80, *arguments)
    assert not CONTROLS.search(shown)
    assert re.search(r"\\x[01]", shown)
    command = [sys.executable, "-P", "-m", "pdbus", *arguments]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert CONTROLS.search(piped.stdout.decode()), "a file gets what the model said"


def test_a_models_name_cannot_control_the_terminal(cluster: Cluster) -> None:
    shown = on_terminal(200, "status", "--controller", cluster.controller, "--bus", cluster.bus)
    assert not CONTROLS.search(shown)
    assert "model: sim\\x1b]0;gotcha\\x07[red]\\u202e;" in shown


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_status_shows_whole_words_at_any_width(cluster: Cluster, columns: int) -> None:
    shown = on_terminal(columns, "status", "--controller", cluster.controller, "--bus", cluster.bus)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in shown
    (header,) = [line.split() for line in lines if line.split()[:2] == ["rank", "state"]]
    assert {"run+wait", "KV", "estimate"} <= set(header)
    told = re.search(r"left out here: (.*?) \(a wider", " ".join(shown.split()))
    assert {*header, *(told[1].replace("in flight", "in, flight").split(", ") if told else ())} == {
        "rank", "state", "age", "run+wait", "KV", "in", "flight", "estimate", "sent", "ended", "bad",
    }  # fmt: skip
    assert bool(told) == (columns == 60)
    ranks = [line.split() for line in lines if re.match(r" *(prefill|decode)-0/[01] ", line)]
    assert [words[:2] for words in ranks] == [
        [f"{instance}-0/{rank}", "ready"] for instance in ("prefill", "decode") for rank in (0, 1)
    ]
