"""`lab`: requests that the policy lab replays in a second of CPU, by kind of trace, and what a turn of a session costs
by the length of its prompt."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.harness import Row, Scope, in_child, row
from pdbus.lab.config import CACHE_TOKENS, LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.sessions import Draw, SessionShape, generate_sessions
from pdbus.lab.simulate import simulate
from pdbus.lab.traces import Trace

METHODS = ("round_robin", "cache_aware")
BLOCK_TOKENS = 64  # WEKA's
OPEN = LabConfig()
SESSIONS = LabConfig(decode_kv_tokens=CACHE_TOKENS)
WEKA = LabConfig(ranks=4, decode_ranks=4, decode_kv_tokens=CACHE_TOKENS)
SHORT, LONG = 20_000, 160_000  # tokens of a session's first prompt


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    rows = []
    for kind, requests in (("open loop", 24_000), ("sessions", 6_000), ("weka", 3_000)):
        for method in METHODS:
            scope.show(f"{kind}, {method}")
            taken = _measured(scope, "measure", kind=kind, method=method, requests=scope.size(requests, 100))
            rows.append(row(f"{kind}, {method}", "requests replayed", "1/s of CPU", taken))
    for method in METHODS:
        scope.show(f"turns of long sessions, {method}")
        long, short = (
            _measured(scope, "measure_turns", method=method, tokens=tokens, turns=scope.size(1_500, 60))
            for tokens in (LONG, SHORT)
        )
        rows.append(row(f"turn at {LONG:,} tokens, {method}", f"CPU, beside {SHORT:,}", "µs", long, short))
    return rows


def _measured(scope: Scope, name: str, **arguments: Any) -> list[float]:
    return [in_child(f"lab:{name}", 600.0, **arguments)["figure"] for _ in range(min(3, scope.runs))]


def trace_of(kind: str, requests: int) -> tuple[Trace, LabConfig]:
    """Return a trace of about so many requests, and the setting for it: `open loop` (8 + 8 ranks), `sessions` of
    AIPerf's shape (8 + 8 ranks, 64 under way), or `weka` (prompts of 105,000 tokens in blocks of 64, of which a turn
    adds some 1,000; 4 + 4 ranks, 16 under way)."""
    if kind == "open loop":
        return generate(requests / 3.4), OPEN
    if kind == "sessions":
        sessions = requests // 10
        return generate_sessions(sessions), replace(SESSIONS, concurrency=min(64, sessions // 2))
    shape = SessionShape(
        shared_tokens=20_000, group_tokens=0, own=Draw(60_000, 50_000, 120_000), turn=Draw(1_000, 719),
        output=Draw(300, 228), end_probability=0.01,
    )  # fmt: skip
    sessions = requests // 50
    trace = generate_sessions(sessions, shape=shape, block_tokens=BLOCK_TOKENS)
    return trace, replace(WEKA, concurrency=min(16, sessions // 2))


def measure(kind: str, method: str, requests: int) -> dict[str, Any]:
    """Return the requests that this process replays in a second of CPU, as `figure`."""
    trace, config = trace_of(kind, requests)
    began = time.process_time()
    simulate(trace, method, config)
    return {"figure": len(trace) / (time.process_time() - began)}


def measure_turns(method: str, tokens: int, turns: int) -> dict[str, Any]:
    """Return the microseconds of CPU of a request in sessions that begin with `tokens` tokens and grow by a thousand
    each turn, on two prefill and two decode ranks."""
    shape = SessionShape(
        shared_tokens=0, group_tokens=0, own=Draw(tokens, tokens), turn=Draw(800, 800), output=Draw(200, 200),
        end_probability=0.0, limit_tokens=tokens + 30_000,
    )  # fmt: skip
    trace = generate_sessions(max(2, turns // 30), shape=shape, block_tokens=BLOCK_TOKENS)
    config = LabConfig(ranks=2, decode_ranks=2, concurrency=2, decode_kv_tokens=CACHE_TOKENS)
    began = time.process_time()
    simulate(trace, method, config)
    return {"figure": (time.process_time() - began) / len(trace) * 1e6}
