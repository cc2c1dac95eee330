"""The prefix index against a model that keeps plain sets: same hits whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefix_hits import hits, run_length

from controller.policies.holders import Holders
from controller.policies.prefix_index import CONFIRMED, PrefixIndex

SEATS = st.integers(0, 3)
TREE = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 10, 11], [1, 2, 3, 4, 5, 12, 13], [14, 15]]  # prompts that fork
PARTS = st.builds(lambda prompt, start, stop, step: prompt[start:stop][::step],
                  st.sampled_from(TREE), st.integers(0, 4), st.integers(1, 8), st.sampled_from([1, 1, -1]))  # fmt: skip
HASHES = st.one_of(st.lists(st.integers(1, 15), max_size=6), PARTS)
CONFIRM_S, EXPECT_S = 3.0, 10.0


class PrefixIndexModel(RuleBasedStateMachine):
    max_blocks = 1_000
    longest_run = 512

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=self.max_blocks, confirm_s=CONFIRM_S, expect_s=EXPECT_S)
        self.index._holders = Holders(self.longest_run)
        self.held: dict[int, dict[int, float]] = {}
        self.guesses: dict[int, list[tuple[float, list[int]]]] = {}
        self.speaks: set[int] = set()
        self.now = 0.0

    @rule(slot=SEATS, hashes=HASHES)
    def stored(self, slot: int, hashes: list[int]) -> None:
        self.index.stored(slot, hashes)
        self.speaks.add(slot)
        self.hold(slot, hashes, CONFIRMED)

    @rule(slot=SEATS, hashes=HASHES)
    def expected(self, slot: int, hashes: list[int]) -> None:
        self.index.expected(slot, hashes)
        until = self.now + (CONFIRM_S if slot in self.speaks else EXPECT_S)
        mine = self.held.setdefault(slot, {})
        bound = max(1, self.max_blocks // 2) if slot in self.speaks else self.max_blocks
        hashes = hashes[:bound]
        fresh = [h for h in hashes if mine.get(h) not in (until, CONFIRMED)]
        self.put(slot, fresh, until)
        if 2 * len(mine) >= self.max_blocks:
            for each in reversed(hashes):
                mine[each] = mine.pop(each)
        guesses = self.guesses.setdefault(slot, [])
        guesses.append((until, fresh))
        while fresh and slot in self.speaks and sum(len(some) for _, some in guesses) > bound:
            expires, some = guesses.pop(0)
            for each in [h for h in some if mine.get(h) == expires]:
                mine.pop(each, None)
        self.cut(slot)

    def hold(self, slot: int, hashes: list[int], until: float) -> None:
        self.put(slot, hashes, until)
        self.cut(slot)

    def put(self, slot: int, hashes: list[int], until: float) -> None:
        """The last to be named are kept, in the order of a dict; of a prompt its beginning."""
        mine = self.held.setdefault(slot, {})
        for each in reversed(hashes):
            mine.pop(each, None)
            mine[each] = until

    def cut(self, slot: int) -> None:
        mine = self.held[slot]
        for each in list(mine)[: -self.max_blocks]:
            del mine[each]

    @rule(slot=SEATS, hashes=HASHES)
    def removed(self, slot: int, hashes: list[int]) -> None:
        self.index.removed(slot, hashes)
        for block_hash in hashes:
            self.held.get(slot, {}).pop(block_hash, None)

    @rule(slot=SEATS)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.held.pop(slot, None)
        self.guesses.pop(slot, None)
        self.speaks.discard(slot)

    @rule(seconds=st.floats(0, 6))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.index.advance(self.now)
        for mine in self.held.values():
            for block_hash in [h for h, until in mine.items() if until <= self.now]:
                del mine[block_hash]
        self.guesses = {slot: [g for g in some if g[0] > self.now] for slot, some in self.guesses.items()}

    @rule(hashes=HASHES)
    def runs(self, hashes: list[int]) -> None:
        want = {slot: depth for slot, mine in self.held.items() if (depth := run_length(mine, hashes))}
        assert hits(self.index, hashes) == want
        for slot in self.held:
            assert self.index.depth(slot, hashes) == want.get(slot, 0)
            self.stated(slot, hashes)

    def stated(self, slot: int, hashes: list[int]) -> None:
        """It ends between a block that the rank has stated and one that is only expected; where a prompt has several
        such places, at one of them."""
        mine, depth = self.held[slot], run_length(self.held[slot], hashes)
        found = self.index.stated(slot, hashes)
        assert found <= depth
        assert not found or mine[hashes[found - 1]] == CONFIRMED
        assert found == depth or mine[hashes[found]] != CONFIRMED

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert len(self.index) == sum(map(len, self.held.values()))


class CrampedPrefixIndexModel(PrefixIndexModel):
    """The oldest blocks go, and runs are too short for a prompt."""

    max_blocks = 5
    longest_run = 3


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
PrefixIndexModel.TestCase.settings = CrampedPrefixIndexModel.TestCase.settings = SETTINGS
TestPrefixIndex = PrefixIndexModel.TestCase
TestCrampedPrefixIndex = CrampedPrefixIndexModel.TestCase
