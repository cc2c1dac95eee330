"""The prefix index against a model that keeps plain sets: same hits whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefix_hits import hits, run_length

from controller.policies.prefix_index import CONFIRMED, PrefixIndex

SEATS = st.integers(0, 3)
HASHES = st.lists(st.integers(1, 12), max_size=6)
CONFIRM_S, EXPECT_S = 3.0, 10.0


class PrefixIndexModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=1_000, confirm_s=CONFIRM_S, expect_s=EXPECT_S)
        self.held: dict[int, dict[int, float]] = {}
        self.speaks: set[int] = set()
        self.now = 0.0

    @rule(seat=SEATS, hashes=HASHES)
    def stored(self, seat: int, hashes: list[int]) -> None:
        self.index.stored(seat, hashes)
        self.speaks.add(seat)
        self.held.setdefault(seat, {}).update(dict.fromkeys(hashes, CONFIRMED))

    @rule(seat=SEATS, hashes=HASHES)
    def expected(self, seat: int, hashes: list[int]) -> None:
        self.index.expected(seat, hashes)
        until = self.now + (CONFIRM_S if seat in self.speaks else EXPECT_S)
        mine = self.held.setdefault(seat, {})
        mine.update({h: until for h in hashes if mine.get(h) != CONFIRMED})

    @rule(seat=SEATS, hashes=HASHES)
    def removed(self, seat: int, hashes: list[int]) -> None:
        self.index.removed(seat, hashes)
        for block_hash in hashes:
            self.held.get(seat, {}).pop(block_hash, None)

    @rule(seat=SEATS)
    def forget(self, seat: int) -> None:
        self.index.forget(seat)
        self.held.pop(seat, None)
        self.speaks.discard(seat)

    @rule(seconds=st.floats(0, 6))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.index.advance(self.now)
        for mine in self.held.values():
            for block_hash in [h for h, until in mine.items() if until <= self.now]:
                del mine[block_hash]

    @rule(hashes=HASHES)
    def runs(self, hashes: list[int]) -> None:
        want = {seat: depth for seat, mine in self.held.items() if (depth := run_length(mine, hashes))}
        assert hits(self.index, hashes) == want

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert len(self.index) == sum(map(len, self.held.values()))


PrefixIndexModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixIndex = PrefixIndexModel.TestCase
