"""`questions`: how long a controller's loop stands still for an operator's question about requests, with its memory of
ended requests full and thousands alive.
"""

from __future__ import annotations

import time

from benchmarks.controller_parts import core_of
from benchmarks.harness import Aim, Row, Scope, in_child, row
from bus.wire.messages import Message, Role, StatusQuery, Submit, TraceQuery
from controller.core import ControllerCore
from controller.events import FromClient
from controller.requests.record import RequestRecord

AIM_MS = 2.0
RANKS = 8
LIVE = 4_000
ROUNDS = 7
PROMPT = bytes(40)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which takes seconds, and return the rows."""
    scope.show("filling the memory")
    taken = in_child("questions:measure", live=scope.size(LIVE, 100), rounds=scope.size(ROUNDS, 2))
    return [row(case, "the loop stands still", "ms", values, aim=Aim(AIM_MS, of_ratio=False))
            for case, values in taken.items()]  # fmt: skip


def measure(live: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each question, by what it asks, of each round."""
    core = full(live)
    kept = len(core.life.table.history)
    questions: dict[str, Message] = {
        f"a rid that is not among {kept:,}": TraceQuery(1, "unknown"),
        f"four characters of each of {kept:,}": TraceQuery(1, "chat"),
        f"a whole rid of {kept:,}": TraceQuery(1, f"chatcmpl-{kept // 2:032x}"),
    }
    found = {what: [_ms(core, query) for _ in range(rounds)] for what, query in questions.items()}
    bare = min(_ms(core, StatusQuery(1)) for _ in range(rounds))
    lists = [max(0.0, _ms(core, StatusQuery(1, requests=True)) - bare) for _ in range(rounds)]
    return found | {f"the lists, {live:,} alive: more than a status without": lists}


def full(live: int) -> ControllerCore:
    """Return a controller whose memory of ended requests is full, with so many `live` ones."""
    core = core_of(RANKS)
    roles: tuple[Role, ...] = ("prefill", "decode")
    legs = tuple([(role, (f"{role}-0", 1), 1.0, 2.0, 100) for role in roles])
    history, number, kept = core.life.table.history, 0, -1
    while len(history) > kept:
        rid, kept = f"chatcmpl-{number:032x}", len(history)
        when = 1 << 50, 0.5, 3.0
        history.add(RequestRecord(rid, 1, 1 << 60, "pair", "a-model", 900, *when, "ok", "", (), legs, None, None, ""))
        number += 1
    for number in range(live):
        submit = Submit(f"live-{number:032x}", "unified", len(PROMPT) // 4, 5, number)
        core.handle(FromClient(f"client {number}", submit, (PROMPT, b"")), 1.0)
    return core


def _ms(core: ControllerCore, query: Message) -> float:
    began = time.perf_counter()
    core.handle(FromClient("operator", query), 2.0)
    taken = 1e3 * (time.perf_counter() - began)
    core.inquiries.tick(1e9, [])
    return taken
