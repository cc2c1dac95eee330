"""`peers`: what others do in our place, beside ours in one run: SGLang's data-parallel controller and vLLM's balancer,
each its own code in a Python that has it, and the bare brokers. Ranks end each request at once.

They do not all do the same work for a request: docs/performance.md says what each one does. CPU is of the process that
dispatches and of the one that brings it the ranks' loads. The floor of each figure is the lean bare broker's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from benchmarks import parts
from benchmarks.dispatch import WARM_UP
from benchmarks.harness import Row, Scope, Workspace, in_child, row
from benchmarks.peers_sides import PEERS, START_S, TOKENS, Peer, Side, Sized, rank_count
from bus.build import CORES

PACED = TOKENS[:2]
PICK_RANKS = (8, 64, 512)
LEAN = "lean broker"
NOTHING = "no requests"
CPU, PER_S, ONE_WAY, IDLE, PICK = "CPU a request", "requests/s", "one-way p50", "idle CPU", "pick and raise"
UNITS = {CPU: "µs", PER_S: "/s", ONE_WAY: "µs", IDLE: "% of a core", PICK: "µs"}
SOURCES_OUT = {"PYTHONPATH": ""}  # so that our sources don't come before the compiled cores of another environment
Ways = Mapping[str, dict[str, Any]]  # how ours is started, by name: what else `parts.our_path` is told
Figures = dict[tuple[str, str, str], list[float]]  # by case, side, metric


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows. A peer
    without a Python is left out, with a note."""
    found = {name: python for name, peer in PEERS.items() if (python := _python_of(name, peer, scope))}
    ours, figures = _ours(scope), Figures()
    with Workspace() as space:
        sized: list[Sized] = []
        for name, python in found.items():
            scope.show(f"starting {name}")
            sized += PEERS[name].start(space, scope, python)
        for tokens in TOKENS:
            _measure(scope, tokens, ours, sized, figures)
    _measure_picks(scope, ours, found, figures)
    return [_row(figures, key) for key in sorted(figures, key=_place)]


def _python_of(name: str, peer: Peer, scope: Scope) -> str:
    """The interpreter for a peer, ours if it has it; empty, and a note, where there is none."""
    if python := scope.pythons.get(name):
        return python
    if find_spec(peer.package) is not None:
        return sys.executable
    scope.note(
        f"{peer.name} is left out: --peer {name}=PYTHON names a Python with it and pdbus; make bench-peers makes one"
    )
    return ""


def _ours(scope: Scope) -> Ways:
    """Return our ways: as pdbus runs here, and in the other Python if one was named."""
    ways: dict[str, dict[str, Any]] = {f"pdbus, {CORES}": {}}
    if other := scope.pythons.get("compiled"):
        how: dict[str, Any] = {"python": other, "env": SOURCES_OUT}
        ways.setdefault(f"pdbus, {in_child('peers_parts:cores', **how)}", how)
    return ways


def _measure(scope: Scope, tokens: int, ours: Ways, peers: Sequence[Sized], figures: Figures) -> None:
    """All sides in turn, so many times."""
    case = f"{tokens:,} tokens"
    count = scope.size(12_000 if tokens < 10_000 else 3_000, 100)
    ranks = rank_count(scope)
    with ExitStack() as stack:
        scope.show(f"{case}: starting the others")

        def space() -> Workspace:
            return stack.enter_context(Workspace())

        sides = [
            Side("bare broker", parts.bare_path(space(), ranks, tokens)),
            Side(LEAN, parts.bare_path(space(), ranks, tokens, lean=True)),
            *(Side(name, parts.our_path(space(), ranks, tokens, **how)) for name, how in ours.items()),
            *(peer(tokens) for peer in peers),
        ]
        for number in range(1 + scope.runs):
            for side in sides:
                scope.show(f"{case}: run {number} of {scope.runs}: {side.name}")
                with side.awake():
                    if not number:
                        side.burst(min(WARM_UP, count))
                        continue
                    for of, metric, value in _taken(side, scope, tokens, count):
                        figures.setdefault((of or case, side.name, metric), []).append(value)


def _taken(side: Side, scope: Scope, tokens: int, count: int) -> Iterator[tuple[str, str, float]]:
    """(case, empty: that of `tokens`; metric; value)"""
    cpu_us, per_s = side.burst(count)
    yield "", CPU, cpu_us
    yield "", PER_S, per_s
    if tokens in PACED:
        yield "", ONE_WAY, side.one_way(scope.size(2_000, 50))
    if tokens == TOKENS[0]:
        yield NOTHING, IDLE, side.idle(float(scope.size(3, 1)))


def _measure_picks(scope: Scope, ours: Ways, found: Mapping[str, str], figures: Figures) -> None:
    measured = {name: ("peers_parts:pick_of_ours", how) for name, how in ours.items()}
    for name, python in found.items():
        peer = PEERS[name]
        measured[peer.name] = peer.pick, {"python": python, "env": peer.env}
    for name, (target, how) in measured.items():
        scope.show(f"picks of {name}")
        picks = scope.size(5_000, 500)
        for ranks, values in in_child(target, START_S, ranks=PICK_RANKS, picks=picks, **how).items():
            figures[f"{ranks} ranks", name, PICK] = values


def _place(key: tuple[str, str, str]) -> tuple[int, int]:
    """Rows by metric, then by case, in each the sides as they were measured."""
    case, _, metric = key
    number = int(case.split()[0].replace(",", "")) if case != NOTHING else 0
    return list(UNITS).index(metric), number


def _row(figures: Figures, key: tuple[str, str, str]) -> Row:
    case, name, metric = key
    floors = figures.get((case, LEAN, metric), ()) if name != LEAN else ()
    return row(f"{case}: {name}", metric, UNITS[metric], figures[key], floors)
