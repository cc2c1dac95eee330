"""`make test-pythons` and `.ci/run` find the Pythons of a machine."""

from __future__ import annotations

from pathlib import Path

from pythons import found


def install(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def test_of_each_minor_version_the_oldest_patch(tmp_path: Path) -> None:
    manager, system = tmp_path / "manager", tmp_path / "system"
    install(manager, "python3", "echo 3 11 7 final")
    newest = install(manager, "python3.13", "echo 3 13 0 final")
    oldest = install(system, "python3.11", "echo 3 11 2 final")
    (system / "python3").symlink_to(oldest)
    pythons = found([manager, system, tmp_path / "missing"])
    assert list(pythons) == [11, 13]
    assert pythons[11].resolve() == oldest
    assert pythons[13] == newest


def test_what_is_no_python_for_us_is_left_out(tmp_path: Path) -> None:
    install(tmp_path, "python3.10", "echo 3 10 13 final")
    install(tmp_path, "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    install(tmp_path, "python3.14", "echo 3 14 0 candidate")
    install(tmp_path, "python3.15", "echo 3 15 0 final")
    install(tmp_path, "python3.13-config", "echo 3 13 0 final")
    assert found([tmp_path]) == {}
