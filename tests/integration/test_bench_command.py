"""`python -m benchmarks` runs, reports and leaves its files; no figure is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("name", ["report", "e2e", "client", "edge", "lab"])
def test_json_table_and_plot(name: str, tmp_path: Path) -> None:
    done = bench(name, "--quick", "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["name"] == name
    for row in result["rows"]:
        assert set(row) >= {"case", "metric", "value", "unit", "floor", "ratio"}
        assert row["value"] > 0
        assert row["ratio"] is None or row["ratio"] == pytest.approx(row["value"] / row["floor"])
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == result
    assert f"## {name}" in (tmp_path / "out" / "bench.md").read_text()
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert f"{name}: " in done.stderr, "progress"


@pytest.mark.slow
def test_dispatch_beside_the_bare_broker() -> None:
    done = bench("dispatch", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["case"] for row in rows] == [case for case in ("512 B", "8 KiB", "128 KiB") for _ in range(3)]
    assert all(row["floor"] > 0 for row in rows)


def test_failover() -> None:
    done = bench("failover", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["metric"] for row in rows] == ["least of 1 kills", "median of 1 kills", "greatest of 1 kills"]
    assert all(row["value"] > 0.4 for row in rows), "the ranks have half a second to come back"


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    done = bench("pick", "--quick", "--out", "/dev/null/out")
    assert done.returncode == 2
    assert "/dev/null/out" in done.stderr
    assert "Traceback" not in done.stderr


def test_vllm_where_it_is_not_installed_is_one_line() -> None:
    if find_spec("vllm"):
        pytest.skip("it is installed here")
    done = bench("vllm", "--quick")
    assert done.returncode == 2
    assert "needs the Python package 'vllm'; run: pip install vllm" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_one_of_sglang_says_what_it_needs() -> None:
    """By name only: it is none of all benchmarks."""
    done = bench("sglang")
    assert done.returncode == 2
    assert "benchmarks need sglang: pip install sglang" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("peer", ["vllm=/no/python", "tgi=/usr/bin/python3", "vllm"])
def test_a_peer_that_cannot_be_is_one_line(peer: str) -> None:
    done = bench("peers", "--peer", peer)
    assert done.returncode == 2
    assert f"--peer {peer}: name one of sglang, vllm, compiled and a Python that can be run" in done.stderr
    assert "Traceback" not in done.stderr
