"""docs/architecture.md names every folder, says who may import whom, and speaks of nothing that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "controller", "nodes", "pdbus")
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = frozenset(name_of(path) for path in modules())


@cache
def look(path: Path) -> tuple[set[str], list[str]]:
    """Names of modules of ours that `path` imports, for types too, and the classes that it defines."""
    names: set[str] = set()
    classes = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            of_names = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in NAMES else node.module for name in of_names}
    return {name for name in names if name.partition(".")[0] in PACKAGES}, classes


def imported(path: Path) -> set[str]:
    return look(path)[0]


def test_every_folder_has_its_line() -> None:
    said = set(re.findall(r"^\| `([\w/]+)/` \|", TEXT.partition("\n## Folders\n")[2], re.M))
    assert said == {str(path.parent.relative_to(ROOT)) for path in modules()}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("bus/wire", ("bus.wire", "bus.errors")),
        ("bus", ("bus",)),
        ("controller", ("controller", "bus")),
        ("nodes", ("nodes", "bus")),
    ],
)
def test_nobody_imports_more_than_the_page_says(folder: str, allowed: tuple[str, ...]) -> None:
    for path in modules():
        if path.is_relative_to(ROOT / folder):
            strangers = {n for n in imported(path) if not any(n == a or n.startswith(f"{a}.") for a in allowed)}
            assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_no_module_imports_itself_in_a_circle() -> None:
    """Neither at its start, nor later, nor for its types alone (`graphlib.CycleError` names the circle)."""
    TopologicalSorter({name_of(path): imported(path) & NAMES for path in modules()}).prepare()


def test_a_request_is_at_most_seven_records() -> None:
    """Each of them is a class, and two rooms may call theirs alike."""
    journey = TEXT.partition("**A request**")[2].partition("**A load report.**")[0]
    records = re.findall(r"\*(\w+)\*", journey.partition("\n1. ")[2])
    defined = [name for path in modules() for name in look(path)[1]]
    assert len(records) <= 7
    assert all(defined.count(record) >= records.count(record) for record in records), records


def test_what_it_names_is_there() -> None:
    """Every `package.module.name` in backticks can be imported."""
    for name in set(re.findall(r"`((?:bus|controller|nodes|pdbus)(?:\.\w+)+)(?:\(\))?`", TEXT)):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[length:]:
                found = getattr(found, attribute)
            break
