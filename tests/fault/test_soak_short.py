"""`pdbus soak`, for moments: its exit code, its last line, and that it really broke something."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdbus.soak.run import RSS_MAX_BYTES

pytestmark = pytest.mark.fault


def test_a_short_soak_is_clean_and_says_so_on_its_last_line() -> None:
    command = [sys.executable, "-P", "-m", "pdbus", "soak", "--minutes", "0.1", "--kill-every-s", "0.5", "--seed", "5",
               "--unified", "0", "--concurrency", "8"]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["accepted"] == found["completed"] + sum(found["failed"].values())
    assert (found["duplicated"], found["lost"], found["wrong"], found["troubles"]) == (0, 0, 0, 0)
    assert found["kills"] >= 3
    assert found["completed"] > 50
    assert found["rss_end_bytes"] > 0 < found["fds_end"]
    assert found["seed"] == 5
    assert "accepted" in ran.stderr  # progress


@pytest.mark.parametrize("keys", [(), ("--keys",)])
def test_attackers_at_the_same_time_change_nothing_of_that(keys: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "pdbus", "soak", "--minutes", "0.1", "--kill-every-s", "2", "--seed", "6",
               "--unified", "0", "--concurrency", "4", "--attackers", *keys]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["duplicated"], found["lost"], found["wrong"], found["troubles"]) == (0, 0, 0, 0)
    assert found["attacks"] >= 1
    assert 0 < found["rss_max_bytes"] <= RSS_MAX_BYTES
    assert "attack " in ran.stderr
    assert found["keys"] is bool(keys)


def test_a_bad_setting_is_one_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", "soak", "--minutes", "-1"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "--minutes" in ran.stderr
