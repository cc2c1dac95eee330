"""Bad settings of a node: one clear line on stderr and exit code 2, before anything is bound."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

import nodes
from nodes.config import parse_ranks


def test_the_front_door_opens_every_name() -> None:
    assert all(getattr(nodes, name).__name__ == name for name in nodes.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = nodes.Nothing


def test_ranks_are_numbers_and_ranges() -> None:
    assert parse_ranks(("3", "5-7", "0")) == (3, 5, 6, 7, 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--dp-rank", "4"], "--dp-rank 4: must lie in 0..0"),
        (["--dp-size", "4", "--dp-rank", "0-2", "--dp-rank", "1"], "name each rank of this process once"),
        (["--dp-rank", "x"], "use a number, or a range"),
        (["--dp-rank", "5-2"], "use a rising range"),
        (["--dp-size", "0"], "--dp-size 0"),
        (["--instance", "a b"], "--instance 'a b'"),
        (["--bus", "http://x"], "an address starts with ipc:// or tcp://"),
        (["--controller", "ipc:///tmp/c", "--controller", "ipc:///tmp/c"], "the same address twice"),
        (["--data", "tcp://127.0.0.1:65536"], "'65536' is no port"),
        (["--data", "tcp://127.0.0.1:"], "use ipc:///directory, tcp://host"),
        (["--data", "tcp://::1"], "use ipc:///directory, tcp://host"),
        (["--data", "tcp://0.0.0.0"], "that the other machines can reach"),
        (["--data", "tcp://[::]:5580"], "that the other machines can reach"),
        (["--data", "relative"], "use ipc:///directory, tcp://host"),
        (["--max-running", "0"], "--max-running must be at least 1"),
        (["--report-interval-s", "0"], "--report-interval-s must lie"),
        (["--wait-s", "0"], "--wait-s must lie"),
        (["--wait-s", "nan"], "'--wait-s': nan is no number of seconds"),
        (["--kv-tokens", "3"], "--kv-tokens 3 holds not even one block"),
        (["--engine", "cuda"], "Invalid value for '--engine'"),
        (["--engine", "torch", "--model", "nonsense"], "nonsense"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2(options: list[str], why: str) -> None:
    command = [sys.executable, "-P", "-m", "nodes.unified", "--engine", "sim", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("python -m nodes.unified: error: ")
    assert why in lines[0]


def test_a_taken_metrics_port_is_one_line_and_exit_3() -> None:
    import socket

    with socket.socket() as taken, tempfile.TemporaryDirectory(prefix="pd") as directory:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [
            sys.executable, "-P", "-m", "nodes.unified", "--engine", "sim", "--data", f"ipc://{directory}",
            "--bus", f"ipc://{directory}/bus", "--controller", f"ipc://{directory}/c", "--metrics-port", str(port),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert f"cannot serve metrics on 127.0.0.1:{port}" in done.stderr.strip().splitlines()[-1]
