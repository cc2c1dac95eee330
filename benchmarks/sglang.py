"""`sglang`: SGLang's own code without the plugin and with it: rooms, its DP controller, and how long a burst waits.

Needs a Python that has SGLang. Nothing is computed: ranks are sockets, or schedulers whose steps only take time. The
floor of each figure is stock SGLang's.
"""

from __future__ import annotations

import base64
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from benchmarks.harness import ANSWER_S, PartFailed, Process, Row, Scope, Workspace, percentile, row
from bus.runtime.ports import free_ports

RANKS = 4
TOKENS = 1_000
HZ = 200.0
IDLE_S = 3.0
TOKENS_S = 20_000.0  # a stub rank computes
BUDGET = 8_192  # tokens of a step
SHORT, LONG, LONG_SHARE = 200, 4_000, 0.25
BURST = 64
BURST_S = 0.3
METHODS = ("round_robin", "total_requests", "total_tokens")
START_S = 600.0  # importing SGLang takes most of it


@dataclass(frozen=True, slots=True)
class Controller:
    """A DP controller that runs, with a socket to it as SGLang's tokenizer process has, encoded requests to send, the
    CPU of its dispatches in µs, and the names that ranks need to report to it (`bus` empty: without the plugin)."""

    process: Process
    tokenizer: zmq.Socket[bytes]
    requests: list[bytes]
    dispatch_us: list[float]
    server: str
    nonce: int
    bus: str


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    return [*_rooms(scope), *_dispatch(scope), *_bursts(scope)]


def _rooms(scope: Scope) -> list[Row]:
    scope.show("rooms: registered and found")
    taken: dict[bool, dict[str, list[float]]] = {}
    for plugin in (False, True):
        with Workspace() as space:
            part = space.part(
                "sglang_parts:rooms", folder=str(space.folder), bootstrap_port=_ports(),
                method="round_robin" if plugin else None, count=scope.size(200, 20),
            )  # fmt: skip
            taken[plugin] = part.answer(START_S)
    stock, ours = taken[False], taken[True]
    return [
        row("room", "registration on the scheduler's thread", "µs", [statistics.median(ours["registered"])],
            [statistics.median(stock["registered"])]),
        row("room", "registered to known", "µs", [statistics.median(ours["known"])],
            [statistics.median(stock["known"])]),
    ]  # fmt: skip


def _dispatch(scope: Scope) -> list[Row]:
    """CPU and latency of a dispatch, and CPU without any."""
    figures: dict[tuple[str, bool], list[float]] = {}
    for plugin in (False, True):
        scope.show(f"dispatch, {'with the plugin' if plugin else 'stock'}")
        with Workspace() as space, _sockets() as context:
            sockets = [context.socket(zmq.PULL) for _ in range(RANKS)]
            endpoints = [_bound(socket) for socket in sockets]
            made = _controller(space, context, endpoints, "total_tokens", plugin, [TOKENS], scope.size(2_000, 200))
            poller = zmq.Poller()
            for socket in sockets:
                poller.register(socket, zmq.POLLIN)
            _drain(poller)
            figures["cpu", plugin] = [statistics.median(made.dispatch_us)]
            latencies = []
            for _ in range(scope.size(400, 40)):
                began = time.perf_counter()
                made.tokenizer.send(made.requests[0])
                if not poller.poll(int(ANSWER_S * 1e3)):
                    raise PartFailed("the DP controller dispatched nothing")
                latencies.append((time.perf_counter() - began) * 1e6)
                _drain(poller)
                time.sleep(1 / HZ)
            figures["latency", plugin] = [statistics.median(latencies)]
            before, began = made.process.cpu_s(), time.perf_counter()
            time.sleep(scope.size(int(IDLE_S), 1))
            figures["idle", plugin] = [(made.process.cpu_s() - before) / (time.perf_counter() - began) * 100]
    case = f"total_tokens, {RANKS} ranks"
    return [
        row(case, f"CPU of a dispatch of {TOKENS:,} tokens", "µs", figures["cpu", True], figures["cpu", False]),
        row(case, "tokenizer to rank", "µs", figures["latency", True], figures["latency", False]),
        row(case, "idle CPU of the DP controller", "%", figures["idle", True], figures["idle", False]),
    ]


def _bursts(scope: Scope) -> list[Row]:
    """Short and long prompts that come at once, at ranks whose steps take time: until the end of a prompt's step."""
    rows = []
    for method in METHODS[-1:] if scope.quick else METHODS:
        waits = {plugin: _burst(scope, method, plugin) for plugin in (False, True)}
        case = f"{BURST} prompts over {RANKS} ranks, {method}"
        for name, figure in (("mean", statistics.fmean), ("p99", lambda values: percentile(values, 0.99))):
            ours, stock = ([figure(each) * 1e3 for each in waits[plugin]] for plugin in (True, False))
            rows.append(row(case, f"{name} TTFT", "ms", ours, stock))
    return rows


def _burst(scope: Scope, method: str, plugin: bool) -> list[list[float]]:
    """Return the seconds that each prompt waited, for each burst."""
    scope.show(f"bursts, {method}, {'with the plugin' if plugin else 'stock'}")
    rng = random.Random(1)
    bursts = scope.size(scope.runs, 1)
    lengths = [LONG if rng.random() < LONG_SHARE else SHORT for _ in range(bursts * BURST)]
    with Workspace() as space, _sockets() as context:
        first = free_ports("127.0.0.1", RANKS)
        endpoints = [f"tcp://127.0.0.1:{first + rank}" for rank in range(RANKS)]
        made = _controller(space, context, endpoints, method, plugin, lengths, 0)
        stubs = space.part(
            "sglang_parts:ranks", endpoints=endpoints, server=made.server, bus=made.bus, nonce=made.nonce,
            tokens_s=TOKENS_S, budget=BUDGET,
        )  # fmt: skip
        stubs.wait_ready(START_S)
        sent: dict[str, float] = {}
        waits = []
        for burst in range(bursts):
            rids = [str(burst * BURST + number) for number in range(BURST)]
            for rid in rids:
                made.tokenizer.send(made.requests[int(rid)])
                sent[rid] = time.monotonic()
                time.sleep(rng.expovariate(BURST / BURST_S))
            ended: dict[str, float] = {}
            deadline = time.monotonic() + ANSWER_S
            while not ended.keys() >= set(rids):
                if time.monotonic() > deadline:
                    raise PartFailed(f"{len(set(rids) - ended.keys())} of {BURST} prompts never came to a rank")
                time.sleep(0.1)
                ended = stubs.ask()
            waits.append([ended[rid] - sent[rid] for rid in rids])
            time.sleep(0.5)  # for the loads of idle ranks to be known
    return waits


def _controller(
    space: Workspace,
    context: zmq.Context[zmq.Socket[bytes]],
    endpoints: list[str],
    method: str,
    plugin: bool,
    lengths: list[int],
    dispatches: int,
) -> Controller:
    bootstrap_port = _ports()
    process = space.part(
        "sglang_parts:controller", folder=str(space.folder), endpoints=endpoints, bootstrap_port=bootstrap_port,
        method=method if plugin else None, sglang_method="auto" if plugin else method, lengths=lengths,
        dispatches=dispatches,
    )  # fmt: skip
    process.wait_ready(START_S)
    facts: dict[str, Any] = process.answer()
    tokenizer = context.socket(zmq.PUSH)
    tokenizer.setsockopt(zmq.LINGER, 0)
    tokenizer.bind(facts["tokenizer"])
    requests = [base64.b64decode(each) for each in facts["requests"]]
    bus = f"tcp://127.0.0.1:{bootstrap_port + 100}" if plugin else ""
    return Controller(process, tokenizer, requests, facts["dispatch_us"], facts["server"], facts["nonce"], bus)


@contextmanager
def _sockets() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """All of them are closed at the end, whatever was sent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def _bound(socket: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def _drain(poller: zmq.Poller) -> None:
    while ready := poller.poll(0):
        for socket, _ in ready:
            socket.recv()


def _ports() -> int:
    """A bootstrap port above which the bus' are free."""
    return free_ports("127.0.0.1", 3) - 100
