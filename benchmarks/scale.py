"""`scale`: the controller's CPU a request and memory with 8, 64 and 512 ranks, beside itself at 8."""

from __future__ import annotations

from benchmarks import parts
from benchmarks.harness import Aim, Row, Scope, Workspace, row

RANKS = (8, 64, 512)
PROCESSES = 4
TOKENS = 128
RATE = 1_000.0
REPORT_HZ = 1.0
AIM = Aim(1.5)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    cpu: dict[int, list[float]] = {}
    idle: dict[int, list[float]] = {}
    memory: dict[int, float] = {}
    for ranks in RANKS:
        with Workspace() as space:
            scope.show(f"starting {ranks} ranks in {PROCESSES} processes")
            path = parts.our_path(space, ranks, TOKENS, processes=PROCESSES, report_hz=REPORT_HZ)
            count = scope.size(2_500, 1_000)
            path.journeys(count // 4, RATE)
            cpu[ranks], idle[ranks] = [], []
            for number in range(scope.runs):
                scope.show(f"{ranks} ranks: run {number + 1} of {scope.runs}")
                before = path.middle.cpu_s()
                elapsed_s = path.client.ask(do="paced", count=count, rate=RATE)["elapsed_s"]
                cpu[ranks].append((path.middle.cpu_s() - before) / count * 1e6)
                idle[ranks].append(elapsed_s)
            memory[ranks] = path.middle.memory_bytes() / 2**20
    first = RANKS[0]
    rows = []
    for ranks in RANKS:
        aim = AIM if ranks != first else None
        rows.append(row(f"{ranks} ranks", "CPU per request", "µs", cpu[ranks], cpu[first], aim))
        rows.append(row(f"{ranks} ranks", "memory of the controller", "MiB", [memory[ranks]], [memory[first]]))
    return rows
