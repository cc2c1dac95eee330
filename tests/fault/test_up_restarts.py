"""`pdbus up` keeps its parts running: what dies comes back, nothing accepted is lost, and there is a limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from request_load import Load
from up_process import Up

from bus.errors import RequestFailed
from bus.runtime.ports import free_ports
from bus.wire.messages import Status
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

pytestmark = pytest.mark.fault
SIM = ("--model", "sim", "--prefill", "1", "--decode", "1")
LOOK_S = 0.02  # between two questions for a status
SLOW = ("--", "--sim-base-s", "0.01")  # 40 tokens take 0.4 s


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        yield Path(path)


def whole(client: Client) -> Status:
    """What the controller says once both ranks are ready."""
    end = time.monotonic() + 60.0
    while True:
        status = client.status(timeout_s=60.0)
        if {rank.instance for rank in status.ranks if rank.state == "ready"} == {"prefill-0", "decode-0"}:
            return status
        assert time.monotonic() < end, status
        time.sleep(LOOK_S)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_only_controller_the_broker_and_a_node_die_under_load(directory: Path, transport: str) -> None:
    """Each comes back at its address with a new epoch, and every request ends rightly."""
    base = free_ports("127.0.0.1", 5) if transport == "tcp" else 0
    at = ("--bus", f"tcp://127.0.0.1:{base}", "--controller", f"tcp://127.0.0.1:{base + 3}") if base else ()
    with Up(directory, *SIM, "--transport", transport, *at, *SLOW) as up, Load(up.controller) as load:
        before = whole(load.client)
        for part in ("controller-0", "broker", "decode-0/0"):
            load.right(6)
            up.kill_and_await(part)
            if part == "controller-0":
                with Client(up.controller, connect_timeout_s=60.0) as fresh:  # whether or not a rank has joined by now
                    assert len(fresh.generate("hi", max_tokens=4).tokens()) == 4
            assert re.search(
                rf"^pdbus up: {part}: ended by SIGKILL; last words: .*; starts again in 0.25 s \(1 of at most 5\)$",
                up.said["stderr"], re.M,
            )  # fmt: skip
        load.right(12)
        after = whole(load.client)
        load.finish()
        sockets = Path(up.until("stdout", r"^Logs: (\S+)/\*\.log")[1]).glob("node-*")
        assert len(list(sockets)) == (0 if base else 2), "the killed node's socket is gone"
        assert after.epoch != before.epoch
        old, new = ({rank.instance: rank.epoch for rank in status.ranks} for status in (before, after))
        assert old["prefill-0"] == new["prefill-0"]
        assert old["decode-0"] != new["decode-0"]
        up.process.send_signal(signal.SIGINT)
        assert up.end() == 130
    assert not list(directory.iterdir())


@pytest.mark.slow
def test_a_node_that_is_killed_again_and_again_is_given_up(directory: Path) -> None:
    with Up(directory, "--model", "sim", "--unified", "2") as up:
        for _ in range(5):
            up.kill_and_await("unified-0/1")
        os.kill(up.pid("unified-0/1"), signal.SIGKILL)
        assert up.end() == 3
    waits = re.findall(r"starts again in ([\d.]+) s \(\d of at most 5\)", up.said["stderr"])
    assert waits == ["0.25", "0.5", "1", "2", "4"]
    assert up.said["stderr"].splitlines()[-1] == (
        "pdbus: error: unified-0/1: ended by SIGKILL; last words: none; gave up: it was started again 5 times within "
        "60 s of service"
    )
    assert "Traceback" not in up.said["stderr"]


def test_a_part_that_fails_at_its_first_start_ends_it_with_its_reason(directory: Path) -> None:
    with Up(directory, *SIM, "--", "--kv-tokens", "-1", ready=False) as up:
        assert up.end() == 2
    last = up.said["stderr"].splitlines()[-1]
    assert re.match(r"pdbus: error: (prefill|decode)-0/0: --kv-tokens, .* must not be negative$", last), up.said[
        "stderr"
    ]
    assert "starts again" not in up.said["stderr"]


def test_a_part_that_cannot_start_again_stays_away_and_its_log_tells_why(directory: Path) -> None:
    """The place for the data sockets is gone, so the new process exits 3."""
    logs = directory / "logs"
    with Up(directory / "run", *SIM, "--log-dir", str(logs)) as up:
        (directory / "run").chmod(0o755)
        os.kill(up.pid("controller-0"), signal.SIGKILL)
        assert up.end() == 3
    (directory / "run").chmod(0o700)
    last = up.said["stderr"].splitlines()[-1]
    assert last.startswith("pdbus: error: controller-0: exit code 2; last words: python -m controller: error: "), last
    assert last.endswith("gave up: no controller is left")
    assert "chmod 700" in last
    assert re.search(r"^pdbus up: controller-0 \| .*chmod 700", up.said["stderr"], re.M)
    assert f"Logs: {logs}/*.log" in up.said["stdout"]
    assert "chmod 700" in (logs / "controller-0.log").read_text()


def test_logs_and_metrics_outlive_a_restart(directory: Path) -> None:
    logs, base = directory / "logs", free_ports("127.0.0.1", 4)
    keep = ("--log-dir", str(logs), "--log-level", "info", "--metrics-port", str(base))
    with Up(directory / "run", *SIM, *keep) as up:
        parts = {"broker": "broker", "controller-0": "controller", "prefill-0/0": "node", "decode-0/0": "node"}
        for port, part in enumerate(parts, base):
            assert re.search(rf"{part}\s.*\b{port}\b", up.said["stdout"]), "the table tells the port"
        for part in ("controller-0", "decode-0/0"):
            up.kill_and_await(part)
        for port, kind in enumerate(parts.values(), base):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert f"pdbus_{kind}_" in answer.read().decode()
        up.process.send_signal(signal.SIGTERM)
        assert up.end() == 130
    assert sorted(path.name for path in logs.iterdir()) == [
        "broker.log", "controller-0.log", "decode-0.0.log", "prefill-0.0.log",
    ]  # fmt: skip
    starts = [line for line in (logs / "controller-0.log").read_text().splitlines() if "controller.started" in line]
    assert len({json.loads(line)["epoch"] for line in starts}) == 2


@pytest.mark.parametrize("kind", ["a full disk", "a reader that has gone"])
def test_output_that_cannot_be_written_ends_no_cluster(directory: Path, tmp_path: Path, kind: str) -> None:
    """A rank that dies comes back, and Ctrl-C lets what runs come to its end."""
    logs = ("--log-dir", str(tmp_path / "logs"), "--log-level", "info")
    reader, writer = os.pipe() if kind == "a reader that has gone" else (-1, os.open("/dev/full", os.O_WRONLY))
    command = [sys.executable, "-P", "-m", "pdbus", "up", *SIM, *logs, "--", "--sim-base-s", "0.02"]
    env = os.environ | {"PDBUS_DIR": str(directory)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, env=env, text=True) as up:
        try:
            os.close(writer)
            assert up.stdout is not None
            said = ""
            for line in up.stdout:
                said += line
                if line.endswith("Ctrl-C ends it all)\n"):
                    break
            if reader >= 0:
                os.close(reader)
                up.stdout.close()
            pid = re.search(r"prefill-0/0\s\D+(\d+)\s", said)
            controller = re.search(r"^READY bus=\S+ controller=(\S+)", said, re.M)
            assert pid is not None, said
            assert controller is not None, said
            with Client(controller[1], retries=20) as client:
                before = whole(client)
                os.kill(int(pid[1]), signal.SIGKILL)
                end = time.monotonic() + 60.0
                while {rank.epoch for rank in whole(client).ranks} == {rank.epoch for rank in before.ranks}:
                    assert time.monotonic() < end
                    time.sleep(LOOK_S)
                pieces = iter(client.generate_tokens([5, 6, 7], max_tokens=100))
                tokens = [*next(pieces).ids]
                up.send_signal(signal.SIGINT)
                tokens += [token for piece in pieces for token in piece.ids]
                assert tokens == sim_generate([5, 6, 7], 100)
            assert up.wait(60.0) == 130
        except Exception as error:
            said = "".join(f"{log.name}:\n{log.read_text()}" for log in (tmp_path / "logs").glob("*.log"))
            error.add_note(f"up ended with {up.poll()}\n{said}")
            raise
        finally:
            up.kill()
    assert not list(directory.iterdir())


@pytest.mark.slow
def test_ctrl_c_lets_what_runs_come_to_its_end(directory: Path) -> None:
    with Up(directory, *SIM, "--", "--sim-base-s", "0.02") as up, Client(up.controller) as client:
        pieces = iter(client.generate_tokens([5, 6, 7], max_tokens=350))  # 7 s
        tokens = [*next(pieces).ids]
        up.process.send_signal(signal.SIGINT)
        tokens += [token for piece in pieces for token in piece.ids]
        assert tokens == sim_generate([5, 6, 7], 350)
        assert up.end() == 130
    assert not list(directory.iterdir())


def test_the_second_ctrl_c_waits_for_nothing(directory: Path) -> None:
    with Up(directory, *SIM, *SLOW) as up, Client(up.controller, retries=0) as client:
        pieces = iter(client.generate_tokens([5, 6, 7], max_tokens=60_000))  # ten minutes
        next(pieces)
        up.process.send_signal(signal.SIGINT)
        up.until("stderr", "draining; Ctrl-C again ends it at once")
        up.process.send_signal(signal.SIGINT)
        assert up.end() == 130
        with pytest.raises(RequestFailed):
            list(pieces)
    assert not list(directory.iterdir())
    assert "Traceback" not in up.said["stderr"]
