"""`e2e`: submit → first token → last token through sim nodes whose steps take no time, beside the bare hops.

One request at a time, so that nothing queues: what is left is the hops and the code between them. A bare hop is half
a bare round trip. The hops on the way: 2 to Accepted (client → controller → client), 3 to a unified rank's first token
(→ controller → node → client), 5 to a pair's (→ controller → decode → prefill → decode → client).
"""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from typing import Any

import zmq

from benchmarks import parts
from benchmarks.child import Parent
from benchmarks.harness import Row, Scope, Workspace, row
from bus.endpoints import ControllerAddress
from bus.runtime.sockets import KV_MAX, Socket, Sockets
from bus.wire import codec
from bus.wire.messages import (
    CONTROLLER_TO_CLIENT,
    FROM_NODE_DATA,
    Accepted,
    Attach,
    Detach,
    Done,
    Legs,
    Location,
    Params,
    Submit,
    Tokens,
)

OUTPUT_TOKENS = 16
PROMPT_TOKENS = 128
HOPS = {
    "accepted": 2,
    "unified: first token": 3,
    "unified: last token": 3,
    "pair: first token": 5,
    "pair: last token": 5,
}
WAIT_MS = 10_000


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for up to minutes, and return the rows."""
    figures: dict[str, list[float]] = {name: [] for name in HOPS}
    hops: list[float] = []
    count = scope.size(100, 20)
    with Workspace() as space:
        scope.show("starting broker, controller, a prefill, a decode and a unified node")
        parts.broker(space)
        parts.controller(space)
        for role in ("prefill", "decode", "unified"):
            parts.sim_nodes(space, role, processes=1, ranks=1)
        echo = space.part("bare:echo", endpoint=space.endpoint("echo"))
        asker = space.part("bare:asker", endpoint=space.endpoint("echo"))
        client = space.part("e2e:client", controller=space.endpoint("ctl"))
        for process in (echo, asker, client):
            process.wait_ready()
        for number in scope.rounds:
            scope.show(f"run {number} of {scope.runs}")
            trips = asker.ask(count=10 * count, request_bytes=PROMPT_TOKENS * 4)
            taken = {leg: client.ask(leg=leg, count=count) for leg in ("unified", "pair")}
            if not number:
                continue  # warm-up
            hops.append(statistics.median(trips) / 2 * 1e6)
            figures["accepted"].append(taken["unified"]["accepted"])
            for leg, what in itertools.product(taken, ("first", "last")):
                figures[f"{leg}: {what} token"].append(taken[leg][what])
    rows = [row("a bare hop", "half a round trip", "µs", hops)]
    for name, values in figures.items():
        floors = [HOPS[name] * hop for hop in hops]
        rows.append(row(f"submit to {name}, {HOPS[name]} hops", "p50", "µs", values, floors))
    return rows


def client(parent: Parent, controller: str) -> None:
    """Run the client process at `controller`. A command gives `leg` and `count`; its answer is `_Client.measure`'s."""
    with Sockets() as sockets:
        one = _Client(sockets, sockets.dealer(ControllerAddress(controller).clients))
        parent.serve(one.measure)


class _Client:
    def __init__(self, sockets: Sockets, dealer: Socket) -> None:
        self._sockets, self._dealer = sockets, dealer
        self._nodes: dict[str, Socket] = {}
        self._rooms = itertools.count(time.monotonic_ns())

    def measure(self, leg: Legs, count: int) -> dict[str, float]:
        """Medians of `count` requests, one after the other, in microseconds from submit."""
        times: dict[str, list[float]] = {"accepted": [], "first": [], "last": []}
        for _ in range(count):
            for name, seconds in self._one(leg).items():
                times[name].append(seconds * 1e6)
        return {name: statistics.median(values) for name, values in times.items()}

    def _one(self, leg: Legs) -> dict[str, float]:
        room = next(self._rooms)
        rid = str(room)
        submit = Submit(rid, leg, PROMPT_TOKENS, OUTPUT_TOKENS, room)
        # every prompt is another one, so that no prefix cache helps
        tokens = [*room.to_bytes(8, "little"), *range(PROMPT_TOKENS - 8)]
        prompt = struct.pack(f"<{PROMPT_TOKENS}i", *tokens)
        began = time.perf_counter()
        self._dealer.send_multipart([codec.encode(submit), prompt, codec.encode(Params(ignore_eos=True))])
        accepted = self._receive(self._dealer, CONTROLLER_TO_CLIENT, Accepted)
        times = {"accepted": time.perf_counter() - began}
        assert accepted.decode is not None
        node = self._node(accepted.decode)
        node.send(codec.encode(Attach(rid, accepted.attempt)))
        have = 0
        while have < OUTPUT_TOKENS:
            output = self._receive(node, FROM_NODE_DATA, Tokens)
            if output.ids and not have:
                times["first"] = time.perf_counter() - began
            have += len(output.ids)
            assert output.code == "ok", output
        times["last"] = time.perf_counter() - began
        node.send(codec.encode(Detach(rid, accepted.attempt)))
        self._receive(self._dealer, CONTROLLER_TO_CLIENT, Done)
        return times

    def _node(self, at: Location) -> Socket:
        if at.endpoint not in self._nodes:
            self._nodes[at.endpoint] = self._sockets.dealer(at.endpoint, maximum=KV_MAX)
        return self._nodes[at.endpoint]

    @staticmethod
    def _receive(socket: Socket, table: Any, kind: Any) -> Any:
        if not socket.poll(WAIT_MS, zmq.POLLIN):
            raise TimeoutError(f"no {kind.__name__}")
        message = codec.decode(socket.recv(), table)
        assert isinstance(message, kind), message
        return message
