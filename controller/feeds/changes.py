"""What a feed tells the policies about one rank's cache. Owns the shapes; hashes are ours (`bus.wire.hashing`)."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct


class Stored(Struct, frozen=True, gc=False):
    hashes: tuple[int, ...]


class Removed(Struct, frozen=True, gc=False):
    hashes: tuple[int, ...]


class Cleared(Struct, frozen=True, gc=False):
    """Nothing is cached, or nothing is known, any more."""


Changes: TypeAlias = tuple[Stored | Removed | Cleared, ...]
