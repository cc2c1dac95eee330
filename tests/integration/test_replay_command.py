"""`pdbus replay` as a user calls it: table, JSON, files, one-line errors; and against live sim nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.lab.choosers import METHODS

SHORT = ("--duration-s", "40", "--jobs", "1")


def replay(*arguments: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_json_is_what_the_table_is_made_of() -> None:
    done = replay(*SHORT, "--methods", "total_tokens,cache_aware", "--json", "--ranks", "4", "--seed", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trace"] == "generated-3"
    assert found["ranks"] == 4
    assert list(found["methods"]) == ["total_tokens", "cache_aware"]
    for summary in found["methods"].values():
        assert 0 < summary["ttft_p50_s"] <= summary["ttft_p99_s"]
        assert summary["ttft_mean_s"] > 0 < summary["tpot_mean_s"]
        assert 0 <= summary["cache_hit_rate"] <= 1
        assert summary["regret_mean_tokens"] >= 0
    again = replay(
        *SHORT, "--methods", "total_tokens,cache_aware", "--json", "--ranks", "4", "--seed", "3", "--jobs", "2"
    )
    assert json.loads(again.stdout) == found


def test_a_mooncake_file_all_methods_table_and_plots(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    rows = [
        {
            "timestamp": 3000 * (n // 4),
            "input_length": 900 + 512 * (n % 7),
            "output_length": 9,
            "hash_ids": [n % 3, 5 + n],
        }
        for n in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "plots"
    done = replay(str(trace), "--methods", "all", "--jobs", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in METHODS)
    for name in ("ttft.png", "load.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads((out / "replay.json").read_text())["requests"] == 60


def test_markdown() -> None:
    done = replay(*SHORT, "--methods", "oracle", "--markdown", "--decode-ranks", "0")
    assert done.stdout.splitlines()[0].startswith("| method | TTFT mean s |")
    assert "| `oracle` |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere.jsonl",), "cannot read the trace nowhere.jsonl: No such file"),
        (("--methods", "best"), "unknown method 'best' for replay: choose from round_robin"),
        (("--methods", ","), "--methods names no method"),
        (("--load", "-1"), "--load must not be negative"),
        (("--report-loss", "1"), "--report-loss must lie in 0..1"),
        (("--duration-s", "0"), "--duration-s must lie"),
        (("--live", "--methods", "oracle"), "--live runs what a controller can"),
        (("--ranks", "many"), "'many' is not a valid integer"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: tuple[str, ...], says: str) -> None:
    done = replay(*SHORT, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pdbus replay: error: ") or done.stderr.startswith("pdbus: error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_live_nodes_and_virtual_ones_side_by_side() -> None:
    done = replay("--live", "--duration-s", "12", "--ranks", "2", "--decode-ranks", "2", "--load", "0.7", "--methods",
                  "cache_aware", "--json", "--cache-blocks", "1000")  # fmt: skip
    assert done.returncode == 0, done.stderr
    live, virtual = json.loads(done.stdout)["methods"].values()
    assert live["cache_hit_rate"] == pytest.approx(virtual["cache_hit_rate"], abs=0.1)
    assert 0.7 < live["ttft_mean_s"] / virtual["ttft_mean_s"] < 2.5  # the machine may be busy with other things
    assert live["regret_mean_tokens"] is None
