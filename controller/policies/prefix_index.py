"""The index of cached prompt prefixes by rank, over hashed token blocks. It knows nothing of loads or the wire.

A hash names a block and everything before it (`bus.wire.hashing`), so a rank's hit is the length of the leading run of
a request's hashes that it holds. A cache may lose a block and keep the blocks behind it: they count again when the lost
block is back.

Entries come from the rank's KV events (kept until an event removes them) and from dispatches (`expected`: the rank will
hold the prompt once it has computed it). An expected entry lasts until it is confirmed or expires: after `confirm_s`
where the rank publishes events, after `expect_s` where it does not. Memory is bounded by `max_blocks` a rank. What no
call has named for longest is dropped first; of one prompt, its end before its beginning, since a prefix without its
beginning is of no use. Where a rank publishes events, expected entries take half of that at most, so that requests push
out nothing that the rank has reported. Hashes are unsigned 64-bit integers. A rank is the number of its slot
(`RankLoad.slot`), a set of ranks an integer with the bits of their slots.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from controller.policies.holders import Holders, as_array
from controller.policies.sessions import Sessions

CONFIRMED = float("inf")
MAX_COMING = 64  # prompts that are expected, and not worked in yet


class _Expectation:
    __slots__ = ("expires", "hashes", "rank")

    def __init__(self, expires: float, rank: _Rank, hashes: tuple[int, ...]) -> None:
        self.expires = expires
        self.rank = rank
        self.hashes = hashes  # empty once it is given up


class _Rank:
    __slots__ = ("bit", "blocks", "expected", "expecting", "speaks")

    def __init__(self, slot: int) -> None:
        self.bit = 1 << slot
        self.blocks: OrderedDict[int, float] = OrderedDict()  # hash -> when it expires, oldest first
        self.speaks = False  # it has published events
        self.expected: deque[_Expectation] = deque()  # oldest first, as long as none is given up in between
        self.expecting = 0  # hashes in them


class PrefixIndex:
    """The index of the ranks with one policy. Times are in seconds of the clock of `advance`. Changes take O(blocks
    named), `forget` O(blocks of the rank), `runs` O(runs on the way). What `expected`
    is told is worked in with the next call of another method, or of `catch_up`, which the controller's shell makes once
    it has sent its messages: 512 blocks take a millisecond."""

    def __init__(self, *, max_blocks: int = 65_536, confirm_s: float = 30.0, expect_s: float = 300.0) -> None:
        self._max_blocks = max_blocks
        self._confirm_s = confirm_s
        self._expect_s = expect_s
        self._now = 0.0
        self._holders = Holders()
        self._ranks: dict[int, _Rank] = {}  # by slot
        self._expiries: list[tuple[float, int, _Expectation]] = []  # a heap, an entry for each `expected`
        self._expiring = 0  # hashes in it
        self._void = 0  # entries in it that are given up
        self._order = 0
        self._coming: list[tuple[int, array[int]]] = []  # expected, not worked in yet: slots, and their hashes
        self.sessions = Sessions()  # of requests without hashes

    def __len__(self) -> int:
        """Return the number of entries of all ranks together."""
        self.catch_up()
        return sum(len(rank.blocks) for rank in self._ranks.values())

    def advance(self, now: float) -> None:
        """Set the time in seconds; expected entries that were not confirmed in time are dropped. An earlier time than
        the last one changes nothing."""
        self.catch_up()
        self.sessions.advance(now)
        self._now = max(self._now, now)
        while self._expiries and self._expiries[0][0] <= self._now:
            self._expire()

    # --- what ranks hold --------------------------------------------------------------------------------------

    def stored(self, slot: int, hashes: Iterable[int]) -> None:
        """Add blocks that the rank states to cache."""
        self.catch_up()
        rank, named = self._rank(slot), as_array(hashes)
        rank.speaks = True
        before = len(rank.blocks)
        self._put(rank, named, CONFIRMED)
        if len(rank.blocks) > before:  # else all of it was expected
            self._know(rank, named)

    def removed(self, slot: int, hashes: Iterable[int]) -> None:
        """Remove blocks that the rank no longer caches."""
        self.catch_up()
        rank = self._ranks.get(slot)
        if rank is not None:
            named = reversed(dict.fromkeys(hashes))  # engines give up the end of a prompt first
            self._drop(rank, [each for each in named if each in rank.blocks])

    def forget(self, slot: int) -> None:
        """Remove everything of a rank that restarted, cleared its cache or is gone."""
        self.catch_up()
        self.sessions.forget(slot)
        rank = self._ranks.pop(slot, None)
        if rank is not None:
            self._holders.remove_all(rank.bit, rank.blocks)
            rank.blocks.clear()  # for `_expire`, which may still come to it

    def expected(self, slot: int, hashes: Iterable[int]) -> None:
        """Add the blocks of a request that was dispatched to the rank: it will hold them soon, if it does not
        already."""
        self._coming.append((slot, as_array(hashes)))
        if len(self._coming) > MAX_COMING:
            self.catch_up()

    def catch_up(self) -> None:
        """Work in what `expected` was told. It changes no result, only when the work is done."""
        if self._coming:
            coming, self._coming = self._coming, []
            for slot, named in coming:
                self._expect(slot, named)

    def _expect(self, slot: int, named: array[int]) -> None:
        rank = self._rank(slot)
        bound = self._max_blocks
        if rank.speaks:
            bound = bound // 2 or 1
        if len(named) > bound:
            named = named[:bound]
        expires = self._now + (self._confirm_s if rank.speaks else self._expect_s)
        held = rank.blocks.get
        ends = {*map(held, named)}
        if ends <= {expires, CONFIRMED}:  # it knows all of them
            self._holders.add(rank.bit, named)  # joins what events named one by one
            self._touch(rank, named)
            return
        if ends == {None}:  # it knows none of them
            fresh = tuple(named)
            self._put(rank, fresh, expires)
        else:
            fresh = tuple([each for each in named if (until := held(each)) != expires and until != CONFIRMED])
            self._put(rank, fresh, expires)
            self._touch(rank, named)
        self._order += 1
        self._expiring += len(fresh)
        expectation = _Expectation(expires, rank, fresh)
        rank.expected.append(expectation)
        rank.expecting += len(fresh)
        heapq.heappush(self._expiries, (expires, self._order, expectation))
        if rank.speaks and rank.expecting > bound:
            while rank.expecting > bound:
                self._give_up(rank.expected[0])
                self._void += 1
            if self._void > len(self._expiries) // 2 + 64:
                self._expiries = [entry for entry in self._expiries if entry[2].hashes]
                heapq.heapify(self._expiries)
                self._void = 0
            named = as_array([each for each in named if each in rank.blocks])
        self._know(rank, named)
        while self._expiring > 4 * self._max_blocks * len(self._ranks):
            self._expire()

    # --- what a request finds ---------------------------------------------------------------------------------

    def runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield `(depth, ranks)`, deeper and deeper: the ranks that hold the first `depth` blocks.

        There is a pair at each depth where some of the ranks end, and there may be further pairs between, so that the
        caller can stop early. It ends when no rank holds the next block, and yields nothing if no rank holds the first.
        """
        self.catch_up()
        return self._holders.prefixes(as_array(hashes))

    def depth(self, slot: int, hashes: Sequence[int]) -> int:
        """Return how many blocks, from the first on, the rank in `slot` holds."""
        found = 0
        for depth, ranks in self.runs(hashes):
            if not ranks >> slot & 1:
                break
            found = depth
        return found

    def stated(self, slot: int, hashes: Sequence[int]) -> int:
        """Return how many blocks, from the first on, the rank in `slot` has stated to hold: `depth` without what is
        only expected."""
        depth = self.depth(slot, hashes)
        if not depth:
            return 0
        blocks, low = self._ranks[slot].blocks, 0  # a prompt is stored from its beginning on
        if blocks.get(hashes[depth - 1]) == CONFIRMED:
            return depth
        while low < depth:
            middle = (low + depth) // 2
            if blocks.get(hashes[middle]) == CONFIRMED:
                low = middle + 1
            else:
                depth = middle
        return low

    def validate(self, slots: Container[int] = range(1 << 16)) -> None:
        """Check that both directions agree, bounds hold, and no ranks but `slots` are known (for tests)."""
        self.catch_up()
        self.sessions.validate()
        holders: dict[int, int] = {}
        for slot, rank in self._ranks.items():
            assert rank.bit == 1 << slot
            assert slot in slots, slot
            assert len(rank.blocks) <= self._max_blocks
            assert rank.expecting == sum(len(each.hashes) for each in rank.expected)
            for block_hash, expires in rank.blocks.items():
                assert expires > self._now, "an expired entry"
                holders[block_hash] = holders.get(block_hash, 0) | rank.bit
        assert holders == self._holders.validate()
        assert self._void == sum(not each.hashes for _, _, each in self._expiries)
        assert self._expiring == sum(len(each.hashes) for _, _, each in self._expiries)

    # --- inside -----------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Remove the expectation that ends first."""
        expectation = heapq.heappop(self._expiries)[2]
        self._void -= not expectation.hashes
        self._give_up(expectation)

    def _give_up(self, expectation: _Expectation) -> None:
        rank, hashes, expires = expectation.rank, expectation.hashes, expectation.expires
        expectation.hashes = ()
        self._expiring -= len(hashes)
        rank.expecting -= len(hashes)
        while rank.expected and not rank.expected[0].hashes:
            rank.expected.popleft()
        self._drop(rank, [each for each in dict.fromkeys(hashes) if rank.blocks.get(each) == expires])

    def _rank(self, slot: int) -> _Rank:
        rank = self._ranks.get(slot)
        if rank is None:
            rank = self._ranks[slot] = _Rank(slot)
        return rank

    @staticmethod
    def _put(rank: _Rank, hashes: Sequence[int], expires: float) -> None:
        blocks = rank.blocks
        for block_hash in reversed(hashes):
            blocks[block_hash] = expires
            blocks.move_to_end(block_hash)

    def _touch(self, rank: _Rank, hashes: Sequence[int]) -> None:
        """Mark the rank's blocks that a request names as used. Without effect while there is room."""
        if 2 * len(rank.blocks) >= self._max_blocks:
            for block_hash in reversed(hashes):
                rank.blocks.move_to_end(block_hash)

    def _know(self, rank: _Rank, hashes: Iterable[int]) -> None:
        """Add all blocks to the rank's."""
        self._holders.add(rank.bit, as_array(hashes))
        if len(rank.blocks) > self._max_blocks:
            oldest = [*islice(rank.blocks, len(rank.blocks) - self._max_blocks)]
            self._drop(rank, oldest[::-1])  # in the order of their prompts

    def _drop(self, rank: _Rank, hashes: Sequence[int]) -> None:
        for block_hash in hashes:
            del rank.blocks[block_hash]
        self._holders.remove(rank.bit, as_array(hashes))
