"""docs/architecture.md names every module, in the table of its folder, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "controller", "nodes", "pdbus")


def test_every_module_has_its_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = re.split(r"^#{3,4} `([\w/]+)/`$", text.partition("\n## Modules\n")[2], flags=re.M)
    said = {
        f"{folder}/{name}"
        for folder, body in zip(sections[1::2], sections[2::2], strict=True)
        for name in re.findall(r"^\| `(\w+\.py)` \| .+ \|$", body, re.M)
    }
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert said == there
