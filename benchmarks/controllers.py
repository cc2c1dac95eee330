"""`controllers`: several controllers over the same ranks, and one broker in front of ever more ranks at work.

Controllers share nothing but what is published, so each adds what a core of its own can do, less the cost of reading:
the loads of all ranks and the counters of the others. Both are measured as processor time, which does not depend on how
many cores there are; requests/s do, since all parts share this machine's. How evenly several controllers fill the ranks
is measured by the lab, in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import parts
from benchmarks.harness import Process, Row, Scope, Workspace, percentile, row
from pdbus.lab import LabConfig, Summary, generate, simulate, summarise

CONTROLLERS = (1, 2, 4)
SHARED_RANKS, SHARED_PROCESSES = 64, 4
TOKENS = 128
WINDOW = 64  # requests open at each
LAB_S = 600
METHODS = ("total_tokens", "cache_aware")
SENT_INTERVAL_S = 0.05  # as controllers do
RANKS = (512, 1_024, 2_048, 4_096)
PROCESSES = 8
REPORT_HZ = 20.0  # of a rank at work whose load changes
WINDOW_S = 5
PACES = {500.0: 1_000, 2.0: 10}  # requests a second: that find the controller awake, or asleep; how many
SHARED = {"CPU a request": "µs", "CPU of the broker a request": "µs", "requests/s": "/s"}
MEASURES = (
    ("imbalance", "imbalance", "× the mean rank"), ("regret_mean_tokens", "regret", "tokens"),
    ("ttft_mean_s", "mean TTFT", "s"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Controllers over the same ranks, each with a client of its own."""

    broker: Process
    controllers: tuple[Process, ...]
    clients: tuple[Process, ...]

    def burst(self, count: int) -> tuple[float, float, float]:
        """Send `count` requests in all and return the CPU per request of all controllers, and of the broker, in µs; and
        requests/s."""
        before, of_broker = self._cpu_s(), self.broker.cpu_s()
        for client in self.clients:
            client.command(do="burst", count=count // len(self.clients), window=WINDOW)
        elapsed_s = max(client.answer()["elapsed_s"] for client in self.clients)
        per = 1e6 / count
        return (self._cpu_s() - before) * per, (self.broker.cpu_s() - of_broker) * per, count / elapsed_s

    def _cpu_s(self) -> float:
        return sum(each.cpu_s() for each in self.controllers)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    return [*_several(scope), *_balance(scope), *_many_ranks(scope)]


def _several(scope: Scope) -> list[Row]:
    count = scope.size(12_000, 120)
    figures: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        groups = {}
        for controllers in CONTROLLERS:
            scope.show(f"starting {_counted(controllers)}, {SHARED_RANKS} ranks")
            groups[controllers] = _group(stack.enter_context(Workspace()), controllers)
        for number in range(1 + scope.runs):
            for controllers, group in groups.items():
                scope.show(f"{_counted(controllers)}: run {number} of {scope.runs}")
                taken = group.burst(count)
                for metric, value in zip(SHARED, taken, strict=True):
                    if number:  # the first is for warmth
                        figures.setdefault((controllers, metric), []).append(value)
    return [
        _row(f"{SHARED_RANKS} ranks", controllers, metric, SHARED[metric], values, figures[1, metric])
        for (controllers, metric), values in figures.items()
    ]


def _group(space: Workspace, count: int) -> Group:
    broker = parts.broker(space)
    names = tuple(f"ctl-{number}" for number in range(count))
    controllers = tuple(
        parts.controller(space, "--name", name, "--unified-method", "total_tokens", at=name) for name in names
    )
    parts.our_nodes(space, SHARED_RANKS, processes=SHARED_PROCESSES, at=names)
    return Group(broker, controllers, tuple(parts.our_client(space, TOKENS, name) for name in names))


def _balance(scope: Scope) -> list[Row]:
    """Measure balance as the lab does, on made-up traces, each with one controller and with several."""
    rows = []
    for method in METHODS:
        found: dict[int, list[Summary]] = {}
        for controllers in CONTROLLERS:
            scope.show(f"{method} with {_counted(controllers)}, in virtual time")
            configs = [
                LabConfig(controllers=controllers, sent_interval_s=SENT_INTERVAL_S, seed=seed + 1)
                for seed in range(scope.runs)
            ]
            found[controllers] = [
                summarise(simulate(generate(scope.size(LAB_S, 60), seed=each.seed), method, each), each)
                for each in configs
            ]
        for controllers in CONTROLLERS:
            for name, metric, unit in MEASURES:
                values, alone = ([getattr(each, name) for each in found[count]] for count in (controllers, 1))
                rows.append(_row(method, controllers, metric, unit, values, alone))
    return rows


def _many_ranks(scope: Scope) -> list[Row]:
    """Measure what reports alone cost broker and controller, how many are read, and how requests fare meanwhile."""
    rows = []
    processes = scope.size(PROCESSES, 2)
    for ranks in (64,) if scope.quick else RANKS:
        figures: dict[tuple[str, str], list[float]] = {}
        with Workspace() as space:
            scope.show(f"starting {ranks:,} ranks in {processes} processes")
            broker = parts.broker(space)
            controller = space.part("busy:controller", bus=space.endpoint("bus"), address=space.endpoint("ctl"))
            controller.wait_ready()
            nodes = parts.our_nodes(space, ranks, processes=processes, report_hz=REPORT_HZ, kind="busy:ours")
            path = parts.Path(parts.our_client(space, TOKENS), controller, nodes, (broker,))
            path.journeys(scope.size(100, 10), max(PACES))
            for number in range(scope.runs):
                scope.show(f"{ranks:,} ranks: run {number + 1} of {scope.runs}")
                for key, value in _listening(path, scope).items():
                    figures.setdefault(key, []).append(value)
        case = f"{ranks:,} ranks at work"
        rows += [row(case, metric, unit, values) for (metric, unit), values in figures.items()]
    return rows


def _listening(path: parts.Path, scope: Scope) -> dict[tuple[str, str], float]:
    (broker,) = path.beside
    began, used = time.perf_counter(), (broker.cpu_s(), path.middle.cpu_s())
    published, read = _published(path), path.middle.ask()
    time.sleep(scope.size(WINDOW_S, 1))
    published, read, elapsed_s = _published(path) - published, path.middle.ask() - read, time.perf_counter() - began
    by_broker, by_controller = broker.cpu_s() - used[0], path.middle.cpu_s() - used[1]
    arrivals = {
        (f"submit to arrival at {rate:g}/s, p50", "µs"): percentile(path.journeys(scope.size(count, 10), rate), 0.5)
        for rate, count in PACES.items()
    }
    return {
        ("publications/s", "/s"): published / elapsed_s,
        ("CPU of the broker", "% of a core"): 100 * by_broker / elapsed_s,
        ("CPU of the controller", "% of a core"): 100 * by_controller / elapsed_s,
        ("CPU of the broker a publication", "µs"): by_broker / published * 1e6,
        ("CPU of the controller a publication read", "µs"): by_controller / read * 1e6,
        ("read by the controller", "% of publications"): 100 * read / published,
        **arrivals,
    }


def _published(path: parts.Path) -> int:
    return sum(node.ask(do="count") for node in path.nodes)


def _row(case: str, controllers: int, metric: str, unit: str, values: Sequence[float], alone: Sequence[float]) -> Row:
    return row(f"{_counted(controllers)}, {case}", metric, unit, values, alone if controllers > 1 else ())


def _counted(controllers: int) -> str:
    return f"{controllers} controller{'s' * (controllers > 1)}"
