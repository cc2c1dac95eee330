"""`pdbus calibrate` as a user calls it: measures, writes, checks itself against live ranks; one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def pdbus(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=cwd)


@pytest.mark.slow
def test_an_engine_is_measured_checked_and_replayed(tmp_path: Path) -> None:
    """How near the live run comes is this machine's business; that it is the same requests is ours."""
    sim = ("--engine", "sim", "--model", "sim", "--max-running", "8")
    done = pdbus("calibrate", *sim, "--longest", "128", "--rounds", "1", "--check", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean time to first token" in done.stdout
    assert "hand-over of a prompt token" in done.stdout
    assert "The replay is within " in done.stdout
    found = json.loads((tmp_path / "timing.json").read_text())
    assert (found["engine"], found["model"], found["first_at_decode"]) == ("sim", "sim", False)
    assert found["timing"]["base_s"] > 0.006
    assert found["kv_fetch_token_s"] >= 0.0
    assert {point["decode_rows"] // point["steps"] for point in found["points"]} == {0, 1, 2, 4, 8}
    short = ("--timing", "timing.json", "--duration-s", "20", "--jobs", "1", "--json")
    replayed = pdbus("replay", *short, "--methods", "round_robin", "--load", "0", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["methods"]["round_robin"]["tpot_p50_s"] > 0.006


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("calibrate", "--out", "nowhere/timing.json"), "cannot write nowhere/timing.json"),
        (("calibrate", "--engine", "sim", "--", "--dtype"), "only --engine vllm takes arguments of the engine's own"),
        (("calibrate", "--model", "huge"), "the torch engine has no model 'huge'"),
        (("replay", "--timing", "none.json"), "or a file that pdbus calibrate wrote (No such file or directory)"),
    ],
)
def test_what_cannot_be_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    done = pdbus(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()[-1:]) == 1
