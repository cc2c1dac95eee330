"""What a feed tells the policies about one rank's cache. Owns the shapes; hashes are ours (`bus.wire.hashing`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Stored:
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached, or nothing is known, any more."""


Changes: TypeAlias = tuple[Stored | Removed | Cleared, ...]
