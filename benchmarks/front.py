"""`front`: vLLM's own API server over the bus (`pdbus serve --front vllm`) beside the same server over its own engine
core. The same engine is behind both: it computes nothing, and says a token each 20 ms.

Processor time is of the server process alone. The servers take turns, the one that begins by turns too, and a figure
is the median of its turns. Both are started several times, because half of a long prompt's cost is one call of
vLLM's tokenizer, and what that takes differs from one start of a server to the next, by a tenth and more. The interval
of a ratio is by the bootstrap over starts and their turns: 95 of 100 times the median of as many lies in it.
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
STARTS = 4  # of both servers
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
    starts = scope.size(STARTS, 1)
    turns = scope.size(-(-scope.runs * TURNS // starts), 2)
    pairs = [_turns(scope, turns, f"start {start + 1} of {starts}") for start in range(starts)]
    return [made for tokens in PROMPTS for made in _rows(tokens, pairs)]


def _turns(scope: Scope, turns: int, start: str) -> tuple[Side, Side]:
    """Start both servers, and measure them in so many turns each, after one to warm them up."""
    with Workspace() as space:
        load = space.part("front_parts:load")
        load.wait_ready()
        scope.show(f"{start}: vLLM's server twice")
        sides = _bus(space), _own(space)
        for side in sides:
            await_url(f"http://127.0.0.1:{side.port}/health", START_S, side.process)
        for turn in range(1 + turns):
            for tokens in PROMPTS:
                scope.show(f"{start}, turn {turn} of {turns}: {tokens} tokens")
                for side in sides if turn % 2 else reversed(sides):
                    _measure(side, load, tokens, scope)
            if not turn:
                for side in sides:
                    side.figures.clear()
    return sides


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


def _rows(tokens: int, pairs: Sequence[tuple[Side, Side]]) -> list[Row]:
    """Return the rows of a length of prompt, from both sides of each start."""
    case = f"{tokens:,} tokens"

    def both(metric: str) -> tuple[list[float], list[float]]:
        ours, theirs = ([value for pair in pairs for value in pair[side].figures[tokens, metric]] for side in (0, 1))
        return ours, theirs

    made = []
    for metric in (REQUEST, TOKEN):
        made.append(row(case, metric, "µs", *both(metric), CPU_AIM))
        of_starts = [[side.figures[tokens, metric] for side in pair] for pair in pairs]
        ratios = [[value / floor for value, floor in zip(*values, strict=True)] for values in of_starts]
        low, high = interval(ratios)
        made.append(row(case, f"{metric}: its ratio is above", "×", [low]))
        made.append(row(case, f"{metric}: its ratio is below", "×", [high]))
    made.append(row(case, EVENTS, "", *both(EVENTS)))
    ours, theirs = both(FIRST)
    made.append(row(case, FIRST, "ms", ours, theirs))
    later = [value - floor for value, floor in zip(ours, theirs, strict=True)]
    made.append(row(case, "first token later by", "ms", later, aim=FIRST_AIM))
    return made


def interval(starts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the bounds between which the median of the turns of these `starts` is with 95 %, by the bootstrap: starts
    are drawn, and turns of each."""
    rng = random.Random(1)

    def drawn() -> float:
        some = rng.choices(starts, k=len(starts))
        return statistics.median([value for turns in some for value in rng.choices(turns, k=len(turns))])

    medians = sorted(drawn() for _ in range(RESAMPLED))
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
