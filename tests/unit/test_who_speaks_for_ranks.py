"""What a rank says is made in nodes/link and bus/embed alone; who else makes such a message is named here, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.wire.messages import FROM_NODE_DATA, NODE_TO_CONTROLLER, KvDone, KvPull, LoadReport, Member, Refused, Rooms

ROOT = Path(__file__).parents[2]
SAID = {*NODE_TO_CONTROLLER.values(), *FROM_NODE_DATA.values(), LoadReport, Member, Rooms, KvPull, KvDone} - {Refused}
NAMES = frozenset(kind.__name__ for kind in SAID)
HOMES = ("bus/embed/", "nodes/link/")
OTHERS = {
    "controller/recordings.py": "to the asker, in place of a rank that records nothing or says nothing in time",
    "examples/load_table.py": "facts of a rank for the load table; sends nothing",
    "pdbus/lab/choosers.py": "likewise",
    "pdbus/sglang/chooser.py": "likewise, of SGLang's ranks",
    "benchmarks/controller_parts.py": "what a core or a table is handed in one process; sends nothing",
    "benchmarks/node.py": "a rank without an engine, which records nothing; the connection is ours",
    "benchmarks/pick.py": "likewise",
    "benchmarks/report.py": "likewise",
    "benchmarks/scripts.py": "likewise",
    "benchmarks/rooms_parts.py": "publications in batches of a chosen size, encoded before the clock starts",
    "tests/soak/attacks.py": "a peer that forges publications, to be refused",
    "tests/fault/test_hostile_input.py": "peers that lie",
    "tests/fault/test_keys_live.py": "a peer that speaks for another's rank",
    "tests/integration/test_nodes_live.py": "the peer of a node that pulls KV blocks",
}


def made_in(path: Path) -> set[str]:
    """Names of messages of bus.wire.messages that `path` constructs."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in NAMES):
        return set()
    tree = ast.parse(text)
    known = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "bus.wire.messages"
        for alias in node.names
        if alias.name in NAMES
    }
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        name
        for call in calls
        for name in [call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""]
        if name in known or (name in NAMES and isinstance(call, ast.Attribute))
    }


def files() -> Iterator[str]:
    """All that may open a socket: unit and property tests, and what they share, hand messages to cores."""
    for folder in (
        "bus",
        "controller",
        "nodes",
        "pdbus",
        "benchmarks",
        "examples",
        "tests/fault",
        "tests/soak",
        "tests/integration",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix()
    yield "tests/support/raw_nodes.py"


def test_nobody_else_makes_what_a_rank_says() -> None:
    made = {name: said for name in files() if not name.startswith(HOMES) and (said := made_in(ROOT / name))}
    assert made.keys() == OTHERS.keys(), made


@pytest.mark.parametrize("name", ["nodes/link/connection.py", "bus/embed/publications.py"])
def test_it_sees_them_where_they_are_made(name: str) -> None:
    """So that the test above can fail."""
    assert made_in(ROOT / name)
