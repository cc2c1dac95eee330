"""These tests need vLLM: `make test-vllm` runs them in an environment that has it, and no other run sees them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """vLLM's and torch's own warnings are no errors of ours."""
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")
