"""`pdbus plan` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from explored import Page

SHORT = ("--duration-s", "40", "--ranks", "4", "--seeds", "1", "--jobs", "1")


def plan(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=os.environ | env)


def test_a_table_a_command_to_run_and_files(tmp_path: Path) -> None:
    done = plan(*SHORT, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "keeps" in lines[-2]
    assert lines[-1].startswith("  python -m controller --prefill-method ")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["best"] == found["tried"][0]
    assert all(row["prefill"] + row["decode"] == 4 for row in found["tried"] + found["splits"])
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_unified_ranks_are_tried_too(tmp_path: Path) -> None:
    done = plan(*SHORT, "--unified", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(row["prefill"] + row["decode"] + row["unified"] == 4 for row in found["tried"])
    assert {row["unified"] for row in found["tried"]} == {0, 1, 2, 4}
    assert not any(row["unified"] for row in found["splits"])


def test_a_page_has_the_best_choices_and_all_in_its_table(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    done = plan(*SHORT, "--unified", "--json", "--html", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(plan(*SHORT, "--unified", "--json").stdout)
    head = Page(path.read_text(encoding="utf-8")).data.head
    assert head["command"] == "plan"
    assert len(head["rows"]) == len(found["tried"]) > 5
    assert [run["name"] for run in head["runs"]] == [row[0] for row in head["rows"][:5]]
    assert head["loads"]["x"] == "the number of prefill ranks, of 4 ranks"
    shares = dict(head["loads"]["lines"])["cache_aware, total_requests, order slo"]
    assert [x for x, _ in shares] == [row["prefill"] for row in found["splits"]]
    assert f"{len(found['tried']) - 5} of the choices tried are in the table alone" in head["notes"][0]


@pytest.mark.parametrize("more", [(), ("--unified",)], ids=["pairs", "unified"])
def test_eighty_columns_show_the_choice_whole(more: tuple[str, ...]) -> None:
    done = plan(*SHORT, *more, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-2])) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", "1"), "1 is not in the range"),
        (("--rate", "100", "--ranks", "2", "--duration-s", "40"), "cannot serve this"),
        (("no-such-trace.csv",), "cannot read the trace"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.strip().count("\n") == 0
