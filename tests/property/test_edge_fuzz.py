"""Whatever a body says, the answer is an answer or a refusal in OpenAI's shape, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from edge_world import World, letters
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.edge import fields
from pdbus.edge.refused import REFUSED, REFUSED_BY_GENERATE

KINDS: Any = (fields.Chat, fields.Completion, fields.Generate, fields.Tokenize, fields.SglSampling, fields.Turn)
NAMES = sorted(
    {name for kind in KINDS for name in kind.__struct_fields__}
    | set(REFUSED)
    | set(REFUSED_BY_GENERATE)
    | {"role", "content", "type"}
)  # fmt: skip
SIMPLE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(["user", "text", "sim", 1, 0, -1, 2**31, 0.5]),
)  # fmt: skip
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=9)}))
PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")
NEEDED: dict[str, Any] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": st.text(max_size=5) | st.lists(st.integers(0, 300), min_size=1, max_size=5)},
    "/generate": {"text": st.text(max_size=5)},
    "/tokenize": {"prompt": st.text(max_size=5)},
    "/detokenize": {"tokens": st.lists(st.integers(0, 2**31), max_size=5)},
}


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(PATHS))
    body = draw(st.fixed_dictionaries(NEEDED[path]))
    return path, body | draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))


def judged(path: str, body: bytes) -> None:
    world = World(letters("some answer"))
    answer = asyncio.run(world.post(path, body))
    assert answer.status in (200, 400, 404, 429), (answer.status, answer.body, body)
    if answer.status == 200:
        if answer.headers["content-type"] == "application/json":
            assert answer.json is not None
        else:
            assert answer.events
    else:
        assert answer.error["message"]
        assert answer.error.keys() == {"message", "type", "param", "code"}
    assert world.edge.counts.errors["internal_error"] == 0
    assert world.edge.counts.in_flight == 0


@settings(max_examples=400)
@given(asked())
def test_any_fields(said: tuple[str, dict[str, Any]]) -> None:
    judged(said[0], json.dumps(said[1]).encode())


BYTES = st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | VALUES.map(lambda v: json.dumps(v).encode())


@settings(max_examples=200)
@given(st.sampled_from(PATHS), BYTES)
def test_any_bytes(path: str, body: bytes) -> None:
    judged(path, body)
