"""`.ci/run` ends whatever its targets do. A stand-in for `make` runs here, with limits of a second or of an hour."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
Run = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture
def ci(tmp_path: Path) -> Run:
    def run(targets: str, make: str) -> subprocess.CompletedProcess[str]:
        """Of a tree with these lines as `.ci/run`'s targets; `make` is a script for sh, with the target as $1."""
        (tmp_path / ".ci").mkdir()
        whole, lines = re.subn(r"(?<=<<'TARGETS'\n).*(?=TARGETS\n)", targets, RUN.read_text(), flags=re.DOTALL)
        assert lines == 1
        (tmp_path / ".ci" / "run").write_text(whole)
        (tmp_path / "make").write_text(f"#!/bin/sh\n{make}")
        (tmp_path / "make").chmod(0o755)
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        return subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")], env=env, capture_output=True, text=True, timeout=60
        )

    return run


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_targets_run_in_a_row_each_with_its_time_and_nothing_to_read(ci: Run) -> None:
    done = ci("check 3600\ntest 3600\n", 'cat; echo "this is $1"; echo "and $1 errs" >&2')
    assert (done.returncode, done.stderr) == (0, "")
    said = re.sub(r"\d+ s\n", "N s\n", done.stdout)
    assert said.splitlines() == [
        "this is check", "and check errs", "==> check: N s", "this is test", "and test errs", "==> test: N s",
        "==> all passed: N s",
    ]  # fmt: skip


def test_the_first_that_fails_is_the_last(ci: Run) -> None:
    done = ci("check 3600\ntest-vllm 3600 again\ntest-ray 3600\n", 'echo "$1"; [ "$1" = check ]')
    assert done.returncode == 1
    assert "test-ray" not in done.stdout
    assert done.stderr == "==> test-vllm failed\n", "what failed is not tried again"


def test_an_engine_that_hangs_is_tried_once_more_and_nothing_else(ci: Run) -> None:
    hangs_once = 'echo "$1"; [ -e been-$1 ] || { touch been-$1; exec sleep 3600; }'
    done = ci("test-vllm 1 again\ntest 1\ntest-ray 3600\n", hangs_once)
    assert done.returncode == 1
    assert "==> test-vllm ran into its limit of 1 s: it has one more try" in done.stdout
    assert done.stdout.count("==> test-vllm: ") == 2
    assert done.stderr == "==> test ran into its limit of 1 s\n"


def test_what_outlives_its_target_is_killed_and_holds_no_pipe(ci: Run, tmp_path: Path) -> None:
    leaves = "setsid sleep 3600 & echo $! >>pids\nsleep 3600 & echo $! >>pids"
    assert ci("check 3600\ntest 3600\n", leaves).returncode == 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    end = time.monotonic() + 60
    while any(map(lives, pids)):
        assert time.monotonic() < end, "all are killed"
        time.sleep(0.02)


def test_the_limits_together_are_less_than_a_runner_gives() -> None:
    text = RUN.read_text()
    last = int(re.search(r"^LAST=(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    limits = [int(limit) for limit in re.findall(r"^(?:check|test\S*) (\d+)", text, re.MULTILINE)]
    assert sum(limits) <= last < 90 * 60
