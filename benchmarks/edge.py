"""`edge`: our HTTP edge beside the routers that others run, under one load generator, with ranks that take no time.

Routers are asked for SGLang's `/generate` with token ids or text, and pass it on to mock engines, which answer at once.
Ours reads the same request, makes ids of a text (which routers do not), hashes the prompt's blocks, submits it over the
bus and follows the stream of a rank that answers at once, too. A router is measured where its command is on the PATH.
The whole path is, of ours, edge, controller and rank link (the library by which an engine is a rank); of a router's, it
and the HTTP server of the mock engine. The floor of a latency is that of asking without it: the engine, or the cluster
by the client library.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks import parts
from benchmarks.harness import PartFailed, Process, Row, Scope, Workspace, await_url, percentile, row
from bus.errors import ConfigError
from bus.runtime.ports import free_ports
from nodes.own.engines import smollm2

PROMPTS = (128, 2_048, 32_768)
ENGINES = 4
STREAMED = 65  # tokens, of which the first is counted with the request
ROUTERS = {"sglang-router": ("launch",), "smg": ("launch",), "vllm-router": ()}
START_S = 30.0
OWN, WHOLE, STREAMING = "CPU a request", "CPU a request, whole path", "CPU a streamed token"
TEXT, TOKENIZING = "CPU a request as text", "CPU of its tokenization"


@dataclass(slots=True, eq=False)
class Side:
    """One program that takes HTTP requests, our edge or a router, with its figures by length of prompt and metric."""

    name: str
    url: str
    process: Process
    direct: Callable[[int, int], list[float]]  # microseconds of `count` requests of so many tokens, without it
    others: Sequence[Process]  # whose processor time the whole path has besides
    figures: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def note(self, tokens: int, metric: str, value: float) -> None:
        """Add a value of one run to a figure."""
        self.figures.setdefault((tokens, metric), []).append(value)

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor seconds so far: its own, and with those of `others`."""
        own = self.process.cpu_s()
        return own, own + sum(other.cpu_s() for other in self.others)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    with Workspace() as space:
        load = space.part("edge_parts:load")
        load.wait_ready()
        ours = _ours(space, scope)
        sides = [ours, *_routers(space, scope, load)]
        texts = _texts(space, scope)
        for number in scope.rounds:
            for tokens in PROMPTS:
                for side in sides:
                    scope.show(f"run {number} of {scope.runs}: {side.name}, {tokens} tokens")
                    _measure(side, load, tokens, scope, text=texts is not None)
                if texts is not None:
                    ours.note(tokens, TOKENIZING, texts.ask(tokens=tokens, count=scope.size(20, 1)))
            if not number:
                for side in sides:
                    side.figures.clear()  # warm-up
    return [made for tokens in PROMPTS for made in _rows(tokens, ours, sides[1:])]


def _measure(side: Side, load: Process, tokens: int, scope: Scope, *, text: bool) -> None:
    count = scope.size(1_000, 10) if tokens < 10_000 else scope.size(100, 5)

    def cost(count: int, connections: int, **asked: int) -> tuple[float, float, float]:
        """Seconds in all, and microseconds of processor time a request: its own, and with the others'."""
        began, own, whole = time.monotonic(), *side.cpu_s()
        load.ask(url=side.url, tokens=tokens, count=count, connections=connections, **asked)
        own_after, whole_after = side.cpu_s()
        return time.monotonic() - began, (own_after - own) / count * 1e6, (whole_after - whole) / count * 1e6

    taken_s, own, whole = cost(count, 16)
    side.note(tokens, OWN, own)
    side.note(tokens, WHOLE, whole)
    side.note(tokens, "requests/s", count / taken_s)
    if text:
        side.note(tokens, TEXT, cost(count // 5, 16, text=1)[1])  # each takes far longer
    if tokens == PROMPTS[0]:
        few = scope.size(200, 10)
        _, first, _ = cost(few, 4, output=1, stream=1)
        _, more, _ = cost(few, 4, output=STREAMED, stream=1)
        side.note(tokens, STREAMING, (more - first) / (STREAMED - 1))
    alone = scope.size(200 if tokens < 10_000 else 50, 5)
    through = load.ask(url=side.url, tokens=tokens, count=alone, connections=1)
    direct = side.direct(tokens, alone)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        side.note(tokens, name, percentile(through, share))
        side.note(tokens, f"{name} without it", percentile(direct, share))


def _rows(tokens: int, ours: Side, routers: list[Side]) -> list[Row]:
    """CPU of ours beside that of each router; latency through each beside that of what it stands in front of."""
    case = f"{tokens} tokens"
    seen = {metric: values for (of, metric), values in ours.figures.items() if of == tokens}
    made = [
        row(case, metric, unit, seen[metric])
        for metric, unit in (("requests/s", "/s"), (TOKENIZING, "µs"))
        if metric in seen
    ]
    for metric in (OWN, TEXT, WHOLE, STREAMING):
        if metric not in seen:
            continue
        for router in routers:
            beside = router.figures[tokens, metric]
            made.append(row(f"{case}, beside {router.name}", metric, "µs", seen[metric], beside))
        if not routers:
            made.append(row(case, metric, "µs", seen[metric]))
    for side in (ours, *routers):
        for metric in ("p50", "p99"):
            through, without = side.figures[tokens, metric], side.figures[tokens, f"{metric} without it"]
            made.append(row(f"{case}, through {side.name}", metric, "µs", through, without))
    return made


def _ours(space: Workspace, scope: Scope) -> Side:
    scope.show("starting broker, controller, ranks and the edge")
    parts.broker(space)
    controller = parts.controller(space, "--unified-method", "cache_aware")
    ranks = parts.rank_links(space, ENGINES)
    edge = space.program(
        "pdbus", "serve", "--http", "0", "--controller", space.endpoint("ctl"), "--watch-parent", "--log-level", "error"
    )
    url = edge.wait_ready().split("endpoint=")[1].strip()
    await_url(f"{url}/ready", START_S)
    client = space.part("edge_parts:client", controller=space.endpoint("ctl"))
    client.wait_ready()

    def direct(tokens: int, count: int) -> list[float]:
        taken: list[float] = client.ask(tokens=tokens, count=count)
        return taken

    return Side("pdbus", url, edge, direct, (controller, *ranks))


def _texts(space: Workspace, scope: Scope) -> Process | None:
    """Return the measurement of tokenization; None without the model whose tokenizer the edge uses."""
    try:
        smollm2.converted()
    except ConfigError as error:
        scope.show(f"no prompts as text: {error}")
        return None
    made = space.part("edge_parts:tokenizing")
    made.wait_ready()
    return made


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
        scope.show(f"starting {name}")
        port = free_ports("127.0.0.1", 2)
        argv = [at, *ROUTERS[name], "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
        argv += ["--prometheus-port", str(port + 1), "--policy", "round_robin", "--log-level", "error"]
        router = space.part("edge_parts:become", argv=argv)
        router.wait_ready()
        await_url(f"http://127.0.0.1:{port}/health", START_S)
        side = Side(name, f"http://127.0.0.1:{port}", router, direct, engines)
        _until_it_serves(load, side)
        sides.append(side)
    return sides


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
