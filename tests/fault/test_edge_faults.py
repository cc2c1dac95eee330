"""Parts that die under the HTTP edge: who reads a stream sees a pause, no token twice, none left out."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from edge_process import Serve, get, streaming, url, wait
from up_process import Up

from nodes.own.engines.sim import sim_generate
from pdbus.launcher.child import Child
from pdbus.launcher.spec import PartSpec

pytestmark = [pytest.mark.fault, pytest.mark.slow]

TOKENS = 150
SLOW = ("--", "--sim-base-s", "0.02", "--max-running", "4")  # some requests run, others wait at the controller


class Streams:
    """Many requests of one edge, each read by a thread to its end."""

    def __init__(self, pool: ThreadPoolExecutor, base: str, first: int, count: int) -> None:
        self._base = base
        self._begun = threading.Semaphore(0)
        self._prompts = [[5, 6, first + number] for number in range(count)]
        self._ends: list[Future[list[int]]] = [pool.submit(self._read, prompt) for prompt in self._prompts]

    def until(self, running: int) -> None:
        """So many have some tokens, and the end is far."""
        for _ in range(running):
            assert self._begun.acquire(timeout=60)

    def check(self) -> None:
        """Every one got exactly what it asked for."""
        for prompt, end in zip(self._prompts, self._ends, strict=True):
            assert end.result(90) == sim_generate(prompt, TOKENS)

    def _read(self, prompt: list[int]) -> list[int]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
        seen: list[int] = []
        with urllib.request.urlopen(request(self._base, body), timeout=90) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                assert event["output_ids"][: len(seen)] == seen, "what was said stays said"
                if len(seen) < 5 <= len(event["output_ids"]):
                    self._begun.release()
                seen = event["output_ids"]
        return seen


def request(base: str, body: object, **headers: str) -> urllib.request.Request:
    named = {"Content-Type": "application/json"} | headers
    return urllib.request.Request(base + "/generate", json.dumps(body).encode(), named)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as pool:
        yield pool


def test_a_controller_that_dies_under_streams_and_requests_that_wait(pool: ThreadPoolExecutor) -> None:
    with tempfile.TemporaryDirectory(prefix="pd") as path, Up(Path(path), "--model", "sim", "--http", "0", *SLOW) as up:
        base = url(up)
        wait(lambda: get(base, "/ready")[0] == 200)
        streams = Streams(pool, base, 100, 12)
        streams.until(running=4)
        up.kill_and_await("controller-0")
        streams.check()


@contextmanager
def second_controller(path: str) -> Iterator[Child]:
    args = ("--name", "controller-1", "--bus", f"ipc://{path}/bus", "--controller", f"ipc://{path}/second")
    child = Child(PartSpec("controller-1", "node", "controller", (*args, "--watch-parent")), Path(path) / "c.log", {})
    try:
        yield child
    finally:
        child.close()


def test_one_of_two_controllers_dies_under_the_streams_of_two_edges(pool: ThreadPoolExecutor) -> None:
    """Those of its own edge go on to their end, unless a rank dies too: then they wait until it is back."""
    with tempfile.TemporaryDirectory(prefix="pd") as path, second_controller(path) as dies:
        second = f"ipc://{path}/second"
        with (
            Up(Path(path), "--model", "sim", "--http", "0", *SLOW, "--controller", second) as up,
            Serve(second) as edge,
        ):
            for base in (url(up), edge.url):
                wait(lambda base=base: get(base, "/ready")[0] == 200)  # type: ignore[misc]
            ours, theirs = Streams(pool, url(up), 100, 4), Streams(pool, edge.url, 200, 4)
            ours.until(running=2)
            theirs.until(running=2)
            dies.send(signal.SIGKILL)
            os.kill(up.pid(streaming(url(up))), signal.SIGKILL)
            late = request(edge.url, {"input_ids": [5]}, **{"x-request-deadline-s": "0.5"})
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(late, timeout=60)
            assert caught.value.code == 504
            caught.value.close()
            with second_controller(path):
                ours.check()
                theirs.check()
                wait(lambda: get(edge.url, "/ready")[0] == 200)
            wait(lambda: get(edge.url, "/ready")[0] == 503)
            assert get(url(up), "/ready")[0] == 200
