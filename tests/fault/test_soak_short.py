"""`make soak`, for moments: its exit code, its last line, and that it really broke something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from soak.run import RSS_MAX_BYTES

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.fault


def soak(*words: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "soak", *words],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
def test_a_short_soak_is_clean_and_says_so_on_its_last_line() -> None:
    ran = soak(
        "--minutes",
        "0.1",
        "--at-least",
        "50",
        "--kill-every-s",
        "0.5",
        "--seed",
        "5",
        "--unified",
        "0",
        "--concurrency",
        "8",
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["accepted"] == found["completed"] + sum(found["failed"].values())
    assert (found["duplicated"], found["lost"], found["wrong"], found["troubles"]) == (0, 0, 0, 0)
    assert found["completed"] >= 50
    assert found["kills"] >= 3
    assert found["rss_end_bytes"] > 0 < found["fds_end"]
    assert found["seed"] == 5
    assert "accepted" in ran.stderr  # progress


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("--keys",)])
def test_attackers_at_the_same_time_change_nothing_of_that(keys: tuple[str, ...]) -> None:
    ran = soak(
        "--minutes", "0.1", "--kill-every-s", "2", "--seed", "6", "--unified", "0", "--concurrency", "4",
        "--attackers", *keys, timeout_s=150,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["duplicated"], found["lost"], found["wrong"], found["troubles"]) == (0, 0, 0, 0)
    assert found["attacks"] >= 1
    assert 0 < found["rss_max_bytes"] <= RSS_MAX_BYTES
    assert "attack " in ran.stderr
    assert found["keys"] is bool(keys)


@pytest.mark.slow
def test_conversations_lose_nothing_whichever_trip_they_make() -> None:
    ran = soak(
        "--minutes", "0.15", "--at-least", "50", "--kill-every-s", "1", "--seed", "8", "--unified", "0",
        "--concurrency", "8", "--max-tokens", "32", "--conversations",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["duplicated"], found["lost"], found["wrong"], found["troubles"]) == (0, 0, 0, 0)
    assert found["completed"] >= 50
    assert found["kills"] >= 3
    assert 0 < found["at_decode"] < found["completed"]


def test_a_bad_setting_is_one_line() -> None:
    ran = soak("--minutes", "-1", timeout_s=60)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "--minutes" in ran.stderr
