"""`idle`: the processor time of broker, controller and a node, with 16 sim nodes (nodes whose engine computes nothing)
and no requests."""

from __future__ import annotations

import time

from benchmarks import parts
from benchmarks.harness import Aim, Row, Scope, Workspace, row

NODES = 16
SETTLE_S = 2.0
AIM = Aim(1.0, of_ratio=False)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    figures: dict[str, list[float]] = {"broker": [], "controller": [], "broker + controller": [], "a node": []}
    with Workspace() as space:
        scope.show(f"starting broker, controller and {NODES} sim nodes")
        broker = parts.broker(space)
        controller = parts.controller(space)
        nodes = parts.sim_nodes(space, "unified", processes=NODES, ranks=NODES)
        window_s = float(scope.size(4, 2))
        time.sleep(SETTLE_S)
        for number in range(scope.runs):
            scope.show(f"run {number + 1} of {scope.runs}: {window_s:g} s of nothing")
            processes = (broker, controller, *nodes)
            before = [process.cpu_s() for process in processes]
            began = time.perf_counter()
            time.sleep(window_s)
            elapsed_s = time.perf_counter() - began
            used = [100 * (process.cpu_s() - was) / elapsed_s for process, was in zip(processes, before, strict=True)]
            figures["broker"].append(used[0])
            figures["controller"].append(used[1])
            figures["broker + controller"].append(used[0] + used[1])
            figures["a node"].append(sum(used[2:]) / NODES)
    return [
        row(f"{NODES} nodes, no requests", f"CPU of {name}", "% of a core", values, aim=AIM if "+" in name else None)
        for name, values in figures.items()
    ]
