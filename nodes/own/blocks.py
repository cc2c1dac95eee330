"""Paged KV memory: the owners of each block. This module owns reference counts and the prefix cache; it touches no
KV bytes.

A block is free, held (by one sequence, or several that share a prefix), or reclaimable: it is held by no sequence, but
a prompt could reuse it, until memory is needed; the least recently used goes first. A full block is cached: it has a
name, its hash, by which a prompt finds it, whether it is held or reclaimable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block with these tokens can be found by `block_hash` from now on; `parent` is the hash of the block before
    it, 0 for a first block."""

    block_hash: int
    parent: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block of this hash was reclaimed: it cannot be found any more."""

    block_hash: int


KvEvent = BlockStored | BlockRemoved


class BlockPool:
    """The pool of `blocks` blocks of `block_tokens` tokens; a block is named by its index. The scheduler owns it. Not
    thread-safe; every method is O(blocks that it names).

    With `record_events` the owner must take the events regularly (`take_events`).
    """

    def __init__(self, blocks: int, block_tokens: int, *, record_events: bool = False) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._hash_of: dict[int, int] = {}  # block -> hash, of blocks that the cache names
        self._block_of: dict[int, int] = {}  # hash -> block
        self._reclaimable: OrderedDict[int, None] = OrderedDict()  # cached and not held, oldest first
        self._record_events = record_events
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """The number of blocks that `take` can hand out: free ones and reclaimable ones."""
        return len(self._free) + len(self._reclaimable)

    @property
    def held(self) -> int:
        """The number of blocks that sequences hold."""
        return self.blocks - self.available

    @property
    def reclaimable(self) -> int:
        """The number of cached blocks that no sequence holds."""
        return len(self._reclaimable)

    @property
    def cached(self) -> int:
        """The number of cached blocks, which a prompt could reuse."""
        return len(self._block_of)

    def names(self) -> list[int]:
        """Return the hashes of all cached blocks in the order of `commit`, so that a prefix's beginning comes before
        its end."""
        return list(self._block_of)

    def is_cached(self, block_hash: int) -> bool:
        """Return true if a block with this hash is cached."""
        return block_hash in self._block_of

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def match_prefix(self, hashes: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes` (a prompt's blocks in order), without taking
        them."""
        return list(iter(map(self._block_of.get, hashes).__next__, None))  # up to the first that is not there

    def take(self, count: int, hashes: Sequence[int] = ()) -> tuple[list[int], int] | None:
        """Take `count` blocks for a sequence, beginning with the cached prefix of `hashes` (as far as `count` goes);
        each is held until `release`.

        Return (table, number of them from the cache), or None, with nothing taken, when memory is short.
        """
        shared = self.match_prefix(hashes[:count])
        revived = sum(1 for block in shared if not self._references[block])
        if count - len(shared) > self.available - revived:
            return None
        for block in shared:
            if not self._references[block]:
                del self._reclaimable[block]
            self._references[block] += 1
        table = shared + [self._fresh() for _ in range(count - len(shared))]
        return table, len(shared)

    def commit(self, block: int, block_hash: int, parent: int, tokens: Sequence[int] = ()) -> None:
        """Give a held block, which is now full, its name for the cache: the hash of the prefix whose last block it is.
        A second block of the same name stays without one. AssertionError if no sequence holds it."""
        assert self._references[block] > 0, f"commit of block {block}, which is not held"
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        if self._record_events:
            self._events.append(BlockStored(block_hash, parent, tuple(tokens)))

    def release(self, table: Sequence[int]) -> None:
        """Give back one hold on each block of `table`. A block without holds is then reclaimable if it has a name, else
        free. The end of a prefix is reclaimed before its beginning. AssertionError for a block that no sequence
        holds."""
        for block in reversed(table):
            assert self._references[block] > 0, f"release of block {block}, which is not held"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._reclaimable[block] = None
            else:
                self._free.append(block)

    def take_events(self) -> list[KvEvent]:
        """Return the changes of the cache since the last call, in order; none without `record_events`."""
        events, self._events = self._events, []
        return events

    def _fresh(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._reclaimable.popitem(last=False)
            block_hash = self._hash_of.pop(block)
            del self._block_of[block_hash]
            if self._record_events:
                self._events.append(BlockRemoved(block_hash))
        self._references[block] = 1
        return block

    def validate(self) -> None:
        """Check that the pool is consistent; AssertionError if not (for tests)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.blocks):
            holders = self._references[block]
            assert holders >= 0
            places = (block in free) + (block in self._reclaimable) + (holders > 0)
            assert places == 1, f"block {block} is in {places} places"
            if block in self._reclaimable:
                assert block in self._hash_of
        assert self._hash_of == {block: value for value, block in self._block_of.items()}
        assert not free & self._hash_of.keys(), "a free block still has a name"
