"""The checksum of KV blocks on the wire (docs/protocol.md, section 12)."""

from __future__ import annotations

import struct
from zlib import crc32


def block_crc32(room: int, attempt: int, index: int, data: bytes | memoryview) -> int:
    """The checksum of `KvBlock`: it covers the block's place as well as its bytes, so a mix-up shows."""
    return crc32(data, crc32(struct.pack("<QII", room, attempt, index)))
