"""Hashes of prompt blocks, so that clients, controllers and nodes name the same prefix alike.

A block's hash covers its own tokens and, through its parent's hash, every token before it: equal hashes mean equal
prefixes. 64-bit BLAKE2b, unsigned. Beside them the checksum of KV blocks on the wire. Owns the rules; must not cache
anything.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

ROOT = 0  # the parent of a first block
_empty = blake2b(digest_size=8)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """`tokens` as int32 little-endian, the form of a prompt frame. ValueError for what is no int32."""
    if isinstance(tokens, array) and tokens.typecode == "i" and sys.byteorder == "little":
        return tokens.tobytes()
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)  # twice as fast as an array made of them
    except struct.error as error:
        raise ValueError(f"a token id is no int32: {error}") from None


def tokens_of(frame: bytes) -> array[int]:
    """The inverse of `token_bytes`. ValueError when the size is not a multiple of 4."""
    tokens = array("i")
    tokens.frombytes(frame)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def hash_block(parent: int, block: bytes) -> int:
    """The hash of one full block (int32 little-endian token ids) that follows the prefix named `parent`."""
    return int.from_bytes(blake2b(parent.to_bytes(8, "little") + block, digest_size=8).digest(), "little")


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """The hash chain of the full blocks of `tokens`; a last partial block has none."""
    return unpack_hashes(packed_hashes(token_bytes(tokens), block_tokens)).tolist()


def packed_hashes(prompt: bytes, block_tokens: int) -> bytes:
    """`block_hashes` of tokens that are packed already, as in a prompt frame, in the form of `pack_hashes`."""
    size = block_tokens * 4
    digest = ROOT.to_bytes(8, "little")  # of the parent: its hash, little-endian
    digests: list[bytes] = []
    for (block,) in struct.iter_unpack(f"{size}s", memoryview(prompt)[: len(prompt) // size * size]):
        state = _empty.copy()  # made once: half the cost of a block
        state.update(digest + block)
        digest = state.digest()
        digests.append(digest)
    return b"".join(digests)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """As `Submit.block_hashes` carries them: 8 bytes little-endian each."""
    return b"".join(value.to_bytes(8, "little") for value in hashes)


def unpack_hashes(packed: bytes) -> array[int]:
    """The inverse of `pack_hashes`; trailing bytes that make no whole hash are ignored."""
    hashes = array("Q", packed[: len(packed) // 8 * 8])
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


def block_crc32(room: int, attempt: int, index: int, data: bytes | memoryview) -> int:
    """The checksum of `KvBlock` (docs/protocol.md, section 12): it covers the block's place as well as its bytes, so a
    mix-up shows."""
    return crc32(data, crc32(struct.pack("<QII", room, attempt, index)))
