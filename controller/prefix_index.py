"""Which rank caches which prompt prefix. Owns the index over hashed token blocks; knows nothing of loads or the wire.

A hash names a block and everything before it (`bus.hashing`), so a rank's hit is the length of the leading run of a
request's hashes that it holds. Entries come from the rank's KV events (kept until an event removes them) and from
dispatches (`expected`: the rank will hold the prompt once it has computed it). An expectation lasts until it is
confirmed or its time is over: `confirm_s` where the rank publishes events, `expect_s` where nothing else is known of
it. Memory is bounded by `max_blocks` a rank: past it the oldest entries go. Hashes are opaque integers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from bus.messages import MemberKey

CONFIRMED = float("inf")


class _Rank:
    __slots__ = ("bit", "blocks", "key", "speaks")

    def __init__(self, key: MemberKey, bit: int) -> None:
        self.key = key
        self.bit = bit
        self.blocks: OrderedDict[int, float] = OrderedDict()  # hash -> when it expires, oldest first
        self.speaks = False  # it has published events


class PrefixIndex:
    """O(blocks named) for every call; `match` is also O(ranks that hold the first block)."""

    def __init__(self, *, max_blocks: int = 65_536, confirm_s: float = 30.0, expect_s: float = 300.0) -> None:
        self._max_blocks = max_blocks
        self._confirm_s = confirm_s
        self._expect_s = expect_s
        self._now = 0.0
        self._holders: dict[int, int] = {}  # hash -> the bits of the ranks that hold it
        self._ranks: dict[MemberKey, _Rank] = {}
        self._by_bit: list[_Rank | None] = []
        self._expiries: list[tuple[float, int, _Rank, tuple[int, ...]]] = []  # a heap, an entry for each `expected`
        self._expiring = 0  # hashes in it
        self._order = 0

    def __len__(self) -> int:
        """Entries of all ranks together."""
        return sum(len(rank.blocks) for rank in self._ranks.values())

    def advance(self, now: float) -> None:
        """Time goes on: what was expected and never confirmed is given up."""
        self._now = max(self._now, now)
        while self._expiries and self._expiries[0][0] <= self._now:
            self._expire()

    # --- what ranks hold --------------------------------------------------------------------------------------

    def stored(self, key: MemberKey, hashes: Iterable[int]) -> None:
        """The rank says that it caches these blocks."""
        rank = self._rank(key)
        rank.speaks = True
        for block_hash in hashes:
            self._put(rank, block_hash, CONFIRMED)

    def removed(self, key: MemberKey, hashes: Iterable[int]) -> None:
        """The rank says that it no longer does."""
        rank = self._ranks.get(key)
        if rank is not None:
            for block_hash in hashes:
                if block_hash in rank.blocks:
                    self._drop(rank, block_hash)

    def forget(self, key: MemberKey) -> None:
        """The rank restarted, cleared its cache or is gone: nothing of it is believed any more."""
        rank = self._ranks.pop(key, None)
        if rank is None:
            return
        for block_hash in rank.blocks:
            self._clear_bit(rank, block_hash)
        rank.blocks.clear()
        self._by_bit[rank.bit.bit_length() - 1] = None

    def expected(self, key: MemberKey, hashes: Iterable[int]) -> None:
        """A request with these blocks was dispatched to the rank: it will hold them soon, if it does not already."""
        rank = self._rank(key)
        expires = self._now + (self._confirm_s if rank.speaks else self._expect_s)
        fresh = tuple(block_hash for block_hash in hashes if rank.blocks.get(block_hash) not in (CONFIRMED, expires))
        if not fresh:
            return
        for block_hash in fresh:
            self._put(rank, block_hash, expires)
        self._order += 1
        self._expiring += len(fresh)
        heapq.heappush(self._expiries, (expires, self._order, rank, fresh))
        while self._expiring > 4 * self._max_blocks * len(self._ranks):
            self._expire()

    # --- what a request finds ---------------------------------------------------------------------------------

    def match(self, hashes: Sequence[int]) -> Mapping[MemberKey, int]:
        """For each rank that holds a prefix of `hashes`, how many leading blocks of it (at least 1)."""
        found: dict[MemberKey, int] = {}
        holding = -1  # the ranks that hold every block so far
        for depth, block_hash in enumerate(hashes):
            still = holding & self._holders.get(block_hash, 0)
            if depth and still != holding:
                self._note(found, holding & ~still, depth)
            holding = still
            if not holding:
                return found
        if hashes:
            self._note(found, holding, len(hashes))
        return found

    def validate(self) -> None:
        """Both directions agree, and bounds hold (for tests)."""
        holders: dict[int, int] = {}
        for rank in self._ranks.values():
            assert self._by_bit[rank.bit.bit_length() - 1] is rank
            assert len(rank.blocks) <= self._max_blocks
            for block_hash, expires in rank.blocks.items():
                assert expires > self._now, "an expired entry"
                holders[block_hash] = holders.get(block_hash, 0) | rank.bit
        assert holders == self._holders
        assert self._expiring == sum(len(entry[3]) for entry in self._expiries)

    # --- inside -----------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Give up the expectation that ends first."""
        expires, _, rank, hashes = heapq.heappop(self._expiries)
        self._expiring -= len(hashes)
        for block_hash in hashes:
            if rank.blocks.get(block_hash) == expires:
                self._drop(rank, block_hash)

    def _note(self, found: dict[MemberKey, int], bits: int, depth: int) -> None:
        while bits:
            low = bits & -bits
            rank = self._by_bit[low.bit_length() - 1]
            assert rank is not None
            found[rank.key] = depth
            bits ^= low

    def _rank(self, key: MemberKey) -> _Rank:
        rank = self._ranks.get(key)
        if rank is None:
            slot = self._by_bit.index(None) if None in self._by_bit else len(self._by_bit)
            rank = self._ranks[key] = _Rank(key, 1 << slot)
            self._by_bit[slot:] = [rank] if slot == len(self._by_bit) else [rank, *self._by_bit[slot + 1 :]]
        return rank

    def _put(self, rank: _Rank, block_hash: int, expires: float) -> None:
        if block_hash in rank.blocks:
            rank.blocks.move_to_end(block_hash)
        else:
            self._holders[block_hash] = self._holders.get(block_hash, 0) | rank.bit
            if len(rank.blocks) >= self._max_blocks:
                oldest, _ = rank.blocks.popitem(last=False)
                self._clear_bit(rank, oldest)
        rank.blocks[block_hash] = expires

    def _drop(self, rank: _Rank, block_hash: int) -> None:
        del rank.blocks[block_hash]
        self._clear_bit(rank, block_hash)

    def _clear_bit(self, rank: _Rank, block_hash: int) -> None:
        left = self._holders[block_hash] & ~rank.bit
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]
