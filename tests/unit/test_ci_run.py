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
LANES = ("FIRST", "COMPUTES", "WAITS", "ALONE")
WAIT_S = 60


class Tree:
    """One with the lines of `.ci/run`'s targets that a test has, and a script for sh as `make`, its target as $1."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def started(
        self, make: str, computes: str = "", waits: str = "", alone: str = "", first: str = ""
    ) -> subprocess.Popen[str]:
        (self.place / ".ci").mkdir()
        whole = RUN.read_text()
        for lane, targets in zip(LANES, (first, computes, waits, alone), strict=True):
            whole, lines = re.subn(rf"(?<=<<'{lane}' &\n).*(?=^{lane}\n)", targets, whole, flags=re.DOTALL | re.M)
            assert lines == 1
        (self.place / ".ci" / "run").write_text(whole)
        (self.place / "make").write_text(f"#!/bin/sh\n{make}")
        (self.place / "make").chmod(0o755)
        env = os.environ | {"PATH": f"{self.place}:{os.environ['PATH']}", "TMPDIR": str(self.place)}
        command, pipe = ["bash", str(self.place / ".ci" / "run")], subprocess.PIPE
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def run(self, make: str, *lanes: str, **named: str) -> subprocess.CompletedProcess[str]:
        with self.started(make, *lanes, **named) as process:
            try:
                said, wrong = process.communicate(timeout=WAIT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, said, wrong)

    def pids(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.place / "pids").read_text().split()]
        except OSError:
            return []


@pytest.fixture
def ci(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def eventually(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def timeless(said: str) -> list[str]:
    return re.sub(r"\d+ s\n", "N s\n", said).splitlines()


def test_targets_of_a_lane_run_in_a_row_each_with_its_time_and_nothing_to_read(ci: Tree) -> None:
    done = ci.run('cat; echo "this is $1"; echo "and $1 errs" >&2', "check 3600\ntest 3600\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert timeless(done.stdout) == [
        "this is check", "and check errs", "==> check: N s", "this is test", "and test errs", "==> test: N s",
        "==> all passed: N s",
    ]  # fmt: skip


def test_two_lanes_run_side_by_side_and_the_second_says_all_at_its_end(ci: Tree) -> None:
    make = """
await() { until [ -e "$1" ]; do sleep 0.02; done; }
echo "$1 begins"; touch "$1"
case $1 in
    test) await test-ray; echo said; touch said; await done;;
    test-ray) await said; echo more; touch done;;
esac"""
    done = ci.run(make, "test 3600\n", "test-ray 3600\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "test-ray begins\nmore\n==> test-ray: N s" in "\n".join(timeless(done.stdout))


def test_the_set_up_runs_before_both_lanes_and_the_last_lane_after_them(ci: Tree) -> None:
    make = """
case $1 in
    setup) [ ! -e test ] && [ ! -e test-ray ]; rc=$?;;
    test-hostile) [ -e test ] && [ -e test-ray ]; rc=$?;;
    *) [ -e setup ] && [ ! -e test-hostile ]; rc=$?;;
esac
sleep 0.3; touch "$1"; exit $rc"""
    done = ci.run(make, "test 3600\n", "test-ray 3600\n", "test-hostile 3600\n", "setup 3600\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("fails", ["test", "test-ray"])
def test_a_failure_in_either_lane_ends_both(ci: Tree, fails: str) -> None:
    make = f"""
if [ "$1" = {fails} ]; then until [ -e pids ]; do sleep 0.02; done; exit 1; fi
setsid sleep 3600 & echo $! >>most
echo $$ >>most; mv most pids; exec sleep 3600"""
    done = ci.run(make, "test 3600\n", "test-ray 3600\n", "test-hostile 3600\n")
    assert (done.returncode, done.stderr) == (1, f"==> {fails} failed\n")
    assert "test-hostile" not in done.stdout
    assert len(ci.pids()) == 2
    eventually(lambda: not any(map(lives, ci.pids())))


def test_a_signal_ends_both_lanes(ci: Tree) -> None:
    with ci.started("echo $$ >>pids; exec sleep 3600", "test 3600\n", "test-ray 3600\n") as process:
        eventually(lambda: len(ci.pids()) == 2)
        process.terminate()
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    eventually(lambda: not any(map(lives, ci.pids())))


def test_what_fails_twice_is_the_last(ci: Tree) -> None:
    done = ci.run('echo "$1"; [ "$1" = check ]', "check 3600\ntest-vllm 3600 again\ntest-ray 3600\n")
    assert done.returncode == 1
    assert "test-ray" not in done.stdout
    assert done.stdout.count("==> test-vllm: ") == 2
    assert done.stderr == "==> test-vllm failed\n"


def test_without_a_second_try_a_failure_is_the_last(ci: Tree) -> None:
    done = ci.run("false", "check 3600\ntest 3600 again\n")
    assert (done.returncode, done.stderr) == (1, "==> check failed\n")
    assert done.stdout.count("==> check: ") == 1


@pytest.mark.parametrize(
    ("fails", "limit", "again"), [("exit 1", 3600, "--lf --lfnf=none"), ("exec sleep 3600", 3, "")]
)
@pytest.mark.parametrize("lane", ["computes", "waits"])
def test_what_passes_at_the_second_try_is_named_at_the_end(
    ci: Tree, fails: str, limit: int, again: str, lane: str
) -> None:
    """Of what failed, only the failed tests run once more; of what hung, all."""
    make = f'echo "$1 [$AGAIN]"; [ -e been ] || {{ touch been; {fails}; }}'
    done = ci.run(make, **{lane: f"test {limit} again\ntest-ray 3600\n"})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"test [{again}]" in done.stdout.split("it has one more try")[1]
    assert "==> passed at the second try only: test\n" in done.stdout


def test_what_hangs_ends(ci: Tree) -> None:
    done = ci.run("exec sleep 3600", "test 1\ntest-ray 3600\n")
    assert (done.returncode, done.stderr) == (1, "==> test ran into its limit of 1 s\n")


@pytest.mark.parametrize("lane", ["computes", "waits", "alone"])
def test_what_outlives_its_target_is_killed_and_holds_no_pipe(ci: Tree, lane: str) -> None:
    leaves = "setsid sleep 3600 & echo $! >>pids\nsleep 3600 & echo $! >>pids"
    assert ci.run(leaves, **{lane: "check 3600\ntest 3600\n"}).returncode == 0
    assert len(ci.pids()) == 4
    eventually(lambda: not any(map(lives, ci.pids())))


def test_nothing_is_left_of_it(ci: Tree) -> None:
    assert ci.run("echo", "check 3600\n", "test 3600\n").returncode == 0
    assert sorted(path.name for path in ci.place.iterdir()) == [".ci", "make"]


def test_every_lane_has_targets_of_the_makefile_and_none_stands_twice() -> None:
    makefile = (RUN.parents[1] / "Makefile").read_text()
    targets = re.findall(r"^(setup|check|test\S*) \d+", RUN.read_text(), re.MULTILINE)
    assert len(targets) == len(set(targets))
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


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
    without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # which loads Hypothesis: a third of the session
    argv = [sys.executable, "-m", "pytest", "-q", *without, "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    counts = Counter({what: int(n) for n, what in re.findall(r"(\d+) (failed|skipped|error)", done.stdout)})
    assert counts["failed"] + counts["error"] == failed, done.stdout
    assert ("skipped in CI, where that is a failure" in done.stdout) is bool(failed)
