"""The Containerfile, line by line without a container: each RUN in the folder and environment that stands for its
stage, with the files that the build is given and no others. `make test-dist` runs this."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not os.environ.get("PDBUS_DIST"), reason="make test-dist builds a distribution and tests it"),
    pytest.mark.timeout(900),
]


def instructions() -> Iterator[tuple[str, str]]:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name and not name.startswith("#"):
            yield name, " ".join(rest.split())


def runs() -> Iterator[tuple[str, str]]:
    """(stage, command)"""
    stage = ""
    for name, rest in instructions():
        if name == "FROM":
            stage = rest.partition(" AS ")[2] or "image"
        elif name == "RUN":
            yield stage, re.sub(r"--mount=\S+ ", "", rest)


def context(target: Path) -> None:
    """What `COPY . .` has: as .dockerignore says, which names what is let in."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    wanted = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    for path in ROOT.iterdir():
        if not any(fnmatch.fnmatch(path.name, name) for name in wanted):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target)


def test_each_line_runs_and_what_they_make_serves(tmp_path: Path) -> None:
    arguments = dict(part.split("=") for name, part in instructions() if name == "ARG")
    stands_for = {
        "$REQUIREMENTS": arguments["REQUIREMENTS"], "/src": str(tmp_path / "src"), "/wheels": str(tmp_path / "wheels")
    }  # fmt: skip
    (tmp_path / "src").mkdir()
    context(tmp_path / "src")
    for stage in ("build", "image"):
        subprocess.run([sys.executable, "-m", "venv", tmp_path / stage], check=True)
    for stage, command in runs():
        if command.startswith("apt-get"):
            continue  # this machine's own compiler
        for written, stands in stands_for.items():
            command = command.replace(written, stands)
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=tmp_path / "src",
            env=environment(tmp_path / stage) | {"PIP_LOG": str(tmp_path / "pip.log"), "MYPYC_OPT_LEVEL": "0"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    builds, has, wheel = re.findall("Successfully installed (.*)", (tmp_path / "pip.log").read_text())
    assert {each.lower() for each in builds.split()} <= {each.lower() for each in locked("image_build.txt")}
    assert {each.lower() for each in has.split()} <= {each.lower() for each in locked("image.txt")}
    assert re.fullmatch(r"pdbus-\S+", wheel), "all else is there already, by its hash"
    broker = subprocess.Popen(
        ["sh", "-ec", f"exec python3 -P -m bus --bus ipc://{tmp_path}/run/bus"],
        cwd=tmp_path, env=environment(tmp_path / "image"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert broker.stdout is not None
        assert broker.stdout.readline().startswith("READY part=broker")
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(60) == 0
    finally:
        broker.kill()
        broker.communicate(timeout=60)


def locked(name: str) -> list[str]:
    """`name-version` of each package of a file with hashes."""
    lines = (ROOT / "builder" / name).read_text(encoding="utf-8").splitlines()
    return [line.partition(" ")[0].replace("==", "-") for line in lines if "==" in line]


def environment(venv: Path) -> dict[str, str]:
    leads_back = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in leads_back}
    return kept | {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_nothing_runs_as_root_and_no_registry_is_named() -> None:
    said = list(instructions())
    assert dict(said)["USER"] == "65532:65532"
    (base,) = (rest.partition("=")[2] for name, rest in said if rest.startswith("BASE="))
    assert "." not in base.partition("/")[0].partition(":")[0]  # a host has one; the tag may
    assert all(rest.startswith("${BASE}") for name, rest in said if name == "FROM")
