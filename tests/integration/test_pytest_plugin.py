"""The plugin as an engine developer meets it: in a test run of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_the_example_passes(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "test_with_pdbus.py", tmp_path)
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


def test_collecting_loads_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs():\n"
        "    assert not {'zmq', 'msgspec', 'torch', 'bus', 'pdbus.launcher'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
