"""`pdbus up`, `generate`, `status` and `drain` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_starts

from nodes.link.streams import UNREAD_S
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

Up = subprocess.Popen[str]


def pdbus(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", *arguments],
        capture_output=True, text=True, timeout=120, env=_env(directory), check=False,
    )  # fmt: skip


def _env(directory: Path) -> dict[str, str]:
    return os.environ | {"PDBUS_DIR": str(directory), "COLUMNS": "200"}


def read_until(process: Up, pattern: str, deadline_s: float = 60.0) -> str:
    """What `process` says on stdout up to a line that matches; fails when it ends or the time is up."""
    assert process.stdout is not None
    until = time.monotonic() + deadline_s
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout.fileno(), selectors.EVENT_READ)
        while not re.search(pattern, said.decode(), re.M):
            assert selector.select(max(0.0, until - time.monotonic())), said
            data = os.read(process.stdout.fileno(), 65536)
            assert data, f"it ended: {said!r}"
            said += data
    return said.decode()


def leave(process: Up, number: int = signal.SIGINT) -> tuple[int, str]:
    """Exit code and stderr after a signal."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def parts_of(process: Up) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in listed if Path(f"/proc/{pid}/comm").read_text().strip() != warm_starts.NAME]


def of_ranks(directory: Path, key: str) -> dict[str, Any]:
    """What `status` says under `key`, by rank."""
    ranks = json.loads(pdbus(directory, "status", "--json").stdout)["controller"]["ranks"]
    return {f"{rank['instance']}/{rank['dp_rank']}": rank[key] for rank in ranks}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        yield Path(path)


@pytest.fixture
def up(directory: Path) -> Iterator[Up]:
    """A small sim cluster at the usual place."""
    arguments = ["--model", "sim", "--prefill-method", "total_tokens", "--decode-method", "total_requests"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pdbus", "up", *arguments, "--", "--sim-timing", "zero"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_env(directory),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_session(up: Up, directory: Path) -> None:
    said = read_until(up, r"^READY bus=")
    for part in ("broker", "controller-0", "prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"):
        assert part in said
    assert f"controller=ipc://{directory}/controller" in said

    answer = pdbus(directory, "generate", "5 6 7", "--tokens", "--max-tokens", "6")
    assert answer.returncode == 0, answer.stderr
    assert [int(word) for word in answer.stdout.split()] == sim_generate([5, 6, 7], 6)
    assert re.search(
        r"^\[prefill-0/[01] -> decode-0/[01], found by told; 3 prompt tokens, 6 output tokens", answer.stderr
    )
    told = json.loads(pdbus(directory, "generate", "hi", "--raw", "--json", "--max-tokens", "4").stdout)
    assert told["ids"] == sim_generate([3 + byte for byte in b"hi"], 4)
    assert (told["finish"], told["prompt_tokens"], told["found_by"]) == ("length", 2, "told")

    several = pdbus(directory, "generate", "5 6 7", "--tokens", "--max-tokens", "6", "-n", "3")
    lines = several.stdout.splitlines()
    assert [[int(word) for word in line.split()] for line in lines] == [sim_generate([5, 6, 7], 6)] * 3
    assert several.stderr.count("6 output tokens") == 3
    several = pdbus(directory, "generate", "hi", "--raw", "--json", "--max-tokens", "2", "-n", "2")
    each = [json.loads(line) for line in several.stdout.splitlines()]
    assert [one["ids"] for one in each] == [told["ids"][:2]] * 2
    assert each[0]["rid"] != each[1]["rid"]
    one_room = pdbus(directory, "generate", "hi", "-n", "2", "--bootstrap-room", "7")
    assert one_room.returncode != 0
    assert one_room.stderr == "pdbus: error: bootstrap_room: a room is one request's; ask for one answer\n"

    status = json.loads(pdbus(directory, "status", "--json").stdout)
    assert {(rank["instance"], rank["dp_rank"], rank["state"]) for rank in status["controller"]["ranks"]} == {
        (instance, rank, "ready") for instance in ("prefill-0", "decode-0") for rank in (0, 1)
    }
    assert status["controller"]["methods"]["decode"] == "total_requests"
    assert status["broker"]["counts"]["ranks"] == 4
    table = pdbus(directory, "status").stdout
    assert "decode-0/1" in table
    assert "estimate" in table
    assert "\nrequests: 0 live, 0 waiting, 7 done" in table  # then perhaps: one left before it was told so
    assert "failed:" not in table

    unknown = pdbus(directory, "generate", "hi", "--routed-dp-rank", "9")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "bad_rank" in unknown.stderr

    unable = pdbus(directory, "generate", "hi", "--min-p", "0.1")
    assert (unable.returncode, unable.stdout) == (1, "")
    assert unable.stderr.startswith("pdbus: error: bad_request: no prefill rank knows min_p")
    refused = pdbus(directory, "generate", "hi", "--json", "--routed-dp-rank", "9")
    assert (refused.returncode, refused.stderr) == (1, unknown.stderr)
    error = json.loads(refused.stdout)
    assert (error["code"], error["retryable"]) == ("bad_rank", False)
    assert error["message"] in unknown.stderr
    assert error["rid"]

    drained = pdbus(directory, "drain", "decode-0/1")
    assert (drained.returncode, drained.stdout) == (0, "decode-0/1 has finished and left\n"), drained.stderr
    nobody = pdbus(directory, "drain", "decode-0/7")
    assert nobody.returncode == 1
    assert "no rank decode-0/7" in nobody.stderr
    for _ in range(2):
        assert (
            json.loads(pdbus(directory, "generate", "hi", "--json", "--max-tokens", "1").stdout)["decode"]
            == "decode-0/0"
        )

    pids = parts_of(up)
    code, errors = leave(up)
    assert code == 130, errors
    assert "pdbus up: decode-0/1 has left" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(directory.iterdir()) == []


@pytest.mark.cold  # it reads command lines of what `up` starts
def test_a_rank_that_hangs_is_lost_and_the_rest_goes_on(up: Up, directory: Path) -> None:
    read_until(up, r"^READY bus=")
    warm_starts.STARTS.on = True
    ranks = json.loads(pdbus(directory, "status", "--json").stdout)["controller"]["ranks"]
    assert len(ranks) == 4
    until = time.monotonic() + 60
    while min(map(float, of_ranks(directory, "report_age_s").values())) < 0:  # not every rank has reported yet
        assert time.monotonic() < until
        time.sleep(0.1)
    victim = next(pid for pid in parts_of(up) if "nodes.decode" in Path(f"/proc/{pid}/cmdline").read_text())
    words = Path(f"/proc/{victim}/cmdline").read_text().split("\0")
    os.kill(victim, signal.SIGSTOP)
    answer = pdbus(directory, "generate", "5 6", "--tokens", "--max-tokens", "3")
    assert [int(word) for word in answer.stdout.split()] == sim_generate([5, 6], 3), answer.stderr
    lost = f"decode-0/{words[words.index('--dp-rank') + 1]}"
    until = time.monotonic() + 60
    while (states := of_ranks(directory, "state"))[lost] != "lost":
        assert time.monotonic() < until, states
        time.sleep(0.1)
    gone = pdbus(directory, "drain", lost)
    assert gone.returncode == 3
    assert re.search(rf"error: {lost} is lost: it has been silent for \d+ s", gone.stderr), gone.stderr
    code, errors = leave(up, signal.SIGTERM)
    assert code == 130, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_generate_that_is_ended_cancels_its_request(up: Up, directory: Path, number: int) -> None:
    read_until(up, r"^READY bus=")
    command = [sys.executable, "-P", "-m", "pdbus", "generate", "5 6 7", "--tokens", "--max-tokens", "60000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_env(directory)
    )  # fmt: skip
    read_until(process, r"\d+ \d+")
    until = time.monotonic() + UNREAD_S  # without a cancel a node waits so long for another reader
    assert leave(process, number)[0] == 130
    with Client(f"ipc://{directory}/controller") as client:
        ranks = client.status().ranks
        while any(rank.outstanding or rank.load is None or rank.load.running for rank in ranks):
            assert time.monotonic() < until, ranks
            time.sleep(0.05)
            ranks = client.status().ranks
    decode = [(rank.ended_total, rank.failed_total) for rank in ranks if rank.role == "decode"]
    assert sorted(decode)[-1] == (1, 1), "it did not just finish"


@pytest.mark.parametrize("other", ["", "--bus", "--controller"])
def test_two_clusters_at_one_place(up: Up, directory: Path, tmp_path: Path, other: str) -> None:
    """`other`: the address that the second one does not share with the first."""
    read_until(up, r"^READY bus=")
    epochs = of_ranks(directory, "epoch")
    elsewhere = [other, f"ipc://{directory}/other"] if other else []
    second = pdbus(directory, "up", "--model", "sim", "--log-dir", str(tmp_path), *elsewhere)
    assert second.returncode == 3
    said = second.stderr.splitlines()
    assert re.fullmatch(r"pdbus: error: \S+: ipc://\S+ is taken: stop what runs there .*", said.pop())
    assert all(line.startswith(("starting ", "waiting ")) for line in said), "progress, on a busy machine"
    assert {log.stem for log in tmp_path.iterdir()} == {"broker", "controller-0"}, "no node"
    answer = pdbus(directory, "generate", "5 6 7", "--tokens", "--max-tokens", "6")
    assert [int(word) for word in answer.stdout.split()] == sim_generate([5, 6, 7], 6), answer.stderr
    assert of_ranks(directory, "epoch") == epochs
    assert set(of_ranks(directory, "state").values()) == {"ready"}
    assert leave(up)[0] == 130
