"""Each stream of the bus has an entry for each engine whose ranks send it: `make cut-streams` goes by these."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bus.wire import messages, topics
from nodes.engines import BUILT_IN
from nodes.own.engines.factory import ENGINES as OWN

STREAMS_TESTS = Path(__file__).parents[1] / "streams"
sys.path.append(str(STREAMS_TESTS / "plugin"))

import stream_registry as registry  # noqa: E402

TABLES = {name.lower(): table for name, table in vars(messages).items() if isinstance(table, messages.Table)}


def test_every_message_of_a_table_is_a_stream_or_is_said_not_to_be() -> None:
    named = {f"{table}/{tag}" for table, tags in TABLES.items() for tag in tags}
    known = registry.STREAMS.keys() | registry.NOT_SENT.keys()
    assert named <= known, f"no entry in tests/streams/plugin/stream_registry.py: {named - known}"
    assert {name for name in known if name.partition("/")[0] in TABLES} <= named
    assert not registry.STREAMS.keys() & registry.NOT_SENT.keys()


def test_every_topic_carries_a_stream() -> None:
    publications = {topics._PREFIX.get(kind) for kind in messages.PUBLICATIONS.values()} | {topics.SENT, topics.BEACON}
    others = {stream.topic for stream in registry.STREAMS.values() if stream.topic}
    assert {*topics.ALL} == (publications - {None}) | others


def test_every_engine_has_its_streams() -> None:
    assert {*BUILT_IN, "sglang"} <= registry.ENGINES.keys()
    assert {name for names in registry.ENGINES.values() for name in names} == {*registry.STREAMS}
    for engine, names in registry.ENGINES.items():
        left = registry.RANK - names
        assert not left or engine not in OWN, f"ranks of {engine} send {left}, too"


def test_every_test_is_there_and_is_of_one_stream() -> None:
    named = [stream.test for stream in registry.STREAMS.values()]
    assert len({*named}) == len(named)
    assert names_in(STREAMS_TESTS / "test_streams.py") == {*named, "test_every_step_came_to_its_end"}
    sglang = {registry.STREAMS[name].test for name in registry.ENGINES["sglang"]}
    found = names_in(STREAMS_TESTS.parent / "real_sglang" / "test_sglang_streams.py")
    assert found == {*sglang, "test_every_request_was_answered"}


def names_in(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_what_is_dropped_together_exists() -> None:
    grouped = [name for group in registry.TOGETHER for name in group]
    assert len({*grouped}) == len(grouped)
    assert {*grouped, *registry.NO_START} <= registry.STREAMS.keys()


@pytest.mark.parametrize("sender", sorted({sender for each in registry.STREAMS.values() for sender in each.senders}))
def test_every_sender_is_there(sender: str) -> None:
    module, _, path = sender.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
