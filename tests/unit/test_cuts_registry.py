"""Each promise of the documents has one entry among the cuts, and each entry a test and a patch that fits; which of
them a change calls for, and what counts as an assertion (tests/support/cuts)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from textwrap import dedent

import cuts
import pytest
from cuts import ROOT, Cut, Uncut, chosen, cut_hook
from cuts.run import GOOD, Verdict, judge

ENTRIES = cuts.registry()
CUTS = [entry for entry in ENTRIES if isinstance(entry, Cut)]
BIND_PEERS = {  # a part of ours has to do with who breaks one of these: its test plays a peer that does
    "M2", "M3", "M4", "M5", "M6", "M7", "M9", "M10", "M11", "M12", "M13", "M19", "M25", "M32", "M34", "M44", "M56",
    "M60", "M62", "M65", "M67", "M69", "M71", "M77", "M79", "M80", "M82", "M85", "M87",
}  # fmt: skip


def promised(page: str, pattern: str) -> list[str]:
    return re.findall(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)


@lru_cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@lru_cache
def named_in(path: Path) -> frozenset[str]:
    """The names of its tests, below their classes'."""
    names = []
    for node in ast.parse(source(path)).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names += [prefix + each.name for each in inside if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(names)


@pytest.mark.parametrize(
    ("letter", "page", "pattern"),
    [
        ("M", "protocol.md", r"^- \[(M\d+)\] "),
        ("S", "security.md", r"\[(S\d+)\]"),
        ("E", "edge.md", r"\[(E\d+)\]|^\| (E\d+) \|"),
    ],
)
def test_each_promise_has_one_entry(letter: str, page: str, pattern: str) -> None:
    said = Counter("".join(found) for found in promised(page, pattern))
    assert not [promise for promise, times in said.items() if times > 1], "each id is of one promise"
    held = Counter(entry.promise for entry in ENTRIES if entry.promise[0] == letter)
    assert held == said


def test_each_names_a_test_that_is_there() -> None:
    for entry in ENTRIES:
        file, _, name = entry.test.partition("::")
        assert (ROOT / "tests" / file).is_file(), entry
        assert name.partition("[")[0] in named_in(ROOT / "tests" / file), entry


def test_each_patch_fits_and_is_a_program() -> None:
    for cut in sorted(CUTS, key=lambda cut: cut.file):
        text = source(ROOT / cut.file)
        assert cut_hook.patched(text, cut.symbol, cut.old, cut.new) != text
        ast.parse(dedent(cut_hook.part(text, cut.symbol).replace(cut.old, cut.new)))


def test_few_have_none_and_say_why() -> None:
    without = [entry for entry in ENTRIES if isinstance(entry, Uncut)]
    assert len(without) <= 10
    assert all(entry.why for entry in without)


def test_what_binds_peers_has_a_test_that_plays_one() -> None:
    assert {cut.promise for cut in CUTS if cut.peer} == BIND_PEERS


def test_a_patch_that_does_not_fit_is_an_error() -> None:
    code = "X = 1\nclass A:\n    def f(self):\n        return 1\nif X:\n    def g():\n        return 1, 1\n"
    assert "return 2\n" in cut_hook.patched(code, "m:A.f", "return 1", "return 2")
    assert cut_hook.patched(code, "m:X", "1", "9").startswith("X = 9\n")
    for symbol, old in (("m:A.f", "return 3"), ("m:A.h", "return 1"), ("m:g", "1"), ("m:B", "1")):
        with pytest.raises(cut_hook.CutMissed):
            cut_hook.patched(code, symbol, old, "2")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("assert 1 == 2", GOOD),
        ("pytest.fail('no')", GOOD),
        ("(one,) = []", GOOD),
        ("{}['a']", "KeyError: 'a'"),
        ("pytest.fail('Timeout >60.0s')", "timeout"),
        ("raise ExceptionGroup('both', [KeyError('a')])", "KeyError: 'a'"),
    ],
)
def test_what_counts_as_an_assertion(code: str, said: str) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        exec(compile(code, f"{ROOT}/tests/unit/test_x.py", "exec"), {"pytest": pytest})  # noqa: S102
    assert judge(caught.value, caught.tb) == said


def test_an_assertion_of_the_code_is_none_of_the_test() -> None:
    with pytest.raises(AssertionError) as caught:
        exec(compile("assert 1 == 2", f"{ROOT}/bus/x.py", "exec"))  # noqa: S102
    assert judge(caught.value, caught.tb).startswith("an assertion of the code")
    verdict = Verdict(CUTS[0])
    assert verdict.text == "the test did not run"
    verdict.ran = 1
    assert verdict.text == "the test passes: nothing holds this promise"
    verdict.failures = [GOOD]
    assert verdict.text == GOOD
    verdict.failures = [GOOD, "timeout"]
    assert verdict.text == "timeout"


CASES = """
import subprocess, sys

def test_of_a_process():
    code = "from bus.runtime.epochs import new_epoch; print(new_epoch())"
    said = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert said != "1\\n"
"""
RUN = """
import sys
from cuts import Cut
from cuts.run import run

cut = "bus.runtime.epochs:new_epoch", "secrets.randbelow(2**63 - 1)", "0"
for _, said, *_ in run([Cut("", f"support/cuts/{sys.argv[1]}::test_of_a_process", *cut)], 1):
    print(said)
"""


def test_a_cut_reaches_the_processes_of_its_test(tmp_path: Path) -> None:
    """In a process of its own: the runner forks, and moves to the root."""
    file = ROOT / "tests" / "support" / "cuts" / f"test_cases_{os.getpid()}.py"
    file.write_text(CASES, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    command = [sys.executable, "-c", RUN, file.name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        file.unlink()
    assert done.stdout.splitlines() == [GOOD], done.stderr


def test_a_change_calls_for_its_cuts_and_a_tenth_by_date(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*paths: str, day: int = 4) -> set[str]:
        monkeypatch.setattr(chosen, "changed", lambda since: set(paths))
        return {cut.promise for cut in chosen.choose(CUTS, "main", day)[0]}

    tenth = {cut.promise for cut in CUTS if int(cut.promise[1:]) % 10 == 4}
    assert of() == tenth
    assert of("bus/broker/rooms.py") - tenth == {"M29", "M30", "M31", "M32"}
    assert of("tests/unit/test_rooms.py") - tenth == {"M29", "M30", "M31"}
    assert {cut.promise for cut in CUTS} == of("tests/support/cuts/run.py")
    every = set[str]()
    for day in range(10):
        every |= of(day=day)
    assert every == {cut.promise for cut in CUTS}


def test_without_a_branch_to_go_to_a_days_commits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str, **env: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, env=os.environ | env, capture_output=True,
                              text=True, check=True, timeout=60)  # fmt: skip
        return done.stdout.strip()

    monkeypatch.setattr(chosen, "ROOT", tmp_path)
    assert chosen.base() == "", "no git"
    git("init", "-q")
    old = {"GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z", "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z"}
    git("commit", "-q", "--allow-empty", "-m", "old", **old)
    first = git("rev-parse", "HEAD")
    assert chosen.base() == "", "nothing of today"
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", name)
    assert chosen.base() == first
    (tmp_path / "c").write_text("c")
    assert chosen.changed(first) == {"a", "b", "c"}
    git("update-ref", "refs/remotes/origin/HEAD", "HEAD~1")
    assert chosen.base() == git("rev-parse", "HEAD~1")
    git("update-ref", "refs/remotes/origin/HEAD", "HEAD")
    assert chosen.base() == first, "on the branch itself"
