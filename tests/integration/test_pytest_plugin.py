"""The plugin as an engine developer meets it: in a test run of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from docs_commands import ROOT, blocks

EXAMPLES = ROOT / "examples"
# Hypothesis' plugin loads all of Hypothesis, a third of what a session costs.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def run_pytest(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", *WITHOUT, *arguments],
        cwd=directory, capture_output=True, text=True, timeout=280, check=False, env=os.environ | env,
    )  # fmt: skip


def test_the_example_and_the_readmes_test_pass(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "test_with_pdbus.py", tmp_path)
    (theirs,) = [block.text for block in blocks(ROOT / "README.md") if block.text.startswith("def test_mine(")]
    (tmp_path / "test_mine.py").write_text(theirs, encoding="utf-8")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_a_failing_test_shows_the_logs_of_the_parts_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "def test_theirs(pdbus_cluster):\n"
        "    cluster = pdbus_cluster(unified=1)\n"
        "    print('PLACE', cluster.directory)\n"
        "    print('PIDS', *(child.pid for child in cluster.children.values()))\n"
        "    assert False, 'on purpose'\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "on purpose" in done.stdout
    assert "log of unified-0/0" in done.stdout
    assert "controller.welcomed" in done.stdout
    words = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("PLACE", "PIDS"))
    }
    assert not Path(words["PLACE"][0]).exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in words["PIDS"])


def test_a_socket_left_behind_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import socket\n"
        "def test_theirs(pdbus_cluster):\n"
        "    cluster = pdbus_cluster(unified=1)\n"
        "    with socket.socket(socket.AF_UNIX) as stray:\n"
        "        stray.bind(str(cluster.directory / 'stray'))\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "sockets were left in" in done.stdout


@pytest.mark.cold
def test_collecting_loads_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs():\n"
        "    assert not {'zmq', 'msgspec', 'torch', 'bus', 'pdbus.launcher'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout


def test_each_cluster_is_taken_down_whatever_becomes_of_another(tmp_path: Path) -> None:
    """A part that the test killed itself leaves its socket by right; one whose check fails keeps no other alive."""
    (tmp_path / "test_theirs.py").write_text(
        "import os, signal, socket\n"
        "PIDS = []\n"
        "def start(pdbus_cluster):\n"
        "    cluster = pdbus_cluster(unified=1)\n"
        "    PIDS.extend(child.pid for child in cluster.children.values())\n"
        "    return cluster\n"
        "def test_a_crash(pdbus_cluster):\n"
        "    start(pdbus_cluster), start(pdbus_cluster)\n"
        "    os.kill(PIDS[-1], signal.SIGKILL)\n"
        "def test_a_stray_socket(pdbus_cluster):\n"
        "    start(pdbus_cluster)\n"
        "    with socket.socket(socket.AF_UNIX) as stray:\n"
        "        stray.bind(str(start(pdbus_cluster).directory / 'stray'))\n"
        "def test_a_stop_that_raises(pdbus_cluster):\n"
        "    start(pdbus_cluster)\n"
        "    def failing():\n"
        "        stop()\n"
        "        raise OSError('on purpose')\n"
        "    cluster = start(pdbus_cluster)\n"
        "    stop, cluster.stop = cluster.stop, failing\n"
        "def test_all_are_gone():\n"
        "    assert len(PIDS) == 18\n"
        "    assert not [pid for pid in PIDS if os.path.exists(f'/proc/{pid}')]\n"
    )
    done = run_pytest(tmp_path)
    assert "4 passed, 2 errors" in done.stdout, done.stdout
    assert "sockets were left in" in done.stdout
    assert "on purpose" in done.stdout


def test_a_cluster_that_does_not_start_shows_its_logs(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "def test_theirs(pdbus_cluster):\n    pdbus_cluster(unified=1, env={'PDBUS_NODE_MAX_RUNNING': 'many'})\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "log of unified-0/0" in done.stdout
    assert "log of broker" in done.stdout


@pytest.mark.slow
def test_what_a_crashed_worker_of_xdist_leaves_is_shown_and_removed(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import os, pathlib, signal\n"
        "def test_theirs(pdbus_cluster):\n"
        "    cluster = pdbus_cluster(unified=1)\n"
        "    pathlib.Path('place').write_text(str(cluster.directory))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def test_another(pdbus_cluster):\n"
        "    pdbus_cluster(unified=1)\n"
    )
    with tempfile.TemporaryDirectory(prefix="pd") as short:  # sockets' paths have at most 80 bytes
        done = run_pytest(tmp_path, "-n", "1", "--max-worker-restart", "1", TMPDIR=short)
        left = list(Path(short).glob("pd*"))
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "log of unified-0.0" in done.stdout
    assert "controller.welcomed" in done.stdout
    assert not Path((tmp_path / "place").read_text()).exists()
    assert not left, "notes included"
