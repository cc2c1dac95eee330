"""The wheel and the sdist that `make dist` built, as a stranger takes them: `make test-dist`."""

from __future__ import annotations

import email.parser
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import blocks
from pdbus_build import MODULES

from nodes.own.engines.sim import sim_generate

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("PDBUS_DIST", "")
PACKAGES = ("bus", "nodes", "controller", "pdbus")
KINDS = ("*.py", "*.html", "*.js", "*.css", "*.svg")
pytestmark = [
    pytest.mark.skipif(not DIST, reason="make test-dist builds the distribution and tests it"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = (ROOT / DIST).glob("pdbus-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist() -> Path:
    (found,) = (ROOT / DIST).glob("pdbus-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """An empty directory that is not in the checkout, with a short name (a socket's path has at most 107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def environment(wheel: Path, outside: Path) -> Path:
    """A new virtual environment with the wheel and what it depends on, nothing else; its `bin`."""
    run(sys.executable, "-m", "venv", outside / "venv", cwd=outside)
    pip(outside / "venv" / "bin" / "python", "install", wheel, cwd=outside)
    return outside / "venv" / "bin"


def run(*command: str | Path, cwd: Path) -> str:
    """What `command` prints, or a failure that shows all of it."""
    done = subprocess.run(command, cwd=cwd, env=clean(cwd), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def pip(python: str | Path, command: str, *arguments: str | Path, cwd: Path) -> None:
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *constraints, *arguments, cwd=cwd)


def clean(directory: Path) -> dict[str, str]:
    """The environment without what would lead back to the checkout."""
    leads_back = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in leads_back} | {"PDBUS_DIR": str(directory)}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def cores(wheel: Path) -> set[str]:
    """What is compiled in it."""
    return {name for name in names(wheel) if name.endswith(".so")}


def test_the_wheel_holds_the_packages_their_type_marks_and_the_license(wheel: Path) -> None:
    sources = {path for package in PACKAGES for kind in KINDS for path in (ROOT / package).rglob(kind)}
    marks = {ROOT / package / "py.typed" for package in PACKAGES}
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    facts = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    facts.add(f"{info}/licenses/LICENSE")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {module.removesuffix(".py") + suffix for module in (*MODULES, "pdbus__mypyc")}
    assert cores(wheel) == compiled
    assert names(wheel) == {str(path.relative_to(ROOT)) for path in sources | marks} | compiled | facts
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = email.parser.Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["License-Expression"], metadata["License-File"]) == (
        "pdbus", "Apache-2.0", "LICENSE",
    )  # fmt: skip


def test_the_sdist_builds_the_same_wheel(
    wheel: Path, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pure where that is asked for. And it has what `make test` needs."""
    monkeypatch.setenv("PDBUS_PURE", "1")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    (pure,) = tmp_path.glob("*-py3-none-any.whl")
    assert names(pure) == names(wheel) - cores(wheel)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    here = [
        ROOT / name
        for name in ("Makefile", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", ".ci/run", "setup.py")
    ]
    for folder in ("builder", "tests", "docs", "examples"):
        here += [path for path in (ROOT / folder).rglob("*.*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(ROOT)) for path in here} <= held


def test_the_wheel_runs_in_an_environment_of_its_own(wheel: Path, environment: Path, outside: Path) -> None:
    version = wheel.name.split("-")[1]
    assert run(environment / "pdbus", "--version", cwd=outside) == f"pdbus, version {version}, compiled cores\n"
    look = f"import importlib\nfor name in {PACKAGES}: print(importlib.import_module(name).__file__)"
    for where in run(environment / "python", "-c", look, cwd=outside).splitlines():
        assert Path(where).is_relative_to(outside / "venv")
    listed = run(environment / "python", "-m", "pip", "--disable-pip-version-check", "list", cwd=outside).split()
    assert not {"torch", "numpy", "pytest"} & set(listed)


def test_the_page_of_sglang_installs_it(wheel: Path, environment: Path, outside: Path) -> None:
    """Where it is installed already, so that nothing has to be fetched."""
    (page,) = [block.text for block in blocks(ROOT / "docs" / "sglang.md") if block.text.startswith("pip install")]
    (outside / "dist").symlink_to(wheel.parent)
    script = f"PATH={environment}:$PATH\n{page}\npython -c 'import pdbus.sglang'\necho $PDBUS_SGLANG_METHOD"
    assert run("sh", "-ec", script, cwd=outside).splitlines()[-1] == "total_tokens"


def test_a_cluster_of_the_installed_wheel_serves(environment: Path, outside: Path) -> None:
    up = subprocess.Popen(
        [environment / "pdbus", "up", "--model", "sim", "--prefill", "1", "--decode", "1", "--start-timeout-s", "60",
         "--", "--sim-timing", "zero"],
        cwd=outside, env=clean(outside), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        assert any(line.startswith("READY bus=") for line in up.stdout)  # or it ended, within its time to start
        asked = ("generate", "5 6 7", "--tokens", "--max-tokens", "4")
        said = run(environment / "pdbus", *asked, cwd=outside)
        assert [int(word) for word in said.split()] == sim_generate([5, 6, 7], 4)
    finally:
        up.terminate()
        up.communicate(timeout=30)
