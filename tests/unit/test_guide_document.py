"""docs/guide.md leads from a symptom to panels, alerts and codes that there are, and leaves none out."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from bus.wire.codes import Code

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
WATCHED = ROOT / "examples" / "observability"


def panels() -> set[str]:
    spec = importlib.util.spec_from_file_location("dashboard", WATCHED / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {title for row in module.PANELS.values() for title, *_ in row}


def test_the_panels_are_those_of_the_dashboard() -> None:
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", TEXT))
    assert named == panels()


def test_the_alerts_are_those_that_ring() -> None:
    (group,) = yaml.safe_load((WATCHED / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    assert set(re.findall(r"\bPdbus\w+", TEXT)) == {rule["alert"] for rule in group["rules"]}


def test_every_code_that_a_request_may_fail_with_is_told() -> None:
    told = re.findall(r"`([a-z_]+(?:_…)?)`", TEXT)
    for code in set(get_args(Code)) - {"ok", "fenced"}:
        assert any(code == each or (each.endswith("…") and code.startswith(each[:-1])) for each in told), code


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target
