"""The scheduler's rules, one by one; and the block hashes it shares prefixes by."""

from __future__ import annotations

import pytest
from retained import retained

from bus.wire.hashing import block_hashes, pack_hashes, root_of, token_bytes, tokens_of, unpack_hashes
from bus.wire.messages import Params
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import StepPlan, StepResult
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence


def scheduler(blocks: int = 16, **changes: int) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), **{"max_running": 4, "chunk_tokens": 8, **changes})


def run(s: Scheduler, token: int = 9) -> tuple[StepPlan, list[tuple[int, int, str]]]:
    """The plan, and `(id, new token, finish)` of what it gave."""
    plan = s.plan()
    assert plan is not None
    wanted = tuple((row.seq, token) for row in plan.rows if row.params is not None)
    outputs = s.complete(StepResult(plan.number, wanted, 0.5))
    return plan, [(sequence.id, sequence.output[-1], sequence.finish) for sequence in outputs]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.seq, row.start, len(row.tokens)) for row in plan.rows]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    s = scheduler()
    s.add(Sequence(1, [5] * 4, 10))
    s.add(Sequence(2, [6] * 19, 2))
    assert shape(run(s)[0]) == [(1, 0, 4), (2, 0, 4)]
    assert shape(run(s)[0]) == [(1, 4, 1), (2, 4, 7)]
    assert shape(run(s)[0]) == [(1, 5, 1), (2, 11, 7)]
    plan, outputs = run(s)
    assert shape(plan) == [(1, 6, 1), (2, 18, 1)]
    assert plan.rows[1].params is not None
    assert outputs == [(1, 9, ""), (2, 9, "")]
    assert (s.step, s.busy_us_total) == (4, 2_000_000)


def test_first_come_first_served_within_a_priority_without_overtaking() -> None:
    s = scheduler(blocks=4)
    s.add(Sequence(1, range(8), 1, hashes=[]))
    s.add(Sequence(2, range(12), 1, hashes=[]))  # needs 3 blocks, 2 are left
    s.add(Sequence(3, range(4), 1, hashes=[]))  # would fit, but must not overtake
    s.add(Sequence(4, range(4), 1, hashes=[], priority=1))
    assert shape(run(s)[0]) == [(4, 0, 4), (1, 0, 4)]
    assert s.waiting == 2
    run(s)
    assert shape(run(s)[0]) == [(2, 0, 8)]
    assert s.sequence(3).phase is Phase.PROMPT


def test_the_last_token_needs_no_kv() -> None:
    s = scheduler(blocks=2)
    s.add(Sequence(1, range(8), 1, hashes=[]))
    with pytest.raises(ValueError, match="9 tokens exceed"):
        s.add(Sequence(2, range(8), 2, hashes=[]))


def test_stop_tokens_end_a_sequence() -> None:
    s = scheduler()
    s.add(Sequence(1, [5], 10, stop_ids=frozenset({7})))
    assert run(s, token=6)[1] == [(1, 6, "")]
    assert run(s, token=7)[1] == [(1, 7, "stop")]
    assert len(s) == 0
    assert s.pool.held == 0


def test_a_damaged_sequence_fails_and_those_beside_it_go_on() -> None:
    s = scheduler()
    s.add(Sequence(1, [5] * 4, 10))
    s.add(Sequence(2, [6] * 4, 10))
    plan, _ = run(s)
    assert len(plan.rows) == 2
    plan = s.plan()
    assert plan is not None
    failed, going = s.complete(StepResult(plan.number, ((2, 9),), 0.5, damaged=(1,)))
    assert (failed.id, failed.finish, failed.output) == (1, "failed", [9])
    assert (going.id, going.finish, going.output) == (2, "", [9, 9])
    assert len(s) == 1
    assert [row.seq for row in run(s)[0].rows] == [2]


def test_output_indices_count_on_from_the_offset() -> None:
    s = scheduler()
    s.add(Sequence(1, [5, 6], 3, offset=10))
    assert [run(s)[0].rows[0].output_index for _ in range(3)] == [10, 11, 12]


def test_a_cancel_during_the_step_frees_only_after_it() -> None:
    s = scheduler()
    s.add(Sequence(1, [5] * 4, 10))
    plan = s.plan()
    assert plan is not None
    assert s.cancel(1)
    assert s.pool.held > 0
    assert s.complete(StepResult(1, ((1, 9),), 0.0)) == []
    assert s.pool.held == 0


def test_waiting_tokens_leave_out_what_the_cache_will_save() -> None:
    s = scheduler()
    s.add(Sequence(1, list(range(9)), 1))
    assert s.waiting_tokens == 9
    run(s)
    run(s)
    s.add(Sequence(2, list(range(9)), 1))
    assert s.waiting_tokens == 1
    assert shape(run(s)[0]) == [(2, 8, 1)]
    assert (s.prompt_tokens_total, s.cached_tokens_total) == (18, 8)


def test_of_prompts_with_one_prefix_that_come_together_the_first_computes_it_for_all() -> None:
    s, prefix = scheduler(), list(range(12))
    for number in range(3):
        s.add(Sequence(number, [*prefix, 90 + number], 1))
    assert s.waiting_tokens == 13 + 1 + 1, "what the first will compute is not for the others to do"
    assert shape(run(s)[0]) == [(0, 0, 8)]
    assert [each.id for each in s.begun] == [0]
    plan, _ = run(s)
    assert shape(plan) == [(0, 8, 5), (1, 8, 3)], "the step has room for more, and the second looks anew"
    assert s.waiting_tokens == 2 + 1
    plan, _ = run(s)
    assert shape(plan) == [(1, 11, 2), (2, 12, 1)]
    assert (s.cached_tokens_total, s.computed_tokens_total) == (8 + 12, 13 + 5 + 1)
    assert [each.cached_tokens for each in s.begun] == [0, 8, 12]
    assert (s.waiting_tokens, s.pool.held) == (0, 0)


@pytest.mark.parametrize("clients", ["a", "ab"])
def test_a_step_looks_into_the_cache_for_the_prompts_that_it_computes(clients: str) -> None:
    class Pool(BlockPool):
        looked = 0

        def is_cached(self, block_hash: int) -> bool:
            self.looked += 1
            return super().is_cached(block_hash)

    pool = Pool(256, 4)
    s = Scheduler(pool, max_running=32, chunk_tokens=8)
    for number in range(32):
        sequence = Sequence(number, [100 + number] * 20, 1)
        sequence.client = clients[number % len(clients)]
        s.add(sequence)
    run(s)
    before = pool.looked
    for _ in range(4):
        run(s)
    assert pool.looked - before <= 4 * 3, "28 others wait"


def test_what_a_cancelled_prompt_would_have_computed_the_next_one_does() -> None:
    s, prefix = scheduler(), list(range(12))
    s.add(Sequence(1, [*prefix, 90], 1))
    s.add(Sequence(2, [*prefix, 91], 1))
    s.cancel(1)
    assert shape(run(s)[0]) == [(2, 0, 8)]
    assert s.waiting_tokens == 13 - 8
    s.add(Sequence(3, [*prefix, 92], 1))
    assert s.waiting_tokens == 5 + 5, "it cannot know that of 2, which came when 1 was there"
    s.validate()


def test_a_held_prefill_keeps_its_kv_and_no_slot() -> None:
    s = scheduler(max_running=1)
    s.add(Sequence(1, [5] * 6, 1, hold=True))
    assert run(s)[1] == [(1, 9, "length")]
    assert (s.running, s.kv_tokens, s.sequence(1).phase) == (0, 6, Phase.HELD)
    s.release(1)
    assert (s.kv_tokens, len(s)) == (0, 0)


def test_prompts_progress_however_many_decode() -> None:
    s = scheduler(blocks=256, max_running=12, chunk_tokens=8)
    for number in range(10):
        s.add(Sequence(number, [number], 50))
    run(s)
    run(s)
    s.add(Sequence(99, list(range(20)), 1))
    assert (99, 0, 4) in shape(run(s)[0])  # a block's worth, though ten decode


def test_cancelled_waiters_do_not_pile_up_behind_a_large_one() -> None:
    s = scheduler(blocks=4)
    s.add(Sequence(0, range(13), 1, hashes=[]))
    s.plan()
    s.add(Sequence(1, range(13), 1, hashes=[]))
    sizes = []
    for number in range(2, 2000):
        s.add(Sequence(number, [1], 1))
        assert s.cancel(number)
        assert not s.cancel(number), "it is forgotten"
        sizes.append(retained(s))
    assert max(sizes[1000:]) <= max(sizes[:1000])


def test_hashes_name_prefixes_not_blocks() -> None:
    a, b = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 9, 3, 4], 2)
    assert len(a) == 2
    assert a == block_hashes([1, 2, 3, 4, 77], 2)
    assert a[1] != b[1]
    assert list(unpack_hashes(pack_hashes(a) + b"rest")) == a
    assert list(tokens_of(token_bytes([1, -2, 2**31 - 1]))) == [1, -2, 2**31 - 1]


def test_two_salts_share_no_prefix() -> None:
    """M95: they share neither blocks of the prompt nor blocks of its output."""
    s = scheduler()
    cached = {}
    for number, salt in enumerate(("", "a", "b", "a", "")):
        s.add(Sequence(number, [5] * 9, 4, Params(cache_salt=salt)))
        sequence = s.sequence(number)
        while number in s:
            run(s)
        cached[number] = sequence.cached_tokens
        assert sequence.hashes == block_hashes([5] * 9 + sequence.output[:-1], 4, root_of(salt))
    assert cached == {0: 0, 1: 0, 2: 0, 3: 8, 4: 8}


def test_hashes_are_stable_across_releases() -> None:
    """Clients, controllers and nodes of different versions must agree on them."""
    assert block_hashes(list(range(8)), 4) == [0x52263D4E44FF75FF, 0x2B9D7A4FE5662052]


def test_prompts_count_as_admitted_when_they_begin_and_as_computed_step_by_step() -> None:
    """So that what waits is neither a miss of the cache nor work that was done."""
    s = scheduler(max_running=1)
    s.add(Sequence(1, [5] * 12, 1))
    s.add(Sequence(2, [5] * 12, 1))
    seen = []
    for _ in range(3):
        run(s)
        seen.append((s.admitted_tokens_total, s.computed_tokens_total, s.cached_tokens_total))
    assert seen == [(12, 8, 0), (12, 12, 0), (24, 16, 8)]
    assert s.prompt_tokens_total == 24
    s.add(Sequence(3, [6] * 12, 1))
    s.cancel(3)  # while it waits
    assert (s.prompt_tokens_total, s.admitted_tokens_total) == (36, 24)
