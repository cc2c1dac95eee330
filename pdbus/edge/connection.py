"""One connection of an HTTP client, with limits on the size and time of every part of a message.

uvicorn and httptools parse and answer; the limits that they leave out are here. Each byte of a client belongs to a
head, to what follows a head (body, chunk framing, trailers), or to no message. Bytes that the client does not read are
kept for a limited time.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdbus.edge.config import EdgeConfig
from pdbus.edge.exchange import TRANSPORT

_FIELD = 4  # bytes of a header field beside its name and value


class Part(Enum):
    """The part of a message that the next byte belongs to."""

    NONE = "none"
    HEAD = "head"
    BEHIND = "behind the head"


class Outgoing:
    """An asyncio transport that counts the bytes written to it, in `written`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        """Write data to the transport, and count it."""
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn with the limits of the edge's settings (`limits`). It closes when a request's head is too
    long or too slow, and when what follows the head is too long. A body that still comes after the answer must end in
    time, too. A header `Upgrade` is ignored and the body is read as usual: Java's HttpClient sends it, with an offer of
    HTTP/2, in requests that have bodies. uvicorn, asyncio and httptools call the methods."""

    limits: EdgeConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = Part.NONE
        self._timer: asyncio.TimerHandle | None = None
        self._came = 0  # bytes received of this part
        self._fields = 0  # bytes parsed of its request line, headers or trailers
        self._framing = 0  # bytes after the head that carried no body
        self._had_body = False  # the last data had a part of a body
        self._declined = b""  # a head that offered an upgrade, without that header
        self._sent = 0  # bytes that the client's machine accepted
        self._sent_at = 0.0  # when it last accepted some

    # --- what the client sends --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note a new connection: its first head must come within `receive_s` seconds."""
        super().connection_made(Outgoing(transport))  # type: ignore[arg-type]
        self._sent_at = self.loop.time()
        self._time()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client. Close the connection when the head, or what follows it, has more bytes in all than
        the limits allow; answer 400 to what is not HTTP."""
        self._unset_keepalive_if_required()
        if self._part is Part.NONE:
            self._time()  # a head's time starts with its first byte
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
        """Note the start of a head, which must come within `receive_s`."""
        self._enter(Part.HEAD)
        self._time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request line as part of the head."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header or trailer, and close the connection beyond the limit; trailers are dropped."""
        self._count(len(name) + len(value) + _FIELD)
        if self._part is Part.HEAD:  # otherwise it is a trailer, which is not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, which has further limits for the body. A head that offers an upgrade is
        parsed again without that header."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._declined = self._without_upgrade()
            return
        self._untime()
        self._enter(Part.BEHIND)
        self.scope[TRANSPORT] = self.transport  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._had_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request. If it was answered already, the connection is idle until the next request."""
        if self._declined:
            return
        self._enter(Part.NONE)
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # the answer came first
            self._untime()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Note the end of a response. If the request's body has not ended yet, it must end within `receive_s` seconds,
        or the connection closes."""
        super().on_response_complete()
        if self._part is Part.BEHIND and self.cycle.response_complete:  # the rest of the body is not needed
            self._unset_keepalive_if_required()
            self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is closed."""
        self._untime()
        super().connection_lost(exc)

    # --- what it reads ----------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """The number of bytes that wait for the client to read."""
        waiting: int = self.transport.get_write_buffer_size()
        return waiting

    def stalled(self, now: float) -> bool:
        """Return true if bytes wait and the client has accepted none for `send_s` seconds. Call it regularly; `now` is
        the loop's time."""
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
            if head:  # a new parser, because this one expects another protocol now
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[offer.args[0] :])

    def _without_upgrade(self) -> bytes:
        """Return the head that was just parsed, without the header that offers an upgrade."""
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
    """Return a class of connections with the limits of `config`, for uvicorn to instantiate."""
    return type("Connection", (Connection,), {"limits": config})
