"""The browser of all tests here (`make test-browser`): `$CHROMIUM`, or `chromium` on PATH. No other run sees them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert chromium, "run these with: make test-browser"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a page in a browser of its own; at the end nothing has happened that must not. PICTURES names a folder for
    pictures of all states."""
    from visits import Visit

    folder = Path(os.environ["PICTURES"]) if os.environ.get("PICTURES") else None
    visits: list[Visit] = []

    def go(url: str) -> Visit:
        visits.append(Visit(browser, url, folder))
        return visits[-1]

    yield go
    for each in visits:
        each.close()
