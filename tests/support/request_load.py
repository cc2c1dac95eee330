"""Requests without end, one after the other on several threads, each answer compared with the sim engine's own."""

from __future__ import annotations

import queue
import threading

from nodes.own.engines.sim import sim_generate
from pdbus.client import Client


class Load:
    """Threads of one client that send requests, one after the other, and compare the answers."""

    def __init__(self, controller: str, threads: int = 6) -> None:
        self.client = Client(controller, connect_timeout_s=60.0, retries=20)
        self.ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self.client.close()

    def right(self, count: int) -> None:
        """Until `count` more requests have ended, each rightly."""
        for _ in range(count):
            assert self.ends.get(timeout=60.0) == "right"

    def finish(self) -> None:
        """No more requests; each that was sent must end rightly."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a request has no end"
        self.right(self.ends.qsize())

    def _run(self, first: int) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            prompt = [3 + first, 3 + number % 400, 9]
            try:
                tokens = self.client.generate_tokens(prompt, max_tokens=40).tokens()
            except Exception as error:
                self.ends.put(f"{type(error).__name__}: {error}")
            else:
                self.ends.put("right" if tokens == sim_generate(prompt, 40) else f"wrong: {tokens}")
