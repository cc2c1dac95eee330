"""The HTTP port of a part: `/metrics` for Prometheus, `/health` and `/ready` for a supervisor, and at a controller
`/targets`, where Prometheus finds all parts (`http_sd`).

A thread of its own answers, from the data that the part's loop leaves about once a second, so that a probe delays no
request. It speaks plain HTTP without keys: it shows names and counts, changes nothing, and answers everyone who can
reach the port.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, TypeAlias

from prometheus_client.exposition import choose_encoder

from bus.errors import StartError
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.metrics import Metric, gauge, registry

Targets: TypeAlias = Callable[[], Callable[[], list[dict[str, Any]]]]

GATHER_S = 1.0
HEALTHY_S = 5.0  # an idle loop turns each second
REQUEST_S = 5.0  # for a client to send its request, and to take the answer
MAX_ASKING = 16  # connections at once; more are closed unheard

log = get_logger("probes")


def serve(
    loop: Loop, host: str, port: int, gather: Callable[[], Iterable[Metric]], unready: Callable[[], str] = lambda: "",
    targets: Targets | None = None, labels: Mapping[str, str] | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Serve from a thread of its own until the returned function is called, which waits for that thread. StartError if
    the port is taken.

    `gather`, `unready` (why the part cannot work now; empty: it can) and `targets` (None: no such page) are called on
    the loop's thread every GATHER_S seconds; what `targets` returns makes that page on a thread of the server, in the
    form of `http_sd`. `labels` go to each sample of the part.
    """
    board = Board(loop, gather, unready, targets, labels)
    board.keep()
    try:
        server = _Server(host, port, board)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "choose another --metrics-port or --metrics-host"
        raise StartError(f"cannot serve metrics on {host}:{port}: {why}; {hint}") from None
    timer = loop.call_every(GATHER_S, board.keep)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        timer.cancel()
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class Board:
    """The data that the loop leaves for probes, and the answers that follow from it. `keep` writes it on the loop's
    thread; the HTTP threads read."""

    def __init__(
        self, loop: Loop, gather: Callable[[], Iterable[Metric]], unready: Callable[[], str],
        targets: Targets | None = None, labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._gather = gather
        self._unready = unready
        self._targets = targets
        self._page: Callable[[], list[dict[str, Any]]] | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._trouble = ""
        self.registry = registry(lambda: self._metrics, labels)

    def keep(self) -> None:
        """Gather fresh data from the part and store it. The loop calls it every GATHER_S seconds."""
        made = gauge("pdbus_page_timestamp_seconds", "when the part last made its figures, since 1970", time.time())
        self._metrics = (*self._gather(), made)
        self._trouble = self._unready()
        if self._targets is not None:
            self._page = self._targets()

    @property
    def has_targets(self) -> bool:
        """Return whether there is a page of targets."""
        return self._page is not None

    @property
    def targets(self) -> bytes | None:
        """The page of targets as JSON; None: there is none."""
        return None if self._page is None else json.dumps(self._page()).encode()

    def unhealthy(self) -> str:
        """Return why the part should be restarted (its loop has not turned for HEALTHY_S); empty: it lives."""
        still_s = self._loop.still_s
        return f"its loop has not turned for {still_s:.1f} s" if still_s > HEALTHY_S else ""

    def unready(self) -> str:
        """Return why no request should be sent here now; empty: it can serve."""
        return self.unhealthy() or self._trouble


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, board: Board) -> None:
        self.board = board
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._free = threading.BoundedSemaphore(MAX_ASKING)
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # it went away, or sent nothing in time
            log.exception("probe.failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = "pdbus"
    sys_version = ""

    def do_GET(self) -> None:
        board, path = self.server.board, self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(board.registry), kind)
        elif path == "/health":
            self._answer_health(board.unhealthy())
        elif path == "/ready":
            self._answer_health(board.unready())
        elif path == "/targets" and (page := board.targets) is not None:
            self._answer(200, page, "application/json")
        else:
            also = ", /targets" if board.has_targets else ""
            self._answer(404, f"here are /metrics{also}, /health and /ready\n".encode())

    do_HEAD = do_GET

    def _answer_health(self, trouble: str) -> None:
        self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode())

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a probe each few seconds is no event."""
