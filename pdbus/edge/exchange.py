"""One HTTP request and its response: what the client sent, whether it still waits, and the bytes that go back.

Owns the limits on a body. Its connection (`Out`) moves the bytes.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import CLIENT_GONE, HttpError, invalid
from pdbus.edge.keys import Key

Header = tuple[bytes, bytes]

RID_MAX = 120  # the protocol's 128, less what tells several answers apart
NUMBER_MAX = 1e9  # of a header
PRIORITY_MAX = 1000
_RID = re.compile(rb"[!-~]{1,%d}" % RID_MAX)
_rng = random.Random()
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Out(Protocol):
    """The connection of an exchange."""

    @property
    def ends(self) -> bool:
        """Whether no answer follows this one."""

    def write(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Returns when the client has not too much to read, or has left."""


class Exchange:
    """`rid` is the client's `x-request-id`, or drawn; every response says it. `chunks`: the client knows an answer that
    comes in them; `stays`: another request may follow on the connection."""

    def __init__(
        self, method: str, path: str, headers: dict[bytes, bytes], out: Out, config: EdgeConfig,
        clock: Callable[[], float], *, chunks: bool, stays: bool,
    ) -> None:  # fmt: skip
        self.method = method
        self.path = path
        self.headers = headers
        self.stays = stays
        self.key: Key | None = None  # the client's
        self.status = 0  # of the response, once it has begun
        self.over = False  # the response is complete
        self.gone = False  # the client left
        self.began_at = clock()
        self._out = out
        self._config = config
        self._chunks = chunks
        self._parts: list[bytes] = []  # of the body
        self._size = 0
        self._whole = self._gave_up = False  # the body is there; it is not waited for any more
        self._awaited: asyncio.Future[None] | None = None  # either
        self._left: Callable[[], None] | None = None
        self._head = b""  # to be sent with the first event
        said = headers.get(b"x-request-id")
        self._has_rid = said is not None and _RID.fullmatch(said) is not None
        self.rid = said.decode() if said is not None and self._has_rid else f"{_rng.getrandbits(128):032x}"

    # --- from the connection ----------------------------------------------------------------------------------------

    def take(self, part: bytes) -> None:
        """Some of the body. What nobody will read is not kept."""
        self._size += len(part)
        if self.over or self._size > self._config.max_body_bytes:
            self._parts.clear()
            self._wake()
        else:
            self._parts.append(part)

    def take_end(self) -> None:
        """The body is whole."""
        self._whole = True
        self._wake()

    def give_up(self) -> None:
        """Wait for the body no longer."""
        self._gave_up = True
        self._wake()

    def leave(self) -> None:
        """The client has left."""
        self.gone = True
        self._wake()
        if self._left is not None:
            self._left()

    # --- the request ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """HttpError for headers that make no sense."""
        if not self._has_rid and b"x-request-id" in self.headers:
            raise invalid("x-request-id", f"x-request-id: 1 to {RID_MAX} printable characters")

    def number(self, header: bytes) -> float | None:
        """Of a header of ours; HttpError when it is none."""
        said = self.headers.get(header)
        if said is None:
            return None
        try:
            value = float(said)
            if abs(value) < NUMBER_MAX:  # NaN is not
                return value
        except ValueError:
            pass
        raise invalid(header.decode(), f"{header.decode()}: not a number")

    def seconds(self, header: bytes) -> float | None:
        """As `number`, above 0."""
        seconds = self.number(header)
        if seconds is not None and seconds <= 0:
            raise invalid(header.decode(), f"{header.decode()}: seconds, above 0")
        return seconds

    async def body(self) -> bytes:
        """All of it; HttpError when it is too long, takes too long, or is no JSON by its own account."""
        headers, most = self.headers, self._config.max_body_bytes
        kind = headers.get(b"content-type", b"")
        if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
            raise self._refusal(415, "send JSON, with the header Content-Type: application/json")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise self._refusal(415, "send the body as it is, without Content-Encoding")
        length = headers.get(b"content-length", b"0")
        if self._size > most or (length.isdigit() and int(length) > most):
            raise self._too_long()
        if not self._whole:
            if headers.get(b"expect", b"").lower() == b"100-continue":
                self._out.write(_CONTINUE)
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
            if self._size > most:
                raise self._too_long()
            if self.gone:
                raise HttpError(CLIENT_GONE, "the client left")
            if not self._whole:
                raise self._refusal(408, f"the body did not come within {self._config.receive_s:g} s")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the client leaves, until `unwatch`."""
        self._left = left

    def unwatch(self) -> None:
        self._left = None

    # --- the response -----------------------------------------------------------------------------------------------

    async def answer(
        self, status: int, body: bytes, kind: bytes = b"application/json", headers: tuple[Header, ...] = ()
    ) -> None:
        start = self._start(status, ((b"content-type", kind), *headers), len(body))
        self._out.write(start if self.method == "HEAD" else start + body)
        self.over = True
        await self._out.drained()

    async def fail(self, error: HttpError) -> None:
        await self.answer(error.status, error.body(), headers=error.headers)

    def events(self) -> None:
        """Begin a stream of server-sent events."""
        self.stays = self.stays and self._chunks
        self._head = self._start(200, _EVENTS, None)

    async def event(self, data: bytes, *, last: bool = False) -> None:
        """Returns when the client has not too much to read yet."""
        if self._chunks:
            data = b"%b%x\r\n%b\r\n%b" % (self._head, len(data), data, b"0\r\n\r\n" if last else b"")
        else:
            data = self._head + data
        self._head = b""
        self.over = last
        self._out.write(data)
        await self._out.drained()

    def _start(self, status: int, headers: tuple[Header, ...], length: int | None) -> bytes:
        self.status = status
        if not self._whole and b"expect" in self.headers:  # whether the body will come is the client's to choose
            self.stays = False
        headers = ((b"x-request-id", self.rid.encode()), *headers)
        return head(status, headers, length=length, chunks=self._chunks, stays=self.stays and not self._out.ends)

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _too_long(self) -> HttpError:
        why = f"the body is longer than {self._config.max_body_bytes} bytes"
        return self._refusal(413, why, "body_too_long")

    def _refusal(self, status: int, why: str, code: str | None = None) -> HttpError:
        """Of a body that is not read: no other request can be told from what is left of it."""
        self.stays = False
        return HttpError(status, why, code=code)


def head(
    status: int, headers: tuple[Header, ...], *, length: int | None, chunks: bool = True, stays: bool = True
) -> bytes:
    """The status line and headers of a response. One without a `length` ends with its last chunk, or the connection."""
    lines = [_STATUS_LINES[status]]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if length is not None:
        lines.append(b"content-length: %d\r\n" % length)
    elif chunks:
        lines.append(b"transfer-encoding: chunked\r\n")
    lines.append(b"\r\n" if stays else b"connection: close\r\n\r\n")
    return b"".join(lines)
