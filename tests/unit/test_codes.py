"""`bus.wire.codes` has a row for each code, docs/failures.md the same rows, and no other module a set of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from bus.wire.codes import MEANINGS, Code, client_retries, end_of_other, is_retryable, status_of

ROOT = Path(__file__).parents[2]
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
CODES = frozenset(get_args(Code)) - {"ok"}
MODULES = [
    path
    for package in ("bus", "controller", "nodes", "pdbus", "examples")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != ROOT / "bus" / "wire" / "codes.py"
]


def test_each_code_has_a_row() -> None:
    assert list(MEANINGS) == list(get_args(Code))
    assert {meaning.client for meaning in MEANINGS.values()} == {"library", "caller", "none"}


def test_the_page_says_of_each_code_what_the_table_says() -> None:
    section = FAILURES.split("### Codes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (yes|no) \| (\w+) \| (\d+) \|$", section, re.M)
    assert rows == [
        (code, meaning.client, "yes" if meaning.controller else "no", meaning.severity, str(meaning.status))
        for code, meaning in MEANINGS.items()
        if code != "ok"
    ]


@pytest.mark.parametrize("code", sorted(CODES))
def test_who_retries_a_code_agrees_with_its_status(code: Code) -> None:
    """429 and 503 tell an HTTP client to come again, the other statuses do not."""
    assert is_retryable(code) == (status_of(code) in (429, 503))
    assert is_retryable(code) or not client_retries(code)


def test_a_leg_ends_as_its_other_leg_did_or_because_of_it() -> None:
    kept = {leg: {code for code in CODES if end_of_other(leg, code) == code} for leg in ("prefill", "decode")}
    assert kept["prefill"] == {"cancelled", "deadline", "fenced", "decode_failed"}
    assert kept["decode"] == {"deadline", "unknown_room", "kv_failed", "prefill_failed"}
    assert end_of_other("prefill", "kv_failed") == "decode_failed"
    assert end_of_other("decode", "fenced") == "prefill_failed"
    assert end_of_other("decode", "cancelled") == "prefill_failed", "its own attempt may be a newer one"


def test_a_code_of_a_later_version_is_an_error_of_the_server() -> None:
    assert (status_of("too_warm"), status_of("no_rank")) == (500, 503)


def collections_of_codes(source: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the codes of each display, comparison or pattern that names two codes of failure or more. A
    dictionary of sentences for people decides nothing and is none."""
    if sum(code in source for code in CODES) < 2:  # most modules, which are not parsed
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Set(elts=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                pass
            case ast.Dict(keys=keys, values=values):
                if all(isinstance(each, ast.Constant) and " " in str(each.value) for each in values):
                    continue
                parts = [each for side in (keys, values) for each in side if each is not None]
            case ast.BoolOp(values=values):
                parts = [side for each in values if isinstance(each, ast.Compare) for side in each.comparators]
            case ast.MatchOr(patterns=patterns):
                parts = [each.value for each in patterns if isinstance(each, ast.MatchValue)]
            case _:
                continue
        named = {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}
        if len(named & CODES) > 1:
            yield node.lineno, named & CODES


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_keeps_a_set_of_codes(module: Path) -> None:
    assert list(collections_of_codes(module.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    ['x = {"no_rank", "poison"}', 'x in ("no_rank", "poison")', 'x == "no_rank" or x == "poison"',
     'x = {"no_rank": 1, "poison": 2}', 'match x:\n    case "no_rank" | "poison":\n        pass'],
)  # fmt: skip
def test_a_set_of_codes_is_found(text: str) -> None:
    assert [codes for _, codes in collections_of_codes(text)] == [{"no_rank", "poison"}]
