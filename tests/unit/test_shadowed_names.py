"""A `bus.py` or `controller/` of somebody else's, where ours is looked for: one line that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PDBUS = str(Path(sys.executable).with_name("pdbus"))


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """From `directory`, which is on the import path of whatever starts there."""
    env = os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=directory, env=env
    )  # fmt: skip


def foreign(directory: Path, name: str) -> Path:
    """Somebody else's, which must not run."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise SystemExit('the foreign module ran')")
    return path


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("bus.py", ["-m", "nodes.prefill", "--help"]),
        ("bus/__init__.py", ["-m", "nodes.decode", "--help"]),
        ("bus.py", ["-m", "controller", "--help"]),
        ("bus.py", ["-m", "pdbus", "--help"]),
        ("controller/__init__.py", ["-m", "pdbus", "status"]),
        ("nodes.py", ["-m", "pdbus", "up"]),
        ("controller.py", [PDBUS, "status"]),
    ],
)
def test_a_program_of_ours_says_in_one_line_which_file_is_in_the_way(
    tmp_path: Path, name: str, command: list[str]
) -> None:
    path = foreign(tmp_path, name)
    done = run(tmp_path, *([sys.executable] if command[0] == "-m" else []), *command)
    assert done.returncode in (1, 2)
    assert f"{path} hides pdbus's own package '{name.split('/')[0].removesuffix('.py')}': rename it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["bus.py", "controller/__init__.py", "nodes.py"])
@pytest.mark.parametrize(
    "line", ["from pdbus import Client", "from pdbus.client import Client", "import pdbus.launcher"]
)
def test_a_program_that_imports_pdbus_gets_an_import_error(tmp_path: Path, name: str, line: str) -> None:
    path = foreign(tmp_path, name)
    done = run(tmp_path, sys.executable, "-c", line)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {path} hides pdbus's own package")


def test_a_folder_without_an_init_is_named_or_harmless(tmp_path: Path) -> None:
    """It hides an editable install alone."""
    (tmp_path / "controller").mkdir()
    done = run(tmp_path, sys.executable, "-c", "from pdbus import Controller; print('fine')")
    assert done.stdout == "fine\n" or f"{tmp_path / 'controller'} hides" in done.stderr


def test_with_p_the_working_directory_is_out_of_the_way(tmp_path: Path) -> None:
    foreign(tmp_path, "bus.py")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bus", "--help"],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_other_peoples_tests_are_not_stopped_by_our_plugin(tmp_path: Path) -> None:
    """pytest loads `pdbus.pytest_plugin` wherever pdbus is installed, also beside a `bus.py`."""
    (tmp_path / "bus.py").write_text("NUMBER = 38\n")
    (tmp_path / "test_line.py").write_text("import bus\n\n\ndef test_number():\n    assert bus.NUMBER == 38\n")
    done = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
