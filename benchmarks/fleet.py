"""`fleet`: the processor time of `pdbus top --http` while five browsers look, and of the controller that it asks,
beside the same controller without it. All ranks are at work: each reports another load each second.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from benchmarks import parts
from benchmarks.harness import Aim, Process, Row, Scope, Workspace, row

AIMS = {512: (2.0, 0.5), 4_096: (12.0, 3.0)}  # % of a core: of the page server, and of the controller more than without
BROWSERS = 5
PROCESSES = 8
REPORT_HZ = 1.0
SETTLE_S = 4.0
WINDOW_S = 20


class Browser(threading.Thread):
    """A reader of the page's stream, until `close`. `read` counts bytes."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        at = urlsplit(url)
        self.read = 0
        self._socket = socket.create_connection((at.hostname or "", at.port or 0), 30.0)
        token = at.fragment.removeprefix("token=")
        head = f"GET /fleet/stream HTTP/1.1\r\nhost: {at.netloc}\r\nauthorization: Bearer {token}\r\n\r\n"
        self._socket.sendall(head.encode())
        self.start()

    def run(self) -> None:
        """Read; `start` calls it."""
        while data := self._socket.recv(1 << 18):
            self.read += len(data)

    def close(self) -> None:
        """End the stream."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._socket.close()


def run(scope: Scope) -> list[Row]:
    """Called by `python -m benchmarks`: measure, which blocks for minutes, and return the rows."""
    rows: list[Row] = []
    for ranks in (64,) if scope.quick else AIMS:
        of_server, more = AIMS.get(ranks, (100.0, 100.0))
        figures: dict[str, list[float]] = {"server": [], "with": [], "without": [], "bytes": []}
        with Workspace() as space:
            scope.show(f"starting {ranks:,} ranks")
            parts.broker(space)
            controller = parts.controller(space, "--unified-method", "total_tokens", "--lease-s", "30")
            processes = scope.size(PROCESSES, 1)
            parts.our_nodes(space, ranks, processes=processes, report_hz=REPORT_HZ, kind="busy:ours")
            for number in range(scope.runs):
                scope.show(f"{ranks:,} ranks: run {number + 1} of {scope.runs}")
                _with_pages(space, controller, figures, scope.size(WINDOW_S, 2))
                figures["without"].append(_cpu(controller, scope.size(WINDOW_S, 2)))
        case = f"{ranks:,} ranks, {BROWSERS} browsers"
        by_page = [on - off for on, off in zip(figures["with"], figures["without"], strict=True)]
        rows += [
            row(case, "CPU of the page server", "% of a core", figures["server"], aim=Aim(of_server, of_ratio=False)),
            row(case, "CPU of the controller", "% of a core", figures["with"], figures["without"]),
            row(case, "more CPU of the controller", "% of a core", by_page, aim=Aim(more, of_ratio=False)),
            row(case, "sent to each browser", "KiB/s", figures["bytes"]),
        ]
    return rows


def _with_pages(space: Workspace, controller: Process, figures: dict[str, list[float]], window_s: float) -> None:
    where = ("--controller", space.endpoint("ctl"), "--bus", space.endpoint("bus"))
    server = space.program("pdbus", "top", "--http", "0", *where)
    url = server.wait_ready().partition("url=")[2]
    with ExitStack() as exits:
        browsers = [Browser(url) for _ in range(BROWSERS)]
        for browser in browsers:
            exits.callback(browser.close)
        time.sleep(SETTLE_S)
        before, read, began = (server.cpu_s(), controller.cpu_s()), browsers[0].read, time.perf_counter()
        time.sleep(window_s)
        elapsed_s = time.perf_counter() - began
        figures["server"].append(100 * (server.cpu_s() - before[0]) / elapsed_s)
        figures["with"].append(100 * (controller.cpu_s() - before[1]) / elapsed_s)
        figures["bytes"].append((browsers[0].read - read) / elapsed_s / 1024)
    server.stop(0.0)


def _cpu(process: Process, window_s: float) -> float:
    before, began = process.cpu_s(), time.perf_counter()
    time.sleep(window_s)
    return 100 * (process.cpu_s() - before) / (time.perf_counter() - began)
