"""The other dispatchers of requests to ranks, for the `peers` benchmark: how each is started, and what is measured.

Ranks and senders are those of `benchmarks.peers_parts`, the engines' own code that of `benchmarks.peers_engines`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import parts
from benchmarks.dispatch import NODES, WINDOW
from benchmarks.harness import Scope, Workspace, in_child, percentile
from benchmarks.latency import RATE

TOKENS = (128, 2_048, 32_768)  # of prompts
CALIBRATE_S = 0.5
START_S = 600.0  # importing an engine takes most of it
SERIALIZATIONS = {"pickle": "1", "msgpack": "0"}  # SGLang's default first


@dataclass(frozen=True, slots=True)
class Side:
    """One way from a sender of requests to the ranks, and what is measured of it. `asked`: further settings of the
    client's commands."""

    name: str
    path: parts.Path
    asked: dict[str, Any] = field(default_factory=dict)
    spins: bool = False  # takes a core when idle, so it is stopped while others are measured; says how often it looked

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a side that spins run inside the `with` block only; others always run."""
        if self.spins:
            self.path.middle.resume()
        try:
            yield
        finally:
            if self.spins:
                self.path.middle.pause()

    def burst(self, count: int) -> tuple[float, float]:
        """Send `count` requests under full load; return the CPU per request of the dispatcher in µs, and requests/s. A
        side that spins is not charged for the times it looked in vain, at the price of those when it has nothing to
        do."""
        look_s = self._look_s() if self.spins else 0.0
        looks, before = self._looks(), self._cpu_s()
        elapsed_s = self._ask(do="burst", count=count, window=WINDOW)["elapsed_s"]
        used_s = self._cpu_s() - before
        in_vain = self._looks() - looks - count if self.spins else 0
        return (used_s - in_vain * look_s) / count * 1e6, count / elapsed_s

    def one_way(self, count: int) -> float:
        """Send `count` requests at RATE a second; return the median of the microseconds from submit to rank."""
        for node in self.path.nodes:
            node.ask(do="take")  # of bursts
        self._ask(do="paced", count=count, rate=RATE)
        return percentile([ns / 1e3 for node in self.path.nodes for ns in node.ask(do="take")], 0.5)

    def idle(self, seconds: float) -> float:
        """Wait so many seconds without requests; return the dispatcher's CPU in percent of a core."""
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


@dataclass(frozen=True, slots=True)
class Peer:
    """Another project's dispatcher. `start` starts it in a Python and returns a Side for each of its variants, by
    tokens of a prompt; `pick` measures its pick alone (`module:function`). The Python must have `package`."""

    name: str
    package: str
    start: Callable[[Workspace, Scope, str], list[Sized]]
    pick: str
    env: dict[str, str] = field(default_factory=dict)


def rank_count(scope: Scope) -> int:
    """Return the number of ranks of each side."""
    return scope.size(NODES, 2)


def _sglang(space: Workspace, scope: Scope, python: str) -> list[Sized]:
    """SGLang's DP controller in both serializations, in front of the same ranks."""
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
    facts: dict[str, dict[str, Any]] = {}
    for name, controller in controllers.items():
        controller.wait_ready(START_S)
        facts[name] = controller.answer()
        controller.pause()
    servers = [each["server"] for each in facts.values()]
    loads = space.part("peers_engines:sglang_loads", PEERS["sglang"].env, python, servers=servers, ranks=ranks)
    loads.wait_ready(START_S)
    client = space.part(
        "peers_parts:sender", replies=replies, sockets={name: each["takes"] for name, each in facts.items()},
        requests={name: each["requests"] for name, each in facts.items()},
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


PEERS = {
    "sglang": Peer("SGLang", "sglang", _sglang, "peers_engines:sglang_pick", {"SGLANG_USE_CPU_ENGINE": "1"}),
    "vllm": Peer("vLLM", "vllm", _vllm, "peers_engines:vllm_pick", {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}),
}
