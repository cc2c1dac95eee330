"""The prefix index: hits, expectations and their end, bounds, ranks that vanish."""

from __future__ import annotations

import itertools

import pytest
from opcount import count
from prefix_hits import hits
from retained import retained

from controller.policies.holders import Holders
from controller.policies.prefix_index import PrefixIndex

A, B, C = 0, 1, 5  # slots


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
        if not start % 70:
            sizes.append(retained(index))
    index.validate()
    assert len(index) == 200
    assert max(sizes[70:]) <= max(sizes[:70]), "it grows no more"
    assert hits(index, range(9_990, 10_000)) == {A: 10, B: 10}
    assert hits(index, [0]) == {}


def test_what_is_stored_again_is_young_again() -> None:
    index = PrefixIndex(max_blocks=3)
    index.stored(A, [1, 2, 3])
    index.stored(A, [3])
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


PROMPT = list(range(100, 164))


def test_what_is_expected_is_worked_in_later_and_changes_no_result() -> None:
    """Its messages are sent before that."""
    prompt = list(range(1, 513))

    def script() -> None:
        index.expected(A, prompt)

    index = PrefixIndex()
    assert count(script).instructions < 60
    assert hits(index, prompt) == {A: 512}
    index.expected(B, prompt)
    index.forget(B)
    assert hits(index, prompt) == {A: 512}


def test_a_new_prompt_drops_the_oldest_from_a_full_index_as_a_whole_and_not_block_by_block() -> None:
    index = PrefixIndex(max_blocks=4096)
    firsts = itertools.count(1, 512)

    def script() -> None:
        first = next(firsts)
        index.expected(A, range(first, first + 512))
        index.catch_up()

    for _ in range(8):
        script()
    assert count(script).instructions < 50 * 512
    assert len(index) == 4096
    assert hits(index, range(1, 513)) == {}
    index.validate()


def run_count(index: PrefixIndex) -> int:
    index.catch_up()
    return len({id(run) for run in index._holders._runs.values()})


def test_what_is_told_block_by_block_is_one_run_once_a_prompt_names_it() -> None:
    index = PrefixIndex()
    for slot in (A, B):
        for block in PROMPT:
            index.stored(slot, [block])
    assert run_count(index) == len(PROMPT)
    index.expected(A, PROMPT)
    assert run_count(index) == 1
    assert hits(index, PROMPT) == {A: 64, B: 64}


def test_a_rank_that_gives_up_the_end_of_a_prompt_leaves_two_runs_to_the_others() -> None:
    for step in (1, 5):
        index = PrefixIndex()
        for slot in (A, B, C):
            index.stored(slot, PROMPT)
        for stop in range(len(PROMPT), 32, -step):
            index.removed(A, PROMPT[max(32, stop - step) : stop][::-1])
        assert run_count(index) == 2
        assert hits(index, PROMPT) == {A: 32, B: 64, C: 64}
        index.validate()


def test_a_hole_ends_a_hit_until_the_block_is_back() -> None:
    index = PrefixIndex()
    index.stored(A, PROMPT)
    index.stored(B, PROMPT)
    index.removed(A, [PROMPT[10]])
    assert hits(index, PROMPT) == {A: 10, B: 64}
    index.stored(A, [PROMPT[10]])
    assert hits(index, PROMPT) == {A: 64, B: 64}
    index.expected(B, PROMPT)
    assert run_count(index) == 1
    index.validate()


def test_prompts_that_fork_within_a_run_and_blocks_out_of_order() -> None:
    index = PrefixIndex()
    index.stored(A, PROMPT)
    assert hits(index, [*PROMPT[:37], 1, 2]) == {A: 37}
    assert hits(index, PROMPT[5:9]) == {A: 4}
    assert hits(index, [PROMPT[0], PROMPT[2], PROMPT[1]]) == {A: 3}
    index.stored(B, [*PROMPT[:37], 1, 2, 2, 1])
    assert hits(index, [*PROMPT[:37], 1, 2]) == {A: 37, B: 39}
    assert hits(index, PROMPT) == {A: 64, B: 37}
    index.validate()


def test_runs_are_bounded_and_a_long_prompt_has_several() -> None:
    index = PrefixIndex()
    index._holders = Holders(longest=10)
    for start in range(0, 64, 4):
        index.stored(A, PROMPT[start : start + 4])
    index.expected(A, PROMPT)
    assert run_count(index) == 8  # of 8: three of 4 would be too long
    index.stored(B, PROMPT)
    assert hits(index, PROMPT) == {A: 64, B: 64}
    index.validate()


def test_a_hash_that_is_none_is_refused_and_changes_nothing() -> None:
    index = PrefixIndex()
    for bad in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            index.stored(A, [1, bad])
    assert len(index) == 0
    index.validate()


def test_what_requests_hit_stays_and_of_a_prompt_its_end_goes_first() -> None:
    index = PrefixIndex(max_blocks=40)
    system = list(range(1, 9))
    index.stored(A, system)
    for number in range(100):
        own = list(range(1000 + 4 * number, 1004 + 4 * number))
        assert index.depth(A, system + own) == len(system), number
        index.expected(A, system + own)
        index.stored(A, own)
        index.validate()
    index.stored(A, range(5000, 5032))
    assert 0 < index.depth(A, system) < len(system)


def test_of_a_prompt_that_no_request_names_again_its_end_goes_first_too() -> None:
    index = PrefixIndex(max_blocks=40)
    prompt = list(range(1, 31))
    index.stored(A, prompt)
    index.stored(A, range(1000, 1020))
    assert index.depth(A, prompt) == 20


def test_no_request_pushes_out_what_a_rank_says() -> None:
    index = PrefixIndex(max_blocks=40)
    index.stored(A, [1, 2, 3])
    for first in range(100, 1000, 100):
        index.expected(A, range(first, first + 90))
        index.validate()
        assert index.depth(A, [1, 2, 3]) == 3
        assert index.depth(A, list(range(first, first + 90))) == 20
    index.expected(B, range(90))  # of which nothing else is known
    assert index.depth(B, list(range(90))) == 40


def test_what_is_given_up_early_leaves_nothing() -> None:
    index = PrefixIndex(max_blocks=40)
    index.stored(A, [1])
    sizes = []
    for first in range(100, 100_000, 100):
        index.expected(A, range(first, first + 20))
        sizes.append(retained(index))
    index.validate()
    assert max(sizes[500:]) <= max(sizes[:500])
    index.advance(1e9)
    index.validate()
