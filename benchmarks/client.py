"""The client process of a benchmark: submits requests over one DEALER, a number of them open at a time or at a rate,
and waits for the end of each.

The same process feeds our controller and the bare broker: `ours` says whether the header is a Submit and the end a
Done, or both are just frames. Measures elapsed time; all else is measured elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from benchmarks.bare import NO_COPY_FROM
from benchmarks.child import Parent
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, Accepted, Done, Legs, Params, Submit

TOKEN_BYTES = 4
SILENT_MS = 20_000


def main(parent: Parent, endpoint: str, ours: bool, prompt_tokens: int, leg: Legs = "unified") -> None:
    """Run the client for `endpoint`. A command's `do` is `burst` or `paced`, the rest are that method's arguments; its
    result is the answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        traffic = Traffic(socket, ours, prompt_tokens, leg)
        doings: dict[str, Callable[..., Any]] = {"burst": traffic.burst, "paced": traffic.paced}
        parent.serve(lambda do, **settings: doings[do](**settings))


class Traffic:
    """The requests over one socket, all with `prompt_tokens` tokens and for the leg (`unified`: one rank does all;
    `pair`: prefill and decode)."""

    def __init__(self, socket: zmq.Socket[bytes], ours: bool, prompt_tokens: int, leg: Legs) -> None:
        self._socket = socket
        self._ours = ours
        self._leg = leg
        self._tokens = prompt_tokens
        self._filler = bytes(prompt_tokens * TOKEN_BYTES - 8)
        self._params = codec.encode(Params(seed=1))
        self._copy = prompt_tokens * TOKEN_BYTES < NO_COPY_FROM
        self._sent = 0
        self._ended = 0

    def burst(self, count: int, window: int) -> dict[str, Any]:
        """Send `count` requests, `window` of them open at any time, and wait for all ends. Return the elapsed seconds,
        or what went wrong as `error`."""
        prompt = self._stamped(0)
        began = time.perf_counter()
        goal, first = self._sent + count, self._ended
        while self._ended - first < count:
            while self._sent < goal and self._sent - self._ended < window:
                self._submit(prompt)
            if error := self._receive(SILENT_MS):
                return {"error": error}
        return {"elapsed_s": time.perf_counter() - began}

    def paced(self, count: int, rate: float) -> dict[str, Any]:
        """Send `count` requests, one each 1/`rate` seconds whatever comes back, and wait for all ends; return as
        `burst` does. Each prompt starts with the time of its submit, so that nodes can measure its way."""
        began = time.perf_counter()
        first = self._ended
        sent = 0
        while self._ended - first < count:
            due_s = began + sent / rate - time.perf_counter()
            if sent < count and due_s <= 0:
                self._submit(self._stamped(time.monotonic_ns()))
                sent += 1
                continue
            if error := self._receive(SILENT_MS if sent == count else max(1, int(due_s * 1000)), sent == count):
                return {"error": error}
        return {"elapsed_s": time.perf_counter() - began}

    def _stamped(self, sent_ns: int) -> bytes:
        return sent_ns.to_bytes(8, "little") + self._filler

    def _submit(self, prompt: bytes) -> None:
        self._sent += 1
        rid = f"{self._sent:012d}"
        header = codec.encode(Submit(rid, self._leg, self._tokens, 1))  # the bare broker gets the same bytes
        self._socket.send_multipart([header, prompt, self._params], copy=self._copy)

    def _receive(self, timeout_ms: int, idle_is_error: bool = True) -> str:
        """Take what has arrived; waits for the first of it. What went wrong, or nothing."""
        if not self._socket.poll(timeout_ms):
            return "no answer" if idle_is_error else ""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return ""
            if not self._ours:
                self._ended += 1
                continue
            message = codec.decode(frames[0], CONTROLLER_TO_CLIENT)
            if isinstance(message, Done):
                self._ended += 1
            elif not isinstance(message, Accepted):
                return repr(message)
