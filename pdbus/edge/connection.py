"""HTTP/1.1 on one connection: requests in, responses out, and how long and how large each part of a request may be.

httptools parses. Each request becomes an `Exchange`, which `serve` answers; one that comes before the last one's answer
waits for it. Owns the connection and what a silent client may take of it; knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from bus.runtime.logs import get_logger
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import invalid
from pdbus.edge.exchange import Exchange, head

log = get_logger("edge")


class Holder(Protocol):
    """Of all connections and of what they do."""

    connections: set[Connection]
    tasks: set[asyncio.Task[None]]


class Connection(asyncio.Protocol):
    """`check` is to be called about once a second: what takes too long ends there."""

    def __init__(
        self, config: EdgeConfig, serve: Callable[[Exchange], Awaitable[None]], clock: Callable[[], float], of: Holder
    ) -> None:
        self._config = config
        self._serve = serve
        self._clock = clock
        self._of = of
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._deaf = False  # what comes is thrown away
        self._leaving = False  # no request is begun any more
        # The request that comes in.
        self._in_head = True  # or none has begun
        self._head_bytes = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._incoming: Exchange | None = None  # its body is not whole
        self._since = clock()  # when this part of it began, or the wait for it
        # Those that are answered. While any waits, nothing is read.
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._unread_since: float | None = None  # when the client had too much to read
        self._read: asyncio.Future[None] | None = None  # until it has not

    # --- from the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._of.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse()
        if self._in_head and self._head_bytes > self._config.max_head_bytes:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._deaf = self._leaving = True
        self._of.connections.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        self._waiting.clear()
        self._transport = self._parser = None  # the parser refers to this
        self.resume_writing()
        if self._current is not None:
            self._current.leave()

    def pause_writing(self) -> None:
        self._unread_since = self._clock()
        self._read = self._loop.create_future()

    def resume_writing(self) -> None:
        self._unread_since = None
        if self._read is not None and not self._read.done():
            self._read.set_result(None)

    # --- from the server --------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End what has taken too long."""
        waited_s = now - self._since
        if self._unread_since is not None:
            if now - self._unread_since > self._config.send_s:
                log.warning("client.stopped_reading", rid=self._current.rid if self._current else "")
                self._transport.abort()
        elif self._current is None:
            receives = self._in_head or self._incoming is not None
            if waited_s > (self._config.receive_s if receives else self._config.keep_alive_s):
                self._transport.close()
        elif self._current is self._incoming and waited_s > self._config.receive_s:
            self._incoming.give_up()

    def shutdown(self) -> None:
        """No request after the one under way."""
        self._leaving = True
        self._waiting.clear()
        if self._current is None:
            self._transport.close()

    def abort(self) -> None:
        """Now."""
        if self._transport is not None:
            self._transport.abort()

    # --- from the parser --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._since = True, 0, self._clock()
        self._url, self._headers = b"", {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # `_stay` follows
        path: str = httptools.parse_url(self._url).path.decode("ascii")
        exchange = Exchange(
            self._parser.get_method().decode(), unquote(path) if "%" in path else path, self._headers,
            self, self._config, self._clock,
            chunks=self._parser.get_http_version() != "1.0", stays=self._parser.should_keep_alive(),
        )  # fmt: skip
        self._in_head, self._incoming, self._since = False, exchange, exchange.began_at
        if self._current is None and not self._leaving:
            self._begin(exchange)
        elif not self._leaving:
            self._waiting.append(exchange)
            self._transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._incoming is not None:
            self._incoming.take(body)

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.take_end()
            self._incoming = None

    # --- from an exchange -------------------------------------------------------------------------------------------

    @property
    def ends(self) -> bool:
        """Whether no answer follows the one under way."""
        return self._leaving or (self._deaf and not self._waiting)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        """Returns when the client has not too much to read, or has left."""
        if self._unread_since is not None and self._read is not None:
            await self._read

    # --- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self._loop.create_task(self._answer(exchange))
        self._of.tasks.add(task)
        task.add_done_callback(self._of.tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._serve(exchange)
        finally:
            self._current = None
            if self._transport is not None:
                self._go_on(exchange)

    def _go_on(self, done: Exchange) -> None:
        if not done.over:
            self._transport.abort()
        elif self.ends or not done.stays:
            self._end()
        elif self._waiting:
            self._begin(self._waiting.popleft())
            if not self._waiting:
                self._since = self._clock()
                self._transport.resume_reading()
        elif self._incoming is None:
            self._since = self._clock()

    def _stay(self, rest: bytes) -> None:
        """Nobody must follow to another protocol, which Java's client asks of everybody. Read the request again as if
        not asked: the parser takes what is behind its head (`rest`), the body too, for the other protocol's."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse()
            return
        kept = [header for header in self._headers.items() if header[0] not in (b"connection", b"upgrade")]
        said = b"".join(b"%b: %b\r\n" % header for header in kept)
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, said, rest))

    def _refuse(self) -> None:
        """No HTTP. What is under way still gets its answer."""
        self._deaf = True
        if self._current is None:
            body = invalid(None, "this is no HTTP/1.1 request").body()
            self.write(head(400, ((b"content-type", b"application/json"),), length=len(body), stays=False) + body)
            self._end()

    def _end(self) -> None:
        """Close, once the client has the answer: one that still sends would be reset, and might never read it."""
        self._deaf = True
        if self._incoming is not None and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._since = self._clock()
        else:
            self._transport.close()
