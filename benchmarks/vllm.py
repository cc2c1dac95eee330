"""`vllm`: what the bus adds to vLLM, beside what vLLM's own HTTP server adds. Three engines on this machine's CPU, in
turn: one `AsyncLLM` in the caller's process; one behind the bus, as a unified rank (it does prefill and decode); one
behind vLLM's HTTP server.

Each is asked for the completion of a text, but for the first, which takes and gives token ids. The model has one layer
of SmolLM2's and random weights: its vocabulary and its steps of a few milliseconds are what counts around an engine.
Processor time is of everything but the engine's own processes, which do the same in all three.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks import parts
from benchmarks.harness import Aim, Process, Row, Scope, Workspace, await_url, percentile, row
from bus.runtime.ports import free_ports
from nodes.vllm import versions
from nodes.vllm.smollm2 import hugging_face

START_S = 300.0
CONCURRENCY = 16
OUTPUT_TOKENS = 65  # of which the first is counted with the request
ENGINE = (
    "--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1}', "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "512",
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # one core computes, whichever engine's turn it is; the others are for the rest
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
REQUEST, TOKEN = "CPU a request", "CPU a token"


@dataclass(slots=True, eq=False)
class Way:
    """One way to vLLM: the client, and the processes in between, whose processor time counts."""

    name: str
    caller: Process
    servers: tuple[Process, ...]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, metric: str, value: float) -> None:
        """Add a value of one run to a figure."""
        self.figures.setdefault(metric, []).append(value)

    def cpu_us(self) -> tuple[float, float]:
        """Return the processor time so far in microseconds: of the servers, and with the caller's."""
        servers = sum(server.cpu_s() for server in self.servers)
        return servers * 1e6, (servers + self.caller.cpu_s()) * 1e6


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows. Raises
    ConfigError if vLLM is not installed."""
    versions.check_installed(split=False)
    with Workspace() as space:
        ways = [make(space, scope) for make in (_direct, _bus, _http)]
        for number in scope.rounds:
            for way in ways:
                scope.show(f"run {number} of {scope.runs}: {way.name}")
                _measure(way, scope)
            if not number:
                for way in ways:
                    way.figures.clear()  # warm-up
    return _rows(*ways)


def _measure(way: Way, scope: Scope) -> None:
    alone = way.caller.ask(count=scope.size(20, 3), concurrency=1, output=1)
    way.note("time to first token", percentile(alone["first_us"], 0.5) / 1e3)
    short, long = scope.size(64, 8), scope.size(32, 4)
    before = way.cpu_us()
    way.caller.ask(count=short, concurrency=CONCURRENCY, output=1)
    between = way.cpu_us()
    taken = way.caller.ask(count=long, concurrency=CONCURRENCY, output=OUTPUT_TOKENS)
    after = way.cpu_us()
    way.note("tokens/s", long * OUTPUT_TOKENS / taken["elapsed_s"])
    for whose, began, middle, end in zip(("", ", with the caller's"), before, between, after, strict=True):
        request = (middle - began) / short
        way.note(REQUEST + whose, request)
        way.note(TOKEN + whose, ((end - middle) / long - request) / (OUTPUT_TOKENS - 1))


def _rows(direct: Way, bus: Way, http: Way) -> list[Row]:
    """Latency and rate beside those of the engine alone; what is added to its processor time beside what HTTP adds."""
    made = []
    for way in (bus, http):
        for metric, unit in (("time to first token", "ms"), ("tokens/s", "/s")):
            made.append(row(way.name, metric, unit, way.figures[metric], direct.figures[metric]))
    for metric in (REQUEST, TOKEN):
        made.append(row(direct.name, metric, "µs", direct.figures[f"{metric}, with the caller's"]))
        for whose in ("", ", with the caller's"):
            for way in (bus, http):
                made.append(row(way.name, metric + whose, "µs", way.figures[metric + whose]))
            ours, theirs = (_added(way, direct, metric, whose) for way in (bus, http))
            made.append(row("added by the bus, beside HTTP", metric + whose, "µs", ours, theirs, Aim(1.0)))
    return made


def _added(way: Way, direct: Way, metric: str, whose: str) -> list[float]:
    alone = direct.figures[f"{metric}, with the caller's"]
    return [value - floor for value, floor in zip(way.figures[metric + whose], alone, strict=True)]


def _direct(space: Workspace, scope: Scope) -> Way:
    scope.show("starting vLLM alone")
    caller = space.part("vllm_parts:direct", env=ENVIRONMENT, model=str(hugging_face()), arguments=ENGINE)
    caller.wait_ready(START_S)
    return Way("AsyncLLM alone", caller, ())


def _bus(space: Workspace, scope: Scope) -> Way:
    scope.show("starting vLLM behind the bus")
    broker, controller = parts.broker(space), parts.controller(space)
    node = space.program(
        "nodes.unified", "--engine", "vllm", "--model", "smollm2", "--bus", space.endpoint("bus"),
        "--controller", space.endpoint("ctl"), "--data", f"ipc://{space.folder}", "--watch-parent",
        "--log-level", "warning", "--drain-s", "0", "--", *ENGINE, env=ENVIRONMENT,
    )  # fmt: skip
    node.wait_ready(START_S)
    caller = space.part("vllm_parts:bus", controller=space.endpoint("ctl"))
    caller.wait_ready()
    return Way("behind the bus", caller, (broker, controller, node))


def _http(space: Workspace, scope: Scope) -> Way:
    scope.show("starting vLLM's HTTP server")  # what `vllm serve` runs
    port = free_ports("127.0.0.1", 1)
    arguments = [
        "--model", str(hugging_face()), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2",
        "--disable-uvicorn-access-log", *ENGINE,
    ]  # fmt: skip
    server = space.part("vllm_parts:server", env=ENVIRONMENT, arguments=arguments)
    server.wait_ready()
    await_url(f"http://127.0.0.1:{port}/health", START_S, server)
    caller = space.part("vllm_parts:http", port=port)
    caller.wait_ready()
    return Way("vLLM's HTTP server", caller, (server,))
