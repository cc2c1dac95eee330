"""One connection of an HTTP client: whatever it sends is counted and timed, whatever part of a message it is.

uvicorn and httptools parse and answer; what they leave to others stands here. A client's bytes are those of a head,
those behind one (a body, what frames it, trailers), or of no message; and what it does not read is not kept for ever.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdbus.edge.config import EdgeConfig

_FIELD = 4  # bytes of a header field beside its name and value


class Part(Enum):
    """Of a message: which one the next byte belongs to."""

    NONE = "none"
    HEAD = "head"
    BEHIND = "behind the head"


class Outgoing:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """Closed when a head is too long or takes too long, or what is behind it is too long or, once it is answered, takes
    too long. `Upgrade` is ignored, and the body read: Java's HttpClient offers h2c with bodies."""

    limits: EdgeConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = Part.NONE
        self._timer: asyncio.TimerHandle | None = None
        self._came = 0  # bytes of this part, as they came
        self._fields = 0  # of its request line, headers or trailers, as they were parsed
        self._framing = 0  # that came behind the head without any of a body
        self._had_body = False  # in what came last
        self._declined = b""  # a head with an offer to upgrade, without it
        self._sent = 0  # bytes that the client's machine took,
        self._sent_at = 0.0  # and when it last took some

    # --- what the client sends --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Outgoing(transport))  # type: ignore[arg-type]
        self._sent_at = self.loop.time()
        self._time()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._part is Part.NONE:
            self._time()  # a head's time begins with the first byte of whatever that is
        part, self._had_body = self._part, False
        self._came += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if part is Part.BEHIND and part is self._part and not self._had_body:
            self._framing += len(data)
        most = self.limits.max_head_bytes
        if self._part is Part.BEHIND:
            most += self.limits.max_body_bytes
        if self._came > most or self._framing > self.limits.max_head_bytes:
            self._give_up()

    def on_message_begin(self) -> None:
        self._enter(Part.HEAD)
        self._time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _FIELD)
        if self._part is Part.HEAD:  # else it is a trailer, which nobody asks for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._declined = self._without_upgrade()
            return
        self._untime()
        self._enter(Part.BEHIND)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._had_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._enter(Part.NONE)
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # its answer was faster
            self._untime()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._part is Part.BEHIND and self.cycle.response_complete:  # nobody waits for the rest of the body
            self._unset_keepalive_if_required()
            self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._untime()
        super().connection_lost(exc)

    # --- what it reads ----------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to read."""
        waiting: int = self.transport.get_write_buffer_size()
        return waiting

    def stalled(self, now: float) -> bool:
        """Whether some have waited for `send_s`, none being taken. To be asked now and then."""
        waiting = self.unsent
        sent = self.transport.written - waiting  # type: ignore[attr-defined]
        if not waiting or sent > self._sent:
            self._sent, self._sent_at = sent, now
        return now - self._sent_at > self.limits.send_s

    # --- inside -----------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            head, self._declined = self._declined, b""
            if head:  # another parser, since this one takes what follows for another protocol's
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[offer.args[0] :])

    def _without_upgrade(self) -> bytes:
        """The head that was parsed just now, without the header that makes an offer of it."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((line, *fields, b"", b""))

    def _enter(self, part: Part) -> None:
        self._part, self._came, self._fields, self._framing = part, 0, 0, 0

    def _count(self, size: int) -> None:
        self._fields += size
        if self._fields > self.limits.max_head_bytes:
            self._give_up()

    def _time(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.receive_s, self._give_up)

    def _untime(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def connections_of(config: EdgeConfig) -> type[Connection]:
    """The class of an edge's connections: uvicorn makes them."""
    return type("Connection", (Connection,), {"limits": config})
