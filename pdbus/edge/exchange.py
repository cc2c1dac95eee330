"""One HTTP request and its response over ASGI (a server's `receive` and `send` functions): the limits on both, and the
check whether the client still waits."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import HttpError, invalid
from pdbus.edge.tracing import Answered

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

TRANSPORT = "pdbus.transport"  # in the scope of a request that came over a connection of ours
RID_MAX = 120  # characters of a client's request id
RID_KEPT = 115  # of them on the bus, where a rid has 128: a drawn suffix distinguishes answers
NUMBER_MAX = 1e9  # in a header
PRIORITY_MAX = 1000
WATCH_AFTER_S = 0.02
_RID = re.compile(rb"[!-~]{1,%d}" % RID_MAX)
_rng = random.Random()
_CLOSE = (b"connection", b"close")
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms")
_ALLOWED = ((b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"600"))
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Exchange:
    """One request with its response, made in the task that serves it. `rid` is the client's `x-request-id`, or drawn;
    every response has it. `client_rid` is empty when it was drawn. `gone`: the client left. `clock` is in seconds."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, config: EdgeConfig, clock: Callable[[], float]
    ) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status = 0  # of the response, once it has begun
        self.gone = False  # the client left
        self.span: Answered | None = None  # the span of a traced request
        self.began_at = clock()
        self.sending_since: float | None = None
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None
        self.task = task
        self._gave_up = False  # the time for the body is up
        self._watcher: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = scope.get(TRANSPORT)
        self._receive = receive
        self._send = send
        self._config = config
        self._clock = clock
        given = self.headers.get(b"x-request-id", b"")
        self.client_rid = given.decode() if _RID.fullmatch(given) else ""
        self.rid = self.client_rid or f"{_rng.getrandbits(128):032x}"
        origin, allowed = self.headers.get(b"origin", b""), config.cors_origins
        self._origin = origin if allowed and ("*" in allowed or origin.decode("latin-1") in allowed) else b""

    # --- the request ------------------------------------------------------------------------------------------------

    def use_rid(self, rid: str) -> None:
        """Use the request id of the body, which overrides the header's, for the response too."""
        self.rid = self.client_rid = rid

    def draw_rid(self) -> str:
        """Return a fresh id for this request inside the cluster; it begins with `rid`. Clients may use one id twice (a
        proxy that retries, a service that passes an id on), and one request must never get the answer of another."""
        return f"{self.rid[:RID_KEPT]}-{_rng.getrandbits(32):08x}"

    def check(self) -> None:
        """Raise HttpError 400 for an invalid `x-request-id`."""
        if b"x-request-id" in self.headers and not self.client_rid:
            raise invalid("x-request-id", f"x-request-id: 1 to {RID_MAX} printable characters")

    def number(self, header: bytes) -> float | None:
        """Return the number in a header; None without that header. Raises HttpError 400 if it is not a number, or 1e9
        or more."""
        given = self.headers.get(header)
        if given is None:
            return None
        try:
            value = float(given)
            if abs(value) < NUMBER_MAX:  # NaN is not
                return value
        except ValueError:
            pass
        raise invalid(header.decode(), f"{header.decode()}: not a number")

    async def body(self) -> bytes:
        """Wait for the whole body and return it. Raises HttpError: 415 unless its headers say that it is JSON without
        compression, 413 when it is too long, 408 when it is too slow, 499 when the client leaves."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise HttpError(415, "send JSON, with the header Content-Type: application/json", headers=(_CLOSE,))
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "send the body as it is, without Content-Encoding", headers=(_CLOSE,))
        most = self._config.max_body_bytes
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise self._too_long(most)
        parts: list[bytes] = []
        size = 0
        timer = self._loop.call_later(self._config.receive_s, self._give_up)  # a tenth of the cost of asyncio.timeout
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self.gone = True
                    raise HttpError(499, "the client left")
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise self._too_long(most)
                parts.append(part)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        except asyncio.CancelledError:
            if not self._gave_up:
                raise
            self.task.uncancel()
            why = f"the body did not come within {self._config.receive_s:g} s"
            raise HttpError(408, why, headers=(_CLOSE,)) from None
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._gave_up = True
        self.task.cancel()

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left`, once, if the client disconnects before `unwatch`. The body must have been read. The task that
        watches starts WATCH_AFTER_S from now, because most short requests need none."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.gone = True
            left()

        def begin() -> None:
            self._watcher = self._loop.create_task(watch())

        self._watcher = self._loop.call_later(WATCH_AFTER_S, begin)

    def unwatch(self) -> None:
        """End `watch`."""
        if self._watcher is not None:
            self._watcher.cancel()

    # --- the response -----------------------------------------------------------------------------------------------

    @property
    def preflight(self) -> bool:
        """True for a CORS preflight request of an allowed page."""
        return self.method == "OPTIONS" and bool(self._origin) and b"access-control-request-method" in self.headers

    async def allow(self) -> None:
        """Answer a preflight request: the page may send its requests here."""
        asked = self.headers.get(b"access-control-request-headers", b"")
        await self._start(204, (*_ALLOWED, *(((b"access-control-allow-headers", asked),) if asked else ())))
        await self._send_body(b"", more=False)

    async def answer(
        self, status: int, body: bytes, kind: bytes = b"application/json", headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole response; `kind` is its content type. Return as soon as little enough of it waits for the client
        to read, as `event` does."""
        await self._start(status, ((b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers))
        await self._send_body(body, more=False)

    async def fail(self, error: HttpError) -> None:
        """Send the response of an error."""
        await self.answer(error.status, error.body(), headers=error.headers)

    async def events(self) -> None:
        """Send the head of a stream of server-sent events; `event` must follow."""
        await self._start(200, _EVENTS)

    async def event(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes of the stream; `last` ends it. Return as soon as little enough waits for the client to read."""
        await self._send_body(data, more=not last)

    def limit_send_buffer(self, size: int) -> None:
        """Have the kernel keep about `size` bytes that the client has not read."""
        if self._transport is not None and (sock := self._transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def abort(self) -> None:
        """Close the connection at once, without the bytes that the client has not read, and count it as gone."""
        self.gone = True
        if self._transport is not None:
            self._transport.abort()

    def overdue(self, now: float) -> bool:
        """Return true if sending has waited for the client to read for more than `send_s` seconds."""
        return self.sending_since is not None and now - self.sending_since > self._config.send_s

    async def _start(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        named = [(b"x-request-id", self.rid.encode()), *headers]
        if self._origin:
            named += ((b"access-control-allow-origin", self._origin), (b"vary", b"Origin"), _EXPOSED)
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        self.sending_since = self._clock()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending_since = None

    @staticmethod
    def _too_long(most: int) -> HttpError:
        return HttpError(413, f"the body is longer than {most} bytes", code="body_too_long", headers=(_CLOSE,))
