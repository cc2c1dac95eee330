"""`peers`: what others do in our place, beside ours in one run: SGLang's data-parallel controller and vLLM's balancer,
each its own code in a Python that has it, and the bare brokers. Ranks end each request at once, whoever sent it.

They do not all do the same work for a request: docs/performance.md says what each one does. CPU is of the process that
dispatches and of the one that brings it the ranks' loads. The floor of each figure is the lean bare broker's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from bus.build import CORES
from pdbus.bench import parts
from pdbus.bench.dispatch import NODES, WARM_UP, WINDOW
from pdbus.bench.harness import Row, Scope, Workspace, in_child, percentile, row
from pdbus.bench.latency import RATE

TOKENS = (128, 2_048, 32_768)
PACED = TOKENS[:2]
PICK_RANKS = (8, 64, 512)
CALIBRATE_S = 0.5
START_S = 600.0  # importing an engine takes most of it
LEAN = "lean broker"
NOTHING = "no requests"
CPU, PER_S, ONE_WAY, IDLE, PICK = "CPU a request", "requests/s", "one-way p50", "idle CPU", "pick and raise"
UNITS = {CPU: "µs", PER_S: "/s", ONE_WAY: "µs", IDLE: "% of a core", PICK: "µs"}
SOURCES_OUT = {"PYTHONPATH": ""}  # so that our sources don't come before the compiled cores of another environment


@dataclass(frozen=True, slots=True)
class Side:
    """One way from who has requests to the ranks. `asked`: what else the client has to be told."""

    name: str
    path: parts.Path
    asked: dict[str, Any] = field(default_factory=dict)
    spins: bool = False  # takes a core when idle, so it is stopped while others are measured; says how often it looked

    @contextmanager
    def awake(self) -> Iterator[None]:
        if self.spins:
            self.path.middle.resume()
        try:
            yield
        finally:
            if self.spins:
                self.path.middle.pause()

    def burst(self, count: int) -> tuple[float, float]:
        """(CPU a request in µs, requests/s). A side that spins is not charged for the times it looked in vain, at the
        price of those when it has nothing to do."""
        look_s = self._look_s() if self.spins else 0.0
        looks, before = self._looks(), self._cpu_s()
        elapsed_s = self._ask(do="burst", count=count, window=WINDOW)["elapsed_s"]
        used_s = self._cpu_s() - before
        in_vain = self._looks() - looks - count if self.spins else 0
        return (used_s - in_vain * look_s) / count * 1e6, count / elapsed_s

    def one_way(self, count: int) -> float:
        """Microseconds from submit to rank at RATE requests a second, their median."""
        for node in self.path.nodes:
            node.ask(do="take")  # of bursts
        self._ask(do="paced", count=count, rate=RATE)
        return percentile([ns / 1e3 for node in self.path.nodes for ns in node.ask(do="take")], 0.5)

    def idle(self, seconds: float) -> float:
        """Percent of a core."""
        began, before = time.perf_counter(), self._cpu_s()
        time.sleep(seconds)
        return 100 * (self._cpu_s() - before) / (time.perf_counter() - began)

    def _ask(self, **command: Any) -> Any:
        return self.path.client.ask(**command, **self.asked)

    def _cpu_s(self) -> float:
        return sum(process.cpu_s() for process in (self.path.middle, *self.path.beside))

    def _looks(self) -> int:
        return int(self.path.middle.ask(do="looks")) if self.spins else 0

    def _look_s(self) -> float:
        looks, before = self._looks(), self._cpu_s()
        time.sleep(CALIBRATE_S)
        used_s = self._cpu_s() - before
        return used_s / (self._looks() - looks)


Sized = Callable[[int], Side]  # by the tokens of a prompt
Figures = dict[tuple[str, str, str], list[float]]  # by case, side, metric


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's dispatcher, and its pick alone (`module:function`), in a Python that has `package`."""

    name: str
    package: str
    start: Callable[[Workspace, Scope, str], list[Sized]]
    pick: str
    env: dict[str, str] = field(default_factory=dict)


def run(scope: Scope) -> list[Row]:
    found = {name: python for name, peer in PEERS.items() if (python := _python_of(name, peer, scope))}
    figures: Figures = {}
    with Workspace() as space:
        sized: list[Sized] = []
        for name, python in found.items():
            scope.say(f"starting {name}")
            sized += PEERS[name].start(space, scope, python)
        for tokens in TOKENS:
            _measure(scope, tokens, sized, figures)
    _measure_picks(scope, found, figures)
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


def _ours(scope: Scope) -> dict[str, dict[str, Any]]:
    """How to start ours, by name: as it runs here, and if another Python was named in that one."""
    ways: dict[str, dict[str, Any]] = {f"pdbus, {CORES}": {}}
    if other := scope.pythons.get("compiled"):
        how: dict[str, Any] = {"python": other, "env": SOURCES_OUT}
        ways.setdefault(f"pdbus, {in_child('peers_parts:cores', **how)}", how)
    return ways


def _measure(scope: Scope, tokens: int, peers: Sequence[Sized], figures: Figures) -> None:
    """All sides in turn, so many times."""
    case = f"{tokens:,} tokens"
    count = scope.size(12_000 if tokens < 10_000 else 3_000, 500)
    ranks = rank_count(scope)
    with ExitStack() as stack:
        scope.say(f"{case}: starting the others")

        def space() -> Workspace:
            return stack.enter_context(Workspace())

        sides = [
            Side("bare broker", parts.bare_path(space(), ranks, tokens)),
            Side(LEAN, parts.bare_path(space(), ranks, tokens, lean=True)),
            *(Side(name, parts.our_path(space(), ranks, tokens, **how)) for name, how in _ours(scope).items()),
            *(peer(tokens) for peer in peers),
        ]
        for number in range(1 + scope.runs):
            for side in sides:
                scope.say(f"{case}: run {number} of {scope.runs}: {side.name}")
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
        yield "", ONE_WAY, side.one_way(scope.size(2_000, 200))
    if tokens == TOKENS[0]:
        yield NOTHING, IDLE, side.idle(float(scope.size(3, 1)))


def _measure_picks(scope: Scope, found: dict[str, str], figures: Figures) -> None:
    measured: dict[str, tuple[str, dict[str, Any]]] = {
        name: ("peers_parts:pick_of_ours", how) for name, how in _ours(scope).items()
    }
    for name, python in found.items():
        peer = PEERS[name]
        measured[peer.name] = peer.pick, {"python": python, "env": peer.env}
    for name, (target, how) in measured.items():
        scope.say(f"picks of {name}")
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


def rank_count(scope: Scope) -> int:
    return scope.size(NODES, 2)


def _sglang(space: Workspace, scope: Scope, python: str) -> list[Sized]:
    """Its DP controller in both serializations, in front of the same ranks."""
    ranks, replies = rank_count(scope), space.endpoint("sglang-replies")
    endpoints = [space.endpoint(f"sglang-{rank}") for rank in range(ranks)]
    nodes = tuple(space.part("peers_parts:pulling_rank", takes=each, replies=replies) for each in endpoints)
    for node in nodes:
        node.wait_ready()
    controllers = {
        name: space.part(
            "peers_engines:sglang", env={**PEERS["sglang"].env, "SGLANG_USE_PICKLE_IPC": pickled}, python=python,
            folder=str(space.folder / name), endpoints=endpoints, tokens=TOKENS,
        )
        for name, pickled in SERIALIZATIONS.items()
    }  # fmt: skip
    said: dict[str, dict[str, Any]] = {}
    for name, controller in controllers.items():
        controller.wait_ready(START_S)
        said[name] = controller.answer()
        controller.pause()
    servers = [each["server"] for each in said.values()]
    loads = space.part("peers_engines:sglang_loads", PEERS["sglang"].env, python, servers=servers, ranks=ranks)
    loads.wait_ready(START_S)
    client = space.part(
        "peers_parts:sender", replies=replies, sockets={name: each["takes"] for name, each in said.items()},
        requests={name: each["requests"] for name, each in said.items()},
    )  # fmt: skip
    client.wait_ready()

    def sized(name: str, tokens: int) -> Side:
        asked = {"to": name, "tokens": tokens}
        return Side(f"SGLang, {name}", parts.Path(client, controllers[name], nodes), asked, spins=True)

    return [partial(sized, name) for name in controllers]


def _vllm(space: Workspace, scope: Scope, python: str) -> list[Sized]:
    """The client of its engines, which runs in its API server, and its coordinator."""
    env, ranks = PEERS["vllm"].env, rank_count(scope)
    takes, replies, front, loads, waves = (
        space.endpoint(f"vllm-{name}") for name in ("takes", "replies", "front", "loads", "waves")
    )
    forms = in_child("peers_engines:vllm_forms", START_S, env, python)
    coordinator = space.part(
        "peers_engines:vllm_coordinator", env, python, front=front, outputs=loads, waves=waves, ranks=ranks
    )
    nodes = tuple(
        space.part(
            "peers_parts:dealing_rank", takes=takes, number=number, replies=replies, loads=loads, waves=waves, **forms
        )
        for number in range(ranks)
    )
    client = space.part(
        "peers_engines:vllm", env, python, takes=takes, replies=replies, loads=front, ranks=ranks, tokens=TOKENS
    )
    for process in (coordinator, *nodes, client):
        process.wait_ready(START_S)
    path = parts.Path(client, client, nodes, (coordinator,))
    return [lambda tokens: Side("vLLM", path, {"tokens": tokens})]


SERIALIZATIONS = {"pickle": "1", "msgpack": "0"}  # SGLang's default first
PEERS = {
    "sglang": Peer("SGLang", "sglang", _sglang, "peers_engines:sglang_pick", {"SGLANG_USE_CPU_ENGINE": "1"}),
    "vllm": Peer("vLLM", "vllm", _vllm, "peers_engines:vllm_pick", {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}),
}
