"""How benchmark figures are summed up and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import BENCHMARKS, plot, table, vllm
from benchmarks.__main__ import NAMES
from benchmarks.harness import Aim, PartFailed, Row, Scope, in_child, percentile, row
from benchmarks.pick import Hits, pairs_of


def test_a_row_is_of_medians_and_their_ratio() -> None:
    made = row("8 ranks", "pick", "µs", [4.0, 2.0, 3.0], [1.0, 2.0, 9.0])
    assert (made.value, made.floor, made.ratio) == (3.0, 2.0, 1.5)
    assert made.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)


def test_one_run_has_no_spread_and_no_floor_no_ratio() -> None:
    made = row("8 ranks", "pick", "µs", [4.0])
    assert (made.spread, made.floor, made.ratio, made.met) == (None, None, None, None)


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        (Aim(1.5), True),
        (Aim(1.4), False),
        (Aim(3.0, of_ratio=False), True),
        (Aim(2.9, of_ratio=False), False),
        (Aim(3.0, of_ratio=False, at_least=True), True),
        (Aim(3.1, of_ratio=False, at_least=True), False),
    ],
)
def test_an_aim_is_for_the_ratio_or_the_value(aim: Aim, met: bool) -> None:
    assert row("c", "m", "µs", [3.0], [2.0], aim).met is met


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.123"), (12.34, "12.3"), (999.9, "1,000"), (12_345.6, "12,300"), (1_234_567, "1,230,000")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert table.number(value) == text


ROWS = [Row("512 B", "cpu", 60.0, "µs", 40.0, 1.5, 0.1, Aim(1.5)), Row("512 B", "rate", 9e3, "1/s")]


def test_json_is_one_object_with_the_keys_that_programs_read() -> None:
    one = json.loads(table.as_json([("dispatch", "title", ROWS)]))
    assert one["name"] == "dispatch"
    assert one["rows"][0] == {
        "case": "512 B", "metric": "cpu", "value": 60.0, "unit": "µs", "floor": 40.0, "ratio": 1.5, "spread": 0.1
    }  # fmt: skip
    several = json.loads(table.as_json([("dispatch", "title", ROWS), ("pick", "title", ROWS)]))
    assert several["name"] == "all"
    assert [each["case"] for each in several["rows"]] == ["dispatch: 512 B"] * 2 + ["pick: 512 B"] * 2


def test_tables_say_whether_an_aim_is_met() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    table.show(console, "dispatch", ROWS)
    console.file.close()
    assert "≤ 1.5× │ met" in console.export_text()
    assert "| 512 B | cpu | 60 µs | ±10% | 40 µs | 1.50× | ≤ 1.5× | met |" in table.markdown([("d", "t", ROWS)])


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    assert plot.save([("dispatch", "title", ROWS)], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert not plot.save([("idle", "title", ROWS[1:])], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_command_offers_what_there_is() -> None:
    assert tuple(BENCHMARKS) == NAMES


def test_a_part_that_fails_says_why() -> None:
    with pytest.raises(PartFailed, match="no_such_method"):
        in_child("pick:measure", method="no_such_method", ranks=8, picks=10)


def test_a_part_measures_in_a_process_of_its_own() -> None:
    taken = in_child("pick:measure", method="total_tokens", ranks=8, picks=300)
    assert len(taken["ours"]) == len(taken["argmin"]) > 1
    assert min(taken["ours"]) > 0


def test_a_placement_of_pairs_says_by_method_what_it_takes() -> None:
    taken = in_child("pick:measure_pairs", ranks=8, pairs=20, blocks=16, holders=2)
    assert {*taken} == {"least_cost", "cache_aware"}
    assert len(taken["least_cost"]) == len(taken["cache_aware"]) > 1
    balancer, (submit, *_) = pairs_of("least_cost", 8, Hits(16, 2), 1)
    placed = balancer.place(submit, 0.0)
    assert placed.predicted is not None
    assert placed.predicted[0] < placed.predicted[1], "a decode rank has all of it, a prefill rank three quarters"


class Part:
    """A process whose processor time the test moves."""

    name = "part"

    def __init__(self) -> None:
        self.us = 0.0

    def cpu_s(self) -> float:
        return self.us / 1e6


def test_what_the_bus_adds_to_vllm_stands_beside_what_http_adds() -> None:
    """A request costs its tokens after the first less; the engine alone is taken off both."""

    class Caller(Part):
        def __init__(self, request_us: float, token_us: float, server: Part | None = None) -> None:
            super().__init__()
            self.costs, self.server = (request_us, token_us), server

        def ask(self, count: int, concurrency: int, output: int) -> dict[str, object]:
            request, token = self.costs
            self.us += count * (100 + 10 * (output - 1))
            (self.server or self).us += count * (request + token * (output - 1))
            return {"first_us": [2000.0] * count, "elapsed_s": 2.0}

    ways = []
    for name, request, token in (("alone", 0, 0), ("bus", 250, 13), ("http", 700, 22)):
        server = Part() if name != "alone" else None
        ways.append(vllm.Way(name, Caller(request, token, server), (server,) if server else ()))  # type: ignore[arg-type]
    for way in ways * 2:
        vllm._measure(way, Scope(quick=True))
    rows = {(made.case, made.metric): made for made in vllm._rows(*ways)}
    added = {metric: made for (case, metric), made in rows.items() if case.startswith("added")}
    assert {metric: (round(made.value), round(made.floor or 0), made.met) for metric, made in added.items()} == {
        "CPU a request": (150, 600, True),
        "CPU a request, with the caller's": (250, 700, True),
        "CPU a token": (3, 12, True),
        "CPU a token, with the caller's": (13, 22, True),
    }
    assert rows["bus", "tokens/s"].value == 4 * vllm.OUTPUT_TOKENS / 2.0
    assert rows["bus", "time to first token"].ratio == 1.0
