"""The prefix index against a model that keeps plain sets: same hits whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.prefix_index import CONFIRMED, PrefixIndex

KEYS = st.sampled_from([("p", n) for n in range(4)])
HASHES = st.lists(st.integers(1, 12), max_size=6)
CONFIRM_S, EXPECT_S = 3.0, 10.0


class PrefixIndexModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=1_000, confirm_s=CONFIRM_S, expect_s=EXPECT_S)
        self.held: dict[tuple[str, int], dict[int, float]] = {}
        self.speaks: set[tuple[str, int]] = set()
        self.now = 0.0

    @rule(key=KEYS, hashes=HASHES)
    def stored(self, key: tuple[str, int], hashes: list[int]) -> None:
        self.index.stored(key, hashes)
        self.speaks.add(key)
        self.held.setdefault(key, {}).update(dict.fromkeys(hashes, CONFIRMED))

    @rule(key=KEYS, hashes=HASHES)
    def expected(self, key: tuple[str, int], hashes: list[int]) -> None:
        self.index.expected(key, hashes)
        until = self.now + (CONFIRM_S if key in self.speaks else EXPECT_S)
        mine = self.held.setdefault(key, {})
        mine.update({h: until for h in hashes if mine.get(h) != CONFIRMED})

    @rule(key=KEYS, hashes=HASHES)
    def removed(self, key: tuple[str, int], hashes: list[int]) -> None:
        self.index.removed(key, hashes)
        for block_hash in hashes:
            self.held.get(key, {}).pop(block_hash, None)

    @rule(key=KEYS)
    def forget(self, key: tuple[str, int]) -> None:
        self.index.forget(key)
        self.held.pop(key, None)
        self.speaks.discard(key)

    @rule(seconds=st.floats(0, 6))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.index.advance(self.now)
        for mine in self.held.values():
            for block_hash in [h for h, until in mine.items() if until <= self.now]:
                del mine[block_hash]

    @rule(hashes=HASHES)
    def match(self, hashes: list[int]) -> None:
        want = {}
        for key, mine in self.held.items():
            depth = next((n for n, h in enumerate(hashes) if h not in mine), len(hashes))
            if depth:
                want[key] = depth
        assert self.index.match(hashes) == want

    @invariant()
    def consistent(self) -> None:
        self.index.validate()
        assert len(self.index) == sum(map(len, self.held.values()))


PrefixIndexModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixIndex = PrefixIndexModel.TestCase
