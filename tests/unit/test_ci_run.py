"""`.ci/run` ends whatever its targets do. A stand-in for `make` runs here, with limits of a second or of an hour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ci_skips
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


def test_what_fails_twice_is_the_last(ci: Run) -> None:
    done = ci("check 3600\ntest-vllm 3600 again\ntest-ray 3600\n", 'echo "$1"; [ "$1" = check ]')
    assert done.returncode == 1
    assert "test-ray" not in done.stdout
    assert done.stdout.count("==> test-vllm: ") == 2
    assert done.stderr == "==> test-vllm failed\n"


def test_without_a_second_try_a_failure_is_the_last(ci: Run) -> None:
    done = ci("check 3600\ntest 3600 again\n", "false")
    assert (done.returncode, done.stderr) == (1, "==> check failed\n")
    assert done.stdout.count("==> check: ") == 1


@pytest.mark.parametrize(
    ("fails", "limit", "again"), [("exit 1", 3600, "--lf --lfnf=none"), ("exec sleep 3600", 3, "")]
)
def test_what_passes_at_the_second_try_is_named_at_the_end(ci: Run, fails: str, limit: int, again: str) -> None:
    """Of what failed, only the failed tests run once more; of what hung, all."""
    done = ci(f"test {limit} again\ntest-ray 3600\n", f'echo "$1 [$AGAIN]"; [ -e been ] || {{ touch been; {fails}; }}')
    assert (done.returncode, done.stderr) == (0, "")
    assert f"test [{again}]" in done.stdout.split("it has one more try")[1]
    assert "==> passed at the second try only: test\n" in done.stdout


def test_what_hangs_ends(ci: Run) -> None:
    done = ci("test 1\ntest-ray 3600\n", "exec sleep 3600")
    assert (done.returncode, done.stderr) == (1, "==> test ran into its limit of 1 s\n")


def test_what_outlives_its_target_is_killed_and_holds_no_pipe(ci: Run, tmp_path: Path) -> None:
    leaves = "setsid sleep 3600 & echo $! >>pids\nsleep 3600 & echo $! >>pids"
    assert ci("check 3600\ntest 3600\n", leaves).returncode == 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    end = time.monotonic() + 60
    while any(map(lives, pids)):
        assert time.monotonic() < end, "all are killed"
        time.sleep(0.02)


def test_no_limit_reaches_beyond_what_a_runner_gives() -> None:
    """Each attempt has at most what is left until LAST, whatever its limit."""
    text = RUN.read_text()
    last = int(re.search(r"^LAST=(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
    limits = [int(limit) for limit in re.findall(r"^(?:check|test\S*) (\d+)", text, re.MULTILINE)]
    assert len(limits) > 10
    assert max(limits) < last < 90 * 60


SKIPPED = """
import pytest
{module}
@pytest.mark.skipif(True, reason="{mark}")
def test_one(): ...
def test_two(): pytest.skip("no node here")
"""


@pytest.mark.parametrize(
    ("target", "module", "mark", "failed"),
    [
        ("", "", "no systemd-analyze", 0),
        ("1-test-1", "", "no systemd-analyze", 2),
        ("1-test-1", "", "make test-k8s has kubectl", 1),
        ("1-test-1", "pytest.importorskip('nothing_of_that_name')", "x", 1),
        ("1-test-1", "", "torch is not installed", 2),
        ("1-test-newest-1", "", "torch is not installed", 1),
    ],
)
def test_a_skip_for_want_of_a_tool_is_a_failure(
    tmp_path: Path, target: str, module: str, mark: str, failed: int
) -> None:
    (tmp_path / "conftest.py").write_text("import ci_skips\npytest_configure = ci_skips.install\n")
    (tmp_path / "test_it.py").write_text(SKIPPED.format(module=module, mark=mark))
    env = {name: value for name, value in os.environ.items() if name != "PDBUS_CI_TARGET"}
    env |= {"PYTHONPATH": str(Path(ci_skips.__file__).parent)} | ({"PDBUS_CI_TARGET": target} if target else {})
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    counts = Counter({what: int(n) for n, what in re.findall(r"(\d+) (failed|skipped|error)", done.stdout)})
    assert counts["failed"] + counts["error"] == failed, done.stdout
    assert ("skipped in CI, where that is a failure" in done.stdout) is bool(failed)
