"""Messages to bytes and back: the only module that imports `msgpack`.

A message frame is one version byte (`0x01`) followed by a MessagePack array `[tag, field, ...]`. Decoding checks
size and version, parses with MessagePack's own limits, looks the tag up in the table of the socket it came from,
and validates types and bounds (`msgspec.convert`, strict). What fails raises RemoteProtocolError with a `reason`
fit for a metric label: `size`, `version`, `syntax`, `tag`, `schema`. Must not log, count or send.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.messages import Message

VERSION = 1
VERSION_BYTE = bytes([VERSION])
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAY = 65_536  # no field is longer; so a few bytes cannot claim a huge array
_BYTES = (bytes,)  # without it msgspec takes text for bytes, as base64

_to_builtins = msgspec.to_builtins
_convert = msgspec.convert
_packb = msgpack.packb
_unpackb = msgpack.unpackb


def encode(message: Message) -> bytes:
    """One frame. Raises LocalProtocolError when the message is too large to be taken by a peer."""
    frame: bytes = VERSION_BYTE + _packb(_to_builtins(message, builtin_types=_BYTES))
    if len(frame) > MAX_HEADER_BYTES:
        raise LocalProtocolError("size", f"{type(message).__name__} takes {len(frame)} bytes")
    return frame


def decode(frame: bytes, table: dict[str, type[Message]]) -> Message:
    """The message in `frame`, one of `table`'s kinds, or RemoteProtocolError."""
    size = len(frame)
    if size < 3 or size > MAX_HEADER_BYTES:
        raise RemoteProtocolError("size", f"{size} bytes")
    if frame[0] != VERSION:
        raise RemoteProtocolError("version", f"version {frame[0]}, this peer speaks {VERSION}")
    try:
        fields: Any = _unpackb(frame[1:], strict_map_key=True, max_array_len=MAX_ARRAY, max_ext_len=0)
    except Exception as error:  # msgpack raises ValueError, its own classes, UnicodeDecodeError, RecursionError
        raise RemoteProtocolError("syntax", type(error).__name__) from None
    if type(fields) is not list or not fields or type(fields[0]) is not str:
        raise RemoteProtocolError("syntax", "not an array that starts with a tag")
    kind = table.get(fields[0])
    if kind is None:
        raise RemoteProtocolError("tag", fields[0][:32])
    try:
        return _convert(fields, kind, builtin_types=_BYTES)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("schema", f"{fields[0]}: {error}") from None
