"""`make setup` takes torch's CPU build where pip's index has it, and `make check-torch` says which build is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from torch_build import describe

ROOT = Path(__file__).parents[2]
CPU_BUILD = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")) + "+cpu"
PYTHON = """#!/bin/bash
echo "$@" >> "{calls}"
if [[ "$*" == *+cpu* && -n "{refusal}" ]]; then echo "ERROR: {refusal}" >&2; exit 1; fi
"""


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the usual build has no CUDA")


def make_setup(directory: Path, refusal: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """`make setup` with a Python that notes what pip is asked for, and whose pip refuses the CPU build."""
    calls, python = directory / "calls", directory / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(calls=calls, refusal=refusal))
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "setup", f"VENV={directory / 'venv'}"]
    # nothing of a make that runs these tests, which exports what its own command line has set
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "EXTRAS"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    return done, calls.read_text().splitlines()


@linux
def test_the_cpu_build_comes_first(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path)
    assert done.returncode == 0, done.stderr
    assert calls[0].endswith(f"--no-deps {CPU_BUILD}")
    assert "-c constraints.txt -e .[torch," in calls[1]
    assert "CUDA" not in done.stdout


@linux
def test_an_index_without_it_is_said_in_one_line_and_the_usual_build_is_taken(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path, f"No matching distribution found for {CPU_BUILD}")
    assert done.returncode == 0, done.stderr
    assert "-c constraints.txt -e .[torch," in calls[1]
    (said,) = (line for line in done.stdout.splitlines() if "CUDA" in line)
    assert f"offers no CPU-only build ({CPU_BUILD})" in said
    assert "PIP_EXTRA_INDEX_URL" in said


@linux
def test_a_user_with_constraints_of_their_own_is_refused_the_cpu_build_in_other_words(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path, "ResolutionImpossible: for help visit https://pip.pypa.io")
    assert done.returncode == 0, done.stderr
    assert "-c constraints.txt -e .[torch," in calls[1]


@linux
def test_another_failure_of_pip_is_shown_and_ends_the_set_up(tmp_path: Path) -> None:
    done, calls = make_setup(tmp_path, "No space left on device")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
    assert len(calls) == 1, "the larger build is not tried instead"


@linux
def test_an_index_out_of_reach_is_not_taken_for_one_without_the_cpu_build(tmp_path: Path) -> None:
    heard = f"requirement {CPU_BUILD} (from versions: none) ERROR: No matching distribution found for {CPU_BUILD}"
    done, calls = make_setup(tmp_path, f"Could not find a version that satisfies the {heard}")
    assert done.returncode != 0
    assert "reaches no index that has torch" in done.stderr
    assert "CUDA" not in done.stdout
    assert len(calls) == 1


def install(site: Path, name: str, version: str, size: int) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / name).mkdir()
    (site / name / "library.so").touch()  # importlib.metadata lists only what is there, from 3.13 on
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}/library.so,,{size}\n{info.name}/METADATA,,100\n")


def test_the_build_in_use_is_said(tmp_path: Path) -> None:
    site = tmp_path / "site"
    with pytest.raises(LookupError, match="make setup"):
        describe(distributions(path=[str(site)]))
    install(site, "torch", "2.13.0+cpu", 500_000_000)
    assert describe(distributions(path=[str(site)])) == "torch 2.13.0+cpu"
    install(site, "nvidia-cublas-cu13", "13.1", 2_000_000_000)
    install(site, "triton", "3.5", 700_000_000)
    assert "with 2 CUDA packages (2.7 GB) that nothing here uses" in describe(distributions(path=[str(site)]))
