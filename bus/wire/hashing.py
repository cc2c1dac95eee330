"""Hashes of prompt blocks, by which clients, controllers and nodes give the same prefix of a prompt the same name.

A block is a fixed number of tokens. Its hash covers its own tokens and, through its parent's hash, every token before
it: equal hashes mean equal prefixes. It is 64-bit BLAKE2b, unsigned. The checksum of KV blocks on the wire is here too.
This module owns the rules; it must not cache anything.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

ROOT = 0  # the parent of a first block
SALT_KEY = b"cache_salt"  # it keeps what a salt is hashed to apart from all hashes of blocks
_empty = blake2b(digest_size=8)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return `tokens` as int32 little-endian, the form of a prompt frame. ValueError for a value that does not fit."""
    if isinstance(tokens, array) and tokens.typecode == "i" and sys.byteorder == "little":
        return tokens.tobytes()
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)  # twice as fast as an array made of them
    except struct.error as error:
        raise ValueError(f"a token id is no int32: {error}") from None


def tokens_of(frame: bytes) -> array[int]:
    """Return the tokens of a prompt frame: the inverse of `token_bytes`. ValueError when the size is not a multiple
    of 4."""
    tokens = array("i")
    tokens.frombytes(frame)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def root_of(salt: str) -> int:
    """Return the parent of the first block of prompts with this `cache_salt`, so that another salt gives other hashes;
    ROOT for an empty salt."""
    if not salt:
        return ROOT
    return int.from_bytes(blake2b(salt.encode(), digest_size=8, key=SALT_KEY).digest(), "little")


def hash_block(parent: int, block: bytes) -> int:
    """Return the hash of one full block (int32 little-endian token ids). `parent` is the hash of the block before it;
    for a first block, the result of `root_of`."""
    return int.from_bytes(blake2b(parent.to_bytes(8, "little") + block, digest_size=8).digest(), "little")


def block_hashes(tokens: Sequence[int], block_tokens: int, root: int = ROOT) -> list[int]:
    """Return the hashes of the full blocks of `tokens`, the first block first; a last partial block has no hash. `root`
    is the parent of the first (`root_of`). ValueError for a token id that is no int32."""
    return unpack_hashes(packed_hashes(token_bytes(tokens), block_tokens, root)).tolist()


def packed_hashes(prompt: bytes, block_tokens: int, root: int = ROOT) -> bytes:
    """Return the `block_hashes` of a prompt frame, in the form of `pack_hashes`."""
    size = block_tokens * 4
    digest = root.to_bytes(8, "little")  # of the parent: its hash, little-endian
    digests: list[bytes] = []
    for (block,) in struct.iter_unpack(f"{size}s", memoryview(prompt)[: len(prompt) // size * size]):
        state = _empty.copy()  # made once: half the cost of a block
        state.update(digest + block)
        digest = state.digest()
        digests.append(digest)
    return b"".join(digests)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Return hashes in the form of `Submit.block_hashes`: 8 bytes little-endian each."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpack_hashes(packed: bytes) -> array[int]:
    """Return the hashes: the inverse of `pack_hashes`. Trailing bytes that are no whole hash are ignored."""
    hashes = array("Q", packed[: len(packed) // 8 * 8])
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


def block_crc32(room: int, attempt: int, index: int, data: bytes | memoryview) -> int:
    """Return the checksum of `KvBlock` (docs/protocol.md, section 12). It covers the block's place as well as its
    bytes, so that a block in the wrong place is found."""
    return crc32(data, crc32(struct.pack("<QII", room, attempt, index)))
