"""Messages to bytes and back: the only part of pdbus that uses `msgpack`.

A message frame is one version byte (`0x01`) followed by a MessagePack array `[tag, field, ...]`. Decoding checks
size and version, parses with MessagePack's own limits, looks the tag up in the table of the socket it came from, and
validates types and bounds (`msgspec.convert`, strict). A failure raises RemoteProtocolError with a `reason` that
fits a metric label: `size`, `version`, `syntax`, `tag`, `schema`. This module must not log, count or send.

Nearly every frame has the same bytes that `encode` gives for a valid message. Such frames take a short way: they are
read and validated in one pass, and encoded again to prove that they hold nothing else (docs/performance.md).
"""

from __future__ import annotations

from typing import Any, Union

import msgpack
import msgspec

from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.wire.messages import TABLES, Message, Table

VERSION = 1
VERSION_BYTE = bytes([VERSION])
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAY = 65_536  # no field is longer; so a few bytes cannot claim a huge array
_BYTES = (bytes,)  # without it msgspec takes text for bytes, as base64

_pack = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """Return the one frame of `message`. LocalProtocolError when it is larger than a peer accepts
    (MAX_HEADER_BYTES)."""
    frame = VERSION_BYTE + _pack(message)
    if len(frame) > MAX_HEADER_BYTES:
        raise LocalProtocolError("size", f"{type(message).__name__} takes {len(frame)} bytes")
    return frame


def decode(frame: bytes, table: Table) -> Message:
    """Return the message in `frame`, which must be of one of the kinds in `table` (what the socket that it came from
    may carry). RemoteProtocolError, with the reason, for anything else."""
    size = len(frame)
    if size < 3 or size > MAX_HEADER_BYTES:
        raise RemoteProtocolError("size", f"{size} bytes")
    if frame[0] != VERSION:
        raise RemoteProtocolError("version", f"version {frame[0]}, this peer speaks {VERSION}")
    body = frame[1:]
    try:
        message = table.read(body)
        if _pack(message) == body:
            return message
    except Exception:  # msgspec's errors, UnicodeDecodeError, RecursionError: the frame's fault, named below
        pass
    return _judge(body, table)


def readable(table: Table) -> Table:
    """Prepare a table for `decode` and return it. The tables of `bus.wire.messages` are prepared already."""
    kinds: Any = Union[tuple(table.values())]  # noqa: UP007
    table.read = msgspec.msgpack.Decoder(kinds).decode
    return table


def _judge(body: bytes, table: Table) -> Message:
    """Return the message by the long way, as for a newer or a foreign peer; else RemoteProtocolError."""
    try:
        fields: Any = msgpack.unpackb(body, strict_map_key=True, max_array_len=MAX_ARRAY, max_ext_len=0)
    except Exception as error:  # msgpack raises ValueError, its own classes, UnicodeDecodeError, RecursionError
        raise RemoteProtocolError("syntax", type(error).__name__) from None
    if type(fields) is not list or not fields or type(fields[0]) is not str:
        raise RemoteProtocolError("syntax", "not an array that starts with a tag")
    kind = table.get(fields[0])
    if kind is None:
        raise RemoteProtocolError("tag", fields[0][:32])
    try:
        return msgspec.convert(fields, kind, builtin_types=_BYTES)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("schema", f"{fields[0]}: {error}") from None


def pack(value: Any) -> bytes:
    """Return `value` as plain MessagePack without our version byte, for formats that are not ours (engines' KV-cache
    events)."""
    packed: bytes = msgpack.packb(value)
    return packed


def unpack(data: bytes) -> Any:
    """Return the value of MessagePack bytes from a foreign program: builtins only, sizes bounded; else
    RemoteProtocolError (`size`, `syntax`)."""
    if len(data) > MAX_HEADER_BYTES:
        raise RemoteProtocolError("size", f"{len(data)} bytes")
    try:
        return msgpack.unpackb(data, strict_map_key=True, max_array_len=MAX_ARRAY, max_map_len=1024, max_ext_len=0)
    except Exception as error:  # as in `decode`
        raise RemoteProtocolError("syntax", type(error).__name__) from None


for _table in TABLES:  # msgspec (0.22) crashes when a thread meets a type that another one uses for the first time
    readable(_table)
