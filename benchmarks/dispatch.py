"""`dispatch`: client → controller → 8 node processes under full load, beside a bare broker of the same frames. Measured
is the CPU time per request of the process in the middle, for three lengths of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import parts
from benchmarks.harness import Aim, Row, Scope, Workspace, row

NODES = 8
WINDOW = 64
CASES = ((128, 1.5), (2_048, 1.2), (32_768, 1.1))  # tokens of the prompt, aim for CPU over the bare broker's
WARM_UP = 1_000  # requests


@dataclass(frozen=True, slots=True)
class Measured:
    """One burst: the processor time of the middle per request, in seconds, and the requests per second."""

    cpu_s: float  # of the process in the middle, a request
    per_s: float


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    rows: list[Row] = []
    for tokens, limit in CASES:
        rows += _case(scope, tokens, limit)
    return rows


def _case(scope: Scope, tokens: int, limit: float) -> list[Row]:
    name = size_name(tokens * 4)
    count, nodes = scope.size(12_000 if tokens < 10_000 else 3_000, 100), scope.size(NODES, 2)
    ours: list[Measured] = []
    bare: list[Measured] = []
    lean: list[Measured] = []
    with Workspace() as space:
        scope.show(f"{name}: starting {3 * nodes} nodes")
        sides = (
            parts.our_path(space, nodes, tokens),
            parts.bare_path(space, nodes, tokens),
            parts.bare_path(space, nodes, tokens, lean=True),
        )
        for side in sides:
            side.client.ask(do="burst", count=min(WARM_UP, count), window=WINDOW)
        for number in range(scope.runs):
            scope.show(f"{name}: run {number + 1} of {scope.runs}")
            for side, results in zip(sides, (ours, bare, lean), strict=True):
                results.append(_burst(side, count))
    cpu_us = [m.cpu_s * 1e6 for m in ours]
    return [
        row(name, "cpu per request", "µs", cpu_us, [m.cpu_s * 1e6 for m in bare], Aim(limit)),
        row(name, "cpu per request, floor lean", "µs", cpu_us, [m.cpu_s * 1e6 for m in lean]),
        row(name, "requests per second", "1/s", [m.per_s for m in ours], [m.per_s for m in bare]),
    ]


def _burst(side: parts.Path, count: int) -> Measured:
    before = side.middle.cpu_s()
    elapsed_s = side.client.ask(do="burst", count=count, window=WINDOW)["elapsed_s"]
    return Measured((side.middle.cpu_s() - before) / count, count / elapsed_s)


def size_name(payload_bytes: int) -> str:
    """Return a size in bytes as text, in KiB from 1024 on."""
    return f"{payload_bytes} B" if payload_bytes < 1024 else f"{payload_bytes // 1024} KiB"
