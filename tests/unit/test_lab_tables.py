"""Means and intervals, the table at any width, the words of progress, and looks that tell methods apart."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdbus.lab.choosers import METHODS
from pdbus.lab.compare import Result
from pdbus.lab.config import LabConfig
from pdbus.lab.metrics import Estimate, Summary, estimate, student_t
from pdbus.lab.plots import look_of, write_plots
from pdbus.lab.progress import Progress
from pdbus.lab.tables import COLUMNS, json_of, markdown_of, table_of, written

SUMMARY = Summary(1.0, 0.5, 8.0, 12.0, 0.009, 0.008, 0.026, 0.85, 3.5, 0.28, 54_087.6, 0.64, 0.5, 100.0)


def runs(methods: list[str], seeds: int) -> list[Result]:
    return [
        Result(
            method,
            seed,
            replace(SUMMARY, ttft_mean_s=1.0 + place + seed / 100),
            [0.1 * n for n in range(1, 101)],
            1.0,
            [[5_000 * (place + 1), 0], [0, 90_000]],
        )
        for place, method in enumerate(methods)
        for seed in range(1, seeds + 1)
    ]


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(estimate([1.0]).half_width)
    assert math.isnan(estimate([1.0, math.nan]).mean)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (9, 2.262), (15, 2.131), (30, 2.042), (999, 1.962)])
def test_students_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, abs=1e-3)


@pytest.mark.parametrize(
    ("mean", "half_width", "says"),
    [
        (1.08779, math.nan, "1.088"),
        (1.08779, 0.0213, "1.088 ±0.021"),
        (8.67, 0.534, "8.67 ±0.53"),
        (14.2, 20.1, "14 ±20"),
        (1.5, 0.0, "1.500 ±0.000"),
        (math.nan, math.nan, "–"),
    ],
)
def test_a_mean_is_written_as_far_as_it_is_known(mean: float, half_width: float, says: str) -> None:
    assert written(COLUMNS[0], Estimate(mean, half_width)) == says


@pytest.mark.parametrize("width", [45, 60, 80, 160])
@pytest.mark.parametrize("seeds", [1, 5])
def test_a_table_of_any_width_shows_all_of_it(width: int, seeds: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(table_of(runs(list(METHODS), seeds), "a title that is longer than a narrow terminal is wide", width))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    tables = sum("method" in line for line in lines)
    assert (tables == 1) == (width == 160)
    for method in METHODS:
        assert sum(line.split()[:1] == [method] for line in lines) == tables
    for heading in ("imba-", "regret", "busy", "hits"):
        assert sum(heading in line for line in lines[:-4]) == 1
    assert ("95 % confidence" in " ".join(shown.split())) == (seeds > 1)
    if seeds > 1:
        assert "1.030 ±0.020" in shown


def test_the_best_row_stands_out() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    console.print(table_of(runs(["round_robin", "cache_aware"], 2)[::-1], "", 160))
    bold = [line for line in console.file.getvalue().splitlines() if "\x1b[1m" in line]  # type: ignore[attr-defined]
    assert any("round_robin" in line for line in bold)
    assert not any("cache_aware" in line for line in bold)


def test_json_says_what_gave_it() -> None:
    found = json_of(runs(["oracle"], 2), "t", 9, LabConfig(ranks=3), {"timing": "h100-8b"})
    assert found == json.loads(json.dumps(found))
    assert found["version"]
    assert found["seeds"] == [1, 2]
    assert (found["ranks"], found["settings"]["report_interval_s"]) == (3, LabConfig().report_interval_s)
    assert found["options"] == {"timing": "h100-8b"}
    assert found["methods"]["oracle"]["ttft_mean_s"] == pytest.approx(1.015)
    assert found["half_width_95"]["oracle"]["ttft_mean_s"] == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert [(run["seed"], run["ttft_mean_s"]) for run in found["runs"]] == [(1, 1.01), (2, 1.02)]
    assert json_of(runs(["oracle"], 1), "t", 9, LabConfig(), {})["half_width_95"]["oracle"]["ttft_mean_s"] is None


def test_markdown_has_a_cell_a_column() -> None:
    head, rule, row = markdown_of(runs(["oracle"], 3)).splitlines()
    assert (
        head.count("|")
        == rule.count("|")
        == row.count("|")
        == 2 + sum(not (column.closed or column.optional) for column in COLUMNS)
    )
    assert "imbalance" in head


def test_progress_says_what_runs_how_many_are_done_and_what_is_left() -> None:
    progress = Progress(["a", "b", "c", "d"])
    assert progress.text(0.5) == "0 of 4 runs done"
    progress.share(1, 0.2, 10.0)  # the time before is that of the start
    assert progress.text(10.0) == "0 of 4 runs done: b 20%"
    progress.share(1, 0.6, 12.0)
    assert progress.text(12.0) == "0 of 4 runs done, about 17 s left: b 60%"
    progress.share(0, 1.0, 13.0)
    assert progress.text(14.0) == "1 of 4 runs done, about 7 s left: b 60%"


def test_every_method_has_a_look_of_its_own() -> None:
    looks = [str(look_of(method)) for method in (*METHODS, "cache_aware (virtual)", "somebody_elses")]
    assert len(set(looks)) == len(looks)
    assert look_of("cache_aware (virtual)")["color"] == look_of("cache_aware")["color"]


@pytest.mark.parametrize(("methods", "seeds"), [(10, 1), (3, 3)])
def test_plots_of_up_to_ten_methods(tmp_path: Path, methods: int, seeds: int) -> None:
    paths = write_plots(runs(list(METHODS)[:methods], seeds), tmp_path / "new", "a title")
    assert [path.name for path in paths] == ["methods.png", "ttft.png", "load.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in paths)
