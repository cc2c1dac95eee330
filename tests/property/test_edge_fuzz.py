"""Whatever a body says, the answer is an answer or a refusal in OpenAI's shape, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

from cases import Case, cases
from edge_world import World, letters

from pdbus.edge import fields
from pdbus.edge.refused import REFUSED, REFUSED_BY_GENERATE

KINDS: Any = (fields.Chat, fields.Completion, fields.Generate, fields.Tokenize, fields.SglSampling, fields.Turn)
NAMES = sorted(
    {name for kind in KINDS for name in kind.__struct_fields__}
    | set(REFUSED)
    | set(REFUSED_BY_GENERATE)
    | {"role", "content", "type"}
)  # fmt: skip
FEW = ["user", "text", "sim", 1, 0, -1, 2**31, 0.5]


def simple(case: Case) -> Any:
    match case.randrange(6):
        case 0:
            return None
        case 1:
            return case.random() < 0.5
        case 2:
            return case.number(-(2**70), 2**70)
        case 3:
            ends = (math.inf, -math.inf, math.nan, 1e308, -1e308)
            return case.choice(ends) if case.randrange(2) else case.float_of(-1000.0, 1000.0)
        case 4:
            return case.text(0, 5)
    return case.choice(FEW)


def value(case: Case) -> Any:
    return case.tree(simple, lambda case: case.choice(NAMES), 2, 3)


def turn(case: Case) -> dict[str, str]:
    return {"role": case.choice(("user", "system")), "content": case.text(0, 9)}


def ids(case: Case, least: int, most: int) -> list[int]:
    return [case.randint(0, most) for _ in range(case.randint(least, 5))]


PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize")
NEEDED: dict[str, Callable[[Case], dict[str, Any]]] = {
    "/v1/chat/completions": lambda case: {"messages": [turn(case) for _ in range(case.randint(0, 5))]},
    "/v1/completions": lambda case: {"prompt": case.choice((case.text(0, 5), ids(case, 1, 300)))},
    "/generate": lambda case: {"text": case.text(0, 5)},
    "/tokenize": lambda case: {"prompt": case.text(0, 5)},
    "/detokenize": lambda case: {"tokens": ids(case, 0, 2**31)},
}


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


def test_any_fields() -> None:
    for case in cases(800):
        with case:
            path = case.one(PATHS)
            more = {case.choice(NAMES): value(case) for _ in range(case.randint(0, 3))}
            judged(path, case.note(json.dumps(NEEDED[path](case) | more).encode()))


def test_any_bytes() -> None:
    for case in cases(300):
        with case:
            body = case.choice((case.bytes_of(40), case.text(0, 40).encode(), json.dumps(value(case)).encode()))
            judged(case.one(PATHS), case.note(body))
