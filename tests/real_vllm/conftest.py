"""These tests need vLLM: `make test-vllm` runs them in an environment that has it, and no other run sees them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """vLLM's and torch's own warnings are no errors of ours."""
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@pytest.fixture(scope="session")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's server in front of scripted ranks, by the name `coder`; one for all tests."""
    from scripted_front import started

    with started(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home and a checkout in one, with the file that agents are asked about."""
    from scripted_front import FACTS

    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "weather.txt").write_text("".join(f"{fact}\n" for fact in FACTS))
    return tmp_path
