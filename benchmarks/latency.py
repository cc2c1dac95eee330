"""`latency`: submit to arrival at the node at a steady 1,000 requests a second, beside bare DEALER→ROUTER→DEALER."""

from __future__ import annotations

from benchmarks import parts
from benchmarks.dispatch import NODES, size_name
from benchmarks.harness import Aim, Row, Scope, Workspace, percentile, row

RATE = 1_000.0
TOKENS = (128, 2_048)
AIMS = {"p50": Aim(1.5), "p99": Aim(2.0)}
SHARES = {"p50": 0.5, "p99": 0.99}


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    rows: list[Row] = []
    for tokens in TOKENS:
        rows += _case(scope, tokens)
    return rows


def _case(scope: Scope, tokens: int) -> list[Row]:
    name = size_name(tokens * 4)
    count = scope.size(2_000, 500)
    with Workspace() as space:
        scope.show(f"{name}: starting {2 * NODES} nodes")
        sides = (parts.our_path(space, NODES, tokens), parts.bare_path(space, NODES, tokens))
        ours: list[list[float]] = []
        bare: list[list[float]] = []
        for side in sides:
            side.journeys(count // 2, RATE)  # warm-up
        for number in range(scope.runs):
            scope.show(f"{name}: run {number + 1} of {scope.runs}")
            for side, results in zip(sides, (ours, bare), strict=True):
                results.append(side.journeys(count, RATE))
    return [
        row(
            f"{name} at {RATE:,.0f}/s",
            f"submit to arrival {metric}",
            "µs",
            [percentile(run, SHARES[metric]) for run in ours],
            [percentile(run, SHARES[metric]) for run in bare],
            aim,
        )
        for metric, aim in AIMS.items()
    ]
