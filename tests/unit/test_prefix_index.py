"""The prefix index: hits, expectations and their end, bounds, ranks that vanish."""

from __future__ import annotations

from prefix_hits import hits
from retained import retained

from controller.policies.prefix_index import PrefixIndex

A, B, C = 0, 1, 5  # seats


def test_a_hit_is_the_leading_run() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2, 3])
    index.stored(B, [1, 3])
    index.stored(C, [2, 3])
    assert hits(index, [1, 2, 3, 4]) == {A: 3, B: 1}
    assert hits(index, [2]) == {A: 1, C: 1}
    assert hits(index, [9, 1]) == {}
    assert hits(index, []) == {}


def test_removed_blocks_end_a_hit() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2, 3])
    index.removed(A, [2, 99])
    index.removed(B, [1])
    assert hits(index, [1, 2, 3]) == {A: 1}
    index.validate()


def test_a_rank_that_restarts_vanishes_at_once_and_its_seat_is_used_again() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2])
    index.stored(B, [1])
    index.expected(A, [3])
    index.forget(A)
    index.forget(A)
    assert hits(index, [1, 2]) == {B: 1}
    assert hits(index, [3]) == {}
    index.stored(C, [1])
    assert hits(index, [1]) == {B: 1, C: 1}
    index.advance(1e9)  # what the old A was expected to hold does not come back to life, nor hurt C
    index.validate()
    assert len(index) == 2


def test_expectations_end_unless_confirmed() -> None:
    index = PrefixIndex(confirm_s=10, expect_s=100)
    index.stored(A, [7])  # A publishes events, B does not
    index.expected(A, [1, 2])
    index.expected(B, [1, 2])
    index.stored(A, [1])
    index.advance(9.9)
    assert hits(index, [1, 2]) == {A: 2, B: 2}
    index.advance(10.0)
    assert hits(index, [1, 2]) == {A: 1, B: 2}
    index.advance(100.0)
    assert hits(index, [1, 2]) == {A: 1}
    index.validate()


def test_an_expectation_renewed_lasts_longer() -> None:
    index = PrefixIndex(expect_s=10)
    index.expected(A, [1])
    index.advance(6)
    index.expected(A, [1])
    index.advance(12)
    assert hits(index, [1]) == {A: 1}
    index.advance(16)
    assert hits(index, [1]) == {}


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex(max_blocks=100)
    sizes = []
    for start in range(0, 10_000, 10):
        index.stored(A, range(start, start + 10))
        index.expected(B, range(start, start + 10))
        sizes.append(retained(index))
    index.validate()
    assert len(index) == 200
    assert max(sizes[500:]) <= max(sizes[:500]), "it grows no more"
    assert hits(index, range(9_990, 10_000)) == {A: 10, B: 10}
    assert hits(index, [0]) == {}


def test_what_is_stored_again_is_young_again() -> None:
    index = PrefixIndex(max_blocks=3)
    index.stored(A, [1, 2, 3])
    index.stored(A, [1])
    index.stored(A, [4])
    assert [hits(index, [block]) for block in (1, 2, 3, 4)] == [{A: 1}, {}, {A: 1}, {A: 1}]


def test_repeated_expectations_do_not_pile_up() -> None:
    index = PrefixIndex(max_blocks=10)
    sizes = []
    for _ in range(1_000):
        index.expected(A, [1, 2, 3])
        sizes.append(retained(index))
    index.validate()
    assert max(sizes[500:]) <= max(sizes[:500])
    assert hits(index, [1, 2, 3]) == {A: 3}
