"""docs/sglang.md names what there is; and installing pdbus beside SGLang changes nothing that SGLang installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdbus.sglang import addresses, seams, settings
from pdbus.sglang.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
CODE = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "pdbus" / "sglang").glob("*.py")))
TESTS = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))

# Of SGLang 0.5.23's own requirements, those that pdbus has too; the other names of ours come with neither.
SGLANG_NEEDS = ("msgspec", "prometheus-client>=0.20.0", "pyzmq>=25.1.2")


def test_every_variable_has_its_line_and_no_other() -> None:
    """What a server's first process tells its children is nobody's to set."""
    known = {
        value for name, value in vars(settings).items() if name.isupper() and str(value).startswith("PDBUS_SGLANG")
    }
    table = TEXT.partition("## Settings")[2].partition("\n## ")[0]
    listed = {name for line in table.splitlines() if line.startswith("| `") for name in _variables(line.split("|")[1])}
    assert listed == known - {settings.DRAWN, settings.NAMED}
    assert set(_variables(TEXT)) <= listed


def _variables(text: str) -> list[str]:
    return re.findall(r"\bPDBUS_SGLANG\w*", text)


@pytest.mark.parametrize(
    ("variable", "field"),
    [(settings.ROOM_S, "room_s"), (settings.LOST_S, "lost_s"), (settings.CACHE_WEIGHT, "cache_weight")],
)
def test_defaults_are_those_of_the_code(variable: str, field: str) -> None:
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{variable}` |")]
    assert line.split("|")[3].strip() == f"{getattr(Settings(), field):g}"


def test_every_test_it_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT + (ROOT / "docs" / "notes" / "sglang.md").read_text(encoding="utf-8")))
    assert named
    assert not {name for name in named if f"def {name}(" not in TESTS}


def test_every_log_line_it_names_is_there() -> None:
    named = set(re.findall(r"\bpdbus(?:\.[a-z_]+){2,}", TEXT)) - {"pdbus.sglang.seams"}
    assert named
    assert not {name for name in named if f'"{name}"' not in CODE}


def test_it_names_the_tested_version_and_the_distance_of_the_ports() -> None:
    assert all(f"SGLang {version}" in TEXT for version in seams.TESTED)
    assert f"{addresses.STEP} ports above its bootstrap port" in TEXT


def test_our_ranges_let_every_version_stand_that_sglang_pins_or_installs() -> None:
    """No upper bounds, so what is newest fits; and nothing of ours is pinned by SGLang to a version we refuse."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = {canonicalize_name(need.name): need for need in map(Requirement, project["dependencies"])}
    assert all(each.operator == ">=" for need in ours.values() for each in need.specifier)
    theirs = {canonicalize_name(need.name): need for need in map(Requirement, SGLANG_NEEDS)}
    assert set(theirs) <= set(ours)
    assert not any(each.operator in ("==", "~=", "<", "<=") for need in theirs.values() for each in need.specifier)
