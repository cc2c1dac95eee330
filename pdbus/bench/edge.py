"""`edge`: our HTTP edge beside the routers that others run, under one load generator, with ranks that take no time.

Routers are asked for SGLang's `/generate` with token ids, and pass it on to mock engines. Ours reads the same request,
hashes the prompt's blocks, submits it over the bus and follows the stream. A router is measured where its command is on
the PATH. Latency is that through it less that of asking the engine, or the client library, without it.
"""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from pdbus.bench import parts
from pdbus.bench.harness import PartFailed, Process, Row, Scope, Workspace, percentile, row
from pdbus.launcher.addresses import free_ports

PROMPTS = (128, 2_048, 32_768)
ENGINES = 4
STREAMED = 65  # tokens, of which the first is counted with the request
ROUTERS = {"sglang-router": ("launch",), "smg": ("launch",), "vllm-router": ()}
START_S = 30.0


@dataclass(slots=True, eq=False)
class Side:
    """One thing that takes HTTP requests. `cpu` is of what stands between client and engine."""

    name: str
    url: str
    process: Process
    direct: Callable[[int, int], list[float]]  # microseconds of `count` requests of so many tokens, without it
    others: tuple[Process, ...] = ()  # whose processor time a whole path has besides
    figures: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def note(self, tokens: int, metric: str, value: float) -> None:
        self.figures.setdefault((tokens, metric), []).append(value)

    def cpu_s(self) -> tuple[float, float]:
        own = self.process.cpu_s()
        return own, own + sum(other.cpu_s() for other in self.others)


def run(scope: Scope) -> list[Row]:
    with Workspace() as space:
        load = space.part("edge_parts:load")
        load.wait_ready()
        ours = _ours(space, scope)
        sides = [ours, *_routers(space, scope, load)]
        for number in range(1 + scope.runs):
            for tokens in PROMPTS:
                for side in sides:
                    scope.say(f"run {number} of {scope.runs}: {side.name}, {tokens} tokens")
                    _measure(side, load, tokens, scope)
            if not number:
                for side in sides:
                    side.figures.clear()  # warm-up
    return [made for tokens in PROMPTS for made in _rows(tokens, ours, sides[1:])]


def _measure(side: Side, load: Process, tokens: int, scope: Scope) -> None:
    count = scope.size(2_000, 40) if tokens < 10_000 else scope.size(200, 10)

    def cost(connections: int, **asked: int) -> tuple[float, float]:
        began, own, whole = time.monotonic(), *side.cpu_s()
        load.ask(url=side.url, tokens=tokens, count=count, connections=connections, **asked)
        own_after, whole_after = side.cpu_s()
        side.note(tokens, "requests/s", count / (time.monotonic() - began))
        return (own_after - own) / count * 1e6, (whole_after - whole) / count * 1e6

    own, whole = cost(16)
    side.note(tokens, "CPU a request", own)
    side.note(tokens, "CPU a request, with what else it needs", whole)
    if tokens == PROMPTS[0]:
        count = scope.size(200, 10)
        rate = side.figures[tokens, "requests/s"].pop()
        first, _ = cost(4, output=1, stream=1)
        more, _ = cost(4, output=STREAMED, stream=1)
        del side.figures[tokens, "requests/s"][-2:]
        side.note(tokens, "requests/s", rate)
        side.note(tokens, "CPU a streamed token", (more - first) / (STREAMED - 1))
    alone = scope.size(200, 20)
    through = load.ask(url=side.url, tokens=tokens, count=alone, connections=1)
    direct = side.direct(tokens, alone)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        side.note(tokens, f"added {name}", percentile(through, share) - percentile(direct, share))


def _rows(tokens: int, ours: Side, routers: list[Side]) -> list[Row]:
    units = {"requests/s": "/s"}
    made: list[Row] = []
    for (of, metric), values in ours.figures.items():
        if of != tokens:
            continue
        unit = units.get(metric, "µs")
        made.append(row(f"{tokens} tokens", metric, unit, values))
        for router in routers:
            theirs = router.figures[of, metric]
            made.append(row(f"{tokens} tokens, beside {router.name}", metric, unit, values, theirs))
    return made


def _ours(space: Workspace, scope: Scope) -> Side:
    scope.say("starting broker, controller, sim nodes and the edge")
    parts.broker(space)
    controller = parts.controller(space, "--unified-method", "cache_aware")
    parts.sim_nodes(space, "unified", "--sim-vocab-size", "65536", processes=ENGINES, ranks=ENGINES)
    edge = space.program(
        "pdbus", "serve", "--http", "0", "--controller", space.endpoint("ctl"), "--watch-parent", "--log-level", "error"
    )
    url = edge.wait_ready().split("endpoint=")[1].strip()
    _await(f"{url}/ready")
    client = space.part("edge_parts:client", controller=space.endpoint("ctl"))
    client.wait_ready()

    def direct(tokens: int, count: int) -> list[float]:
        taken: list[float] = client.ask(tokens=tokens, count=count)
        return taken

    return Side("pdbus", url, edge, direct, (controller,))


def _routers(space: Workspace, scope: Scope, load: Process) -> list[Side]:
    found = {name: at for name in ROUTERS if (at := shutil.which(name))}
    if not found:
        return []
    engines = [space.part("edge_parts:engine") for _ in range(ENGINES)]
    for engine in engines:
        engine.wait_ready()
    urls = [f"http://127.0.0.1:{engine.answer()}" for engine in engines]

    def direct(tokens: int, count: int) -> list[float]:
        taken: list[float] = load.ask(url=urls[0], tokens=tokens, count=count, connections=1)
        return taken

    sides = []
    for name, at in found.items():
        scope.say(f"starting {name}")
        port = free_ports("127.0.0.1", 2)
        argv = [at, *ROUTERS[name], "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
        argv += ["--prometheus-port", str(port + 1), "--policy", "round_robin", "--log-level", "error"]
        router = space.part("edge_parts:become", argv=argv)
        router.wait_ready()
        _await(f"http://127.0.0.1:{port}/health")
        side = Side(name, f"http://127.0.0.1:{port}", router, direct)
        _until_it_serves(load, side)
        sides.append(side)
    return sides


def _await(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > until:
                raise PartFailed(f"{url}: {error}") from None
            time.sleep(0.1)


def _until_it_serves(load: Process, side: Side) -> None:
    """A router is up before it has looked at its engines."""
    until = time.monotonic() + START_S
    while True:
        try:
            load.ask(url=side.url, tokens=8, count=1, connections=1)
            return
        except PartFailed:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
