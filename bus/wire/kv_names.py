"""The translation of another engine's block hashes to ours (`bus.wire.hashing`), for the cache changes of one rank.
Bounded; it knows no sockets.

Foreign hashes are opaque, but a stored block comes with its tokens and its parent, so our name for the same prefix
can be computed. Blocks whose parent is unknown (stored before we listened, or forgotten), and blocks made of more
than tokens, cannot be named and are left out.

An engine with layers of several kinds has, under one hash, a block for each group of layers. A prefix counts as
cached as far as the first group that attends to all of it has blocks on the device. Blocks of other groups and other
media, which come and go on their own, are left out too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from bus.wire.hashing import ROOT, hash_block, root_of, token_bytes
from bus.wire.kv_events import BlockRemoved, BlockStored, Hash, KvEvent

MAX_BLOCKS = 262_144


class Stored(Struct, frozen=True, gc=False):
    """Blocks with these hashes of ours came into the rank's cache, each the next one of a prompt after the one
    before."""

    hashes: tuple[int, ...]


class Removed(Struct, frozen=True, gc=False):
    """The blocks with these hashes of ours left the rank's cache."""

    hashes: tuple[int, ...]


class Cleared(Struct, frozen=True, gc=False):
    """The cache is empty, or its content is unknown."""


Changes: TypeAlias = tuple[Stored | Removed | Cleared, ...]


class Translator:
    """The translator of one rank, which knows our name of each foreign block, for `max_blocks` at most. Give `changes`
    the events in their order. `counts` gets `kv_blocks_unnamed` (blocks that could not be named) and
    `kv_blocks_elsewhere` (blocks of another group or medium than those that decide a hit)."""

    def __init__(self, counts: Counter[str], max_blocks: int = MAX_BLOCKS) -> None:
        self._counts = counts
        self._ours: OrderedDict[Hash, int] = OrderedDict()  # named longest ago first
        self._further: dict[Hash, int] = {}  # copies of a block beside the first
        self._group: int | None = None
        self._max_blocks = max_blocks

    def clear(self) -> None:
        """Forget all names, because the rank's cache is empty or its content is unknown."""
        self._ours.clear()
        self._further.clear()

    def name(self, theirs: Hash | None) -> int | None:
        """Return our hash of the block with the foreign hash `theirs`, or ROOT for None (the beginning of a prompt).
        None: that block has no name here."""
        return ROOT if theirs is None else self._ours.get(theirs)

    def known(self) -> list[Hash]:
        """Return the foreign hashes of all blocks that have a name, the least recently used first."""
        return list(self._ours)

    def changes(self, events: Sequence[KvEvent]) -> Changes:
        """Take in events and return the changes that follow for an index of cached prefixes, in our hashes. Consecutive
        single blocks are joined into one change."""
        found: list[tuple[type[Stored | Removed] | None, list[int]]] = []
        for event in events:
            kind, names = found[-1] if found else (None, [])
            if isinstance(event, BlockStored):
                parent, some = self._stored(event)
                if kind is not Stored or names[-1] != parent:
                    kind, names = Stored, []
            elif isinstance(event, BlockRemoved):
                some = self._removed(event)
                if kind is not Removed:
                    kind, names = Removed, []
            else:
                self.clear()
                found.append((None, []))
                continue
            if some and not names:
                found.append((kind, names))
            names += some
        return tuple(Cleared() if kind is None else kind(tuple(names)) for kind, names in found)

    def _stored(self, event: BlockStored) -> tuple[int, list[int]]:
        """Return our names of the parent and of the blocks."""
        if event.serves and self._group is None:
            self._group = event.group
        if not event.serves or event.group != self._group:
            self._counts["kv_blocks_elsewhere"] += len(event.hashes)
            return ROOT, []
        parent = self.name(event.parent)
        if parent is None or not event.plain:
            self._counts["kv_blocks_unnamed"] += len(event.hashes)
            return ROOT, []
        follows = parent
        if event.salt:
            parent = root_of(event.salt)
        packed, size = token_bytes(event.tokens), 4 * event.block_tokens
        names: list[int] = []
        for number, theirs in enumerate(event.hashes):
            parent = hash_block(parent, packed[number * size : (number + 1) * size])
            if theirs in self._ours and event.group is not None:  # vLLM, which says of each copy when it goes
                self._further[theirs] = self._further.get(theirs, 0) + 1
            self._ours[theirs] = parent
            self._ours.move_to_end(theirs)
            names.append(parent)
        if event.parent is not None:
            self._ours.move_to_end(event.parent)  # others follow it: without it they could not be named
        while len(self._ours) > self._max_blocks:
            self._further.pop(self._ours.popitem(last=False)[0], None)
        return follows, names

    def _removed(self, event: BlockRemoved) -> list[int]:
        """Return our names of the blocks of which no copy is left."""
        names: list[int] = []
        if not event.serves or event.group != self._group:
            return names
        for theirs in event.hashes:
            if self._further and (copies := self._further.pop(theirs, 0)):
                if copies > 1:
                    self._further[theirs] = copies - 1
            elif (ours := self._ours.pop(theirs, None)) is not None:
                names.append(ours)
        return names
