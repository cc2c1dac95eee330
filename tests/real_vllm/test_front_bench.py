"""`python -m benchmarks front` runs: the server over the bus and the one over its own engine core give their figures,
none of which is judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from front_server import ROOT

from benchmarks import front


@pytest.mark.timeout(600)
def test_it_measures_both_servers_and_gives_its_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", "front", "--quick", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    compared = [row for row in rows if row["floor"] is not None]
    assert [(row["case"], row["metric"]) for row in compared] == [
        (f"{tokens:,} tokens", metric)
        for tokens in front.PROMPTS
        for metric in (front.REQUEST, front.TOKEN, front.EVENTS, front.FIRST)
    ]
    assert all(row["floor"] > 0 for row in compared)
    assert [row["metric"] for row in rows].count("first token later by") == len(front.PROMPTS)
