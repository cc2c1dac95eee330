"""`front`: vLLM's own API server over the bus (`pdbus serve --front vllm`) beside the same server over its own engine
core. The same engine is behind both: it computes nothing, and says a token each 20 ms.

Processor time is of the server process alone. The servers take turns, the one that begins by turns too, and a figure
is the median of its turns. The interval of a ratio is by the bootstrap over the turns: 95 of 100 times the median of
as many turns lies in it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import parts
from benchmarks.harness import Aim, Process, Row, Scope, Workspace, await_url, row
from benchmarks.vllm import ENVIRONMENT, START_S
from bus.runtime.ports import free_ports
from nodes.vllm import versions
from nodes.vllm.smollm2 import hugging_face

PROMPTS = (128, 8_192)
CONNECTIONS = 16
OUTPUT_TOKENS = 65  # of which the first is counted with the request
TURNS = 4  # of a run
RESAMPLED = 2_000
MODEL = (
    "--hf-overrides", '{"max_position_embeddings": 16384}', "--max-model-len", "16384", "--disable-uvicorn-access-log"
)  # fmt: skip
REQUEST, TOKEN, FIRST = "CPU a request", "CPU a streamed token", "time to first token"
EVENTS = "events a token"  # below 1: a server was too late to pass on each by itself; then a token's cost is an event's
CPU_AIM, FIRST_AIM = Aim(1.15), Aim(1.0, of_ratio=False)


@dataclass(slots=True, eq=False)
class Side:
    """A server, with its figures by length of prompt and metric."""

    name: str
    port: int
    process: Process
    figures: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def note(self, tokens: int, metric: str, value: float) -> None:
        """Add a value of one turn to a figure."""
        self.figures.setdefault((tokens, metric), []).append(value)


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for minutes, and return the rows. Raises ConfigError if
    vLLM is not installed."""
    versions.check_installed(split=False)
    with Workspace() as space:
        load = space.part("front_parts:load")
        load.wait_ready()
        scope.show("starting vLLM's server twice")
        sides = [_bus(space), _own(space)]
        for side in sides:
            await_url(f"http://127.0.0.1:{side.port}/health", START_S, side.process)
        turns = scope.size(scope.runs * TURNS, 2)
        for turn in range(1 + turns):
            for tokens in PROMPTS:
                scope.show(f"turn {turn} of {turns}: {tokens} tokens")
                for side in sides if turn % 2 else reversed(sides):
                    _measure(side, load, tokens, scope)
            if not turn:
                for side in sides:
                    side.figures.clear()  # warm-up
    return [made for tokens in PROMPTS for made in _rows(tokens, *sides)]


def _measure(side: Side, load: Process, tokens: int, scope: Scope) -> None:
    def cost(count: int, output: int) -> tuple[float, int]:
        """Microseconds of the server's processor time, and the events that came after the first of each request."""
        before = side.process.cpu_s()
        taken = load.ask(port=side.port, tokens=tokens, count=count, connections=CONNECTIONS, output=output)
        return (side.process.cpu_s() - before) * 1e6, taken["events"] - count

    alone = load.ask(port=side.port, tokens=tokens, count=scope.size(20, 3), connections=1, output=1)
    side.note(tokens, FIRST, statistics.median(alone["first_us"]) / 1e3)
    count, streams = scope.size(128 if tokens < 1_000 else 48, 8), scope.size(CONNECTIONS, 4)
    request = cost(count, 1)[0] / count
    side.note(tokens, REQUEST, request)
    taken, events = cost(streams, OUTPUT_TOKENS)
    side.note(tokens, TOKEN, (taken - streams * request) / events)
    side.note(tokens, EVENTS, events / streams / (OUTPUT_TOKENS - 1))


def _rows(tokens: int, bus: Side, own: Side) -> list[Row]:
    case = f"{tokens:,} tokens"
    made = []
    for metric in (REQUEST, TOKEN):
        ours, theirs = bus.figures[tokens, metric], own.figures[tokens, metric]
        made.append(row(case, metric, "µs", ours, theirs, CPU_AIM))
        low, high = interval([value / floor for value, floor in zip(ours, theirs, strict=True)])
        made.append(row(case, f"{metric}: its ratio is above", "×", [low]))
        made.append(row(case, f"{metric}: its ratio is below", "×", [high]))
    made.append(row(case, EVENTS, "", bus.figures[tokens, EVENTS], own.figures[tokens, EVENTS]))
    ours, theirs = bus.figures[tokens, FIRST], own.figures[tokens, FIRST]
    made.append(row(case, FIRST, "ms", ours, theirs))
    later = [value - floor for value, floor in zip(ours, theirs, strict=True)]
    made.append(row(case, "first token later by", "ms", later, aim=FIRST_AIM))
    return made


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds between which the median of the turns' `values` is with 95 %, by the bootstrap."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLED))
    return medians[RESAMPLED // 40], medians[-1 - RESAMPLED // 40]


def _bus(space: Workspace) -> Side:
    parts.broker(space)
    parts.controller(space, "--unified-method", "cache_aware")
    controller = space.endpoint("ctl")
    rank = space.part(
        "front_engines:rank", bus=space.endpoint("bus"), controller=controller, data=f"ipc://{space.folder}"
    )
    rank.wait_ready()
    port = free_ports("127.0.0.1", 1)
    server = space.program(
        "pdbus", "serve", "--front", "vllm", "--model", "smollm2", "--http", str(port),
        "--controller", controller, "--log-level", "warning", "--watch-parent", "--drain-s", "1", "--", *MODEL,
        name="front", env=ENVIRONMENT,
    )  # fmt: skip
    return Side("over the bus", port, server)


def _own(space: Workspace) -> Side:
    port = free_ports("127.0.0.1", 1)
    arguments = [
        "--model", str(hugging_face()), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2",
        "--enable-prompt-tokens-details", *MODEL,
    ]  # fmt: skip
    env = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "WARNING"}
    server = space.part("front_engines:server", env=env, arguments=arguments)
    server.wait_ready(START_S)
    return Side("over its own engine core", port, server)
