"""One run of the story for all tests here (`make test-metrics`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics_world import World


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of prometheus and promtool, which `make test-metrics` names."""
    named = os.environ.get("PDBUS_PROMETHEUS", "")
    assert named, "run these with: make test-metrics"
    return Path(named)


@pytest.fixture(scope="session")
def world(programs: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="pm") as place, World(Path(place), programs) as made:
        yield made
