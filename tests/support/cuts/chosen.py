"""Which cuts a change calls for: those whose symbol's file, test's file or entry it touches, and a tenth by date."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable

from cuts import ROOT, Cut

DAY_S = 86400
HERE = "tests/support/cuts"
AREAS = {"M": "protocol", "S": "security", "E": "edge"}


def git(*words: str) -> list[str]:
    """The lines of its answer; none where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def base() -> str:
    """Where this branch left the one that it goes to, `origin/HEAD`. Where that is HEAD itself, or there is none: the
    commit before the first one of the last day. Empty: there is no such commit, or no git."""
    head = git("rev-parse", "HEAD")
    left = git("merge-base", "HEAD", "origin/HEAD")
    if left and left != head:
        return left[0]
    today = git("rev-list", "--first-parent", "--since=1 day ago", "HEAD")
    before = git("rev-parse", f"{today[-1]}~1") if today else []
    return before[0] if before else ""


def changed(since: str) -> set[str]:
    """Paths that differ from `since`, those that are not committed included."""
    return {*git("diff", "--name-only", since, "--"), *git("ls-files", "--others", "--exclude-standard")}


def touched(cut: Cut, paths: set[str]) -> bool:
    """Its symbol's file, its test's, its area's entries, or what runs it."""
    test, _, _ = cut.test.partition("::")
    mine = {cut.file, f"tests/{test}", f"{HERE}/{AREAS[cut.promise[0]]}.py"}
    runs = {f"{HERE}/{name}.py" for name in ("__init__", "run", "site/cut_hook")}
    return bool((mine | runs) & paths)


def choose(cuts: Iterable[Cut], since: str, day: int | None = None) -> tuple[list[Cut], str]:
    """Those of `cuts` to be run, and in words why."""
    digit = (int(time.time() // DAY_S) if day is None else day) % 10
    paths = changed(since) if since else set()
    chosen = [each for each in cuts if touched(each, paths) or int(each.promise[1:]) % 10 == digit]
    files = f"what {len(paths)} files changed since {since[:12]} touch" if since else "no earlier commit is known"
    return chosen, f"{files}, and those whose number ends in {digit}"
