"""Which rank caches which prompt prefix. Owns the index over hashed token blocks; knows nothing of loads or the wire.

A hash names a block and everything before it (`bus.wire.hashing`), so a rank's hit is the length of the leading run of
a request's hashes that it holds. Entries come from the rank's KV events (kept until an event removes them) and from
dispatches (`expected`: the rank will hold the prompt once it has computed it). An expectation lasts until it is
confirmed or its time is over: `confirm_s` where the rank publishes events, `expect_s` where nothing else is known of
it. Memory is bounded by `max_blocks` a rank: past it the oldest entries go. Hashes are opaque integers. A rank is the
number of its seat (`RankLoad.seat`), a set of ranks an integer with the bits of their seats.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

CONFIRMED = float("inf")
FIRST_LOOK = 32  # blocks; then after twice as many, and so on


class _Rank:
    __slots__ = ("bit", "blocks", "speaks")

    def __init__(self, seat: int) -> None:
        self.bit = 1 << seat
        self.blocks: OrderedDict[int, float] = OrderedDict()  # hash -> when it expires, oldest first
        self.speaks = False  # it has published events


class PrefixIndex:
    """O(blocks named) for every call, but `forget`: O(blocks of the rank)."""

    def __init__(self, *, max_blocks: int = 65_536, confirm_s: float = 30.0, expect_s: float = 300.0) -> None:
        self._max_blocks = max_blocks
        self._confirm_s = confirm_s
        self._expect_s = expect_s
        self._now = 0.0
        self._holders: dict[int, int] = {}  # hash -> the bits of the ranks that hold it
        self._ranks: dict[int, _Rank] = {}  # by seat
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

    def stored(self, seat: int, hashes: Iterable[int]) -> None:
        """The rank says that it caches these blocks."""
        rank = self._rank(seat)
        rank.speaks = True
        self._put(rank, hashes, CONFIRMED)

    def removed(self, seat: int, hashes: Iterable[int]) -> None:
        """The rank says that it no longer does."""
        rank = self._ranks.get(seat)
        if rank is not None:
            self._drop(rank, [each for each in dict.fromkeys(hashes) if each in rank.blocks])

    def forget(self, seat: int) -> None:
        """The rank restarted, cleared its cache or is gone: nothing of it is believed any more."""
        rank = self._ranks.pop(seat, None)
        if rank is not None:
            self._drop(rank, list(rank.blocks))

    def expected(self, seat: int, hashes: Iterable[int]) -> None:
        """A request with these blocks was dispatched to the rank: it will hold them soon, if it does not already."""
        rank = self._rank(seat)
        expires = self._now + (self._confirm_s if rank.speaks else self._expect_s)
        held = rank.blocks.get
        fresh = tuple(each for each in hashes if (until := held(each)) != expires and until != CONFIRMED)
        if not fresh:
            return
        self._put(rank, fresh, expires)
        self._order += 1
        self._expiring += len(fresh)
        heapq.heappush(self._expiries, (expires, self._order, rank, fresh))
        while self._expiring > 4 * self._max_blocks * len(self._ranks):
            self._expire()

    # --- what a request finds ---------------------------------------------------------------------------------

    def runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """`(depth, ranks)`, deeper and deeper: the ranks that hold the first `depth` blocks.

        Each time that some of them go no deeper, and now and then besides (so that the caller may stop asking), which
        may be twice at one depth. Ends when nobody holds the next block.
        """
        find = self._holders.get
        ranks = find(hashes[0], 0) if hashes else 0
        start, stop = 0, FIRST_LOOK
        while ranks and start < len(hashes):
            found = [*map(find, hashes[start:stop])]
            if found.count(ranks) < len(found):
                for depth, holders in enumerate(found, start):
                    if holders != ranks:
                        still = ranks & holders if holders else 0
                        if still != ranks:
                            yield depth, ranks
                            if not still:
                                return
                            ranks = still
            yield min(stop, len(hashes)), ranks
            start, stop = stop, 2 * stop

    def validate(self, seats: Container[int] = range(1 << 16)) -> None:
        """Both directions agree, bounds hold, and nobody but `seats` is known (for tests)."""
        holders: dict[int, int] = {}
        for seat, rank in self._ranks.items():
            assert rank.bit == 1 << seat
            assert seat in seats, seat
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
        self._drop(rank, [each for each in dict.fromkeys(hashes) if rank.blocks.get(each) == expires])

    def _rank(self, seat: int) -> _Rank:
        rank = self._ranks.get(seat)
        if rank is None:
            rank = self._ranks[seat] = _Rank(seat)
        return rank

    def _put(self, rank: _Rank, hashes: Iterable[int], expires: float) -> None:
        """Neighbours in a prompt mostly have the same holders: they share one integer, which many ranks make long."""
        blocks, holders = rank.blocks, self._holders
        before, after = 0, rank.bit
        for block_hash in hashes:
            if block_hash in blocks:
                blocks.move_to_end(block_hash)
            else:
                if len(blocks) >= self._max_blocks:
                    self._drop(rank, [next(iter(blocks))])
                held = holders.get(block_hash, 0)
                if held is not before:
                    before, after = held, held | rank.bit
                holders[block_hash] = after
            blocks[block_hash] = expires

    def _drop(self, rank: _Rank, hashes: Iterable[int]) -> None:
        blocks, holders = rank.blocks, self._holders
        before, after = rank.bit, 0
        for block_hash in hashes:
            del blocks[block_hash]
            held = holders[block_hash]
            if held is not before:
                before, after = held, held & ~rank.bit
            if after:
                holders[block_hash] = after
            else:
                del holders[block_hash]
