"""Fetching KV blocks: credit, repair, stalls; and what an offer answers."""

from __future__ import annotations

import struct
import zlib

import pytest

from bus.wire.messages import KvDone, KvFail, KvMeta, KvPull
from nodes.link.sender import HOLD_S, MAX_PULLERS, PARK_S, PULLER_SILENT_S, Offers, SendBlock
from nodes.own.engines.base import EngineSpec
from nodes.own.fetch import MAX_REPAIRS, MAX_STALLS, STALL_S, Fetch, block_crc32, window_for

SPEC = EngineSpec("m", "lay", 100, 4, 10, 16, 50, ())


def ask(pulls: list[KvPull]) -> list[tuple[int, int]]:
    return [(pull.first, pull.count) for pull in pulls]


def test_the_checksum_covers_place_and_bytes() -> None:
    data = b"some bytes of a block"
    assert block_crc32(9, 2, 3, data) == zlib.crc32(struct.pack("<QII", 9, 2, 3) + data)
    assert len({block_crc32(*place, data) for place in ((9, 2, 3), (9, 2, 4), (9, 3, 3), (8, 2, 3))}) == 4


def test_no_more_than_a_window_is_ever_on_its_way() -> None:
    fetch = Fetch(1, 1, 7, 20, window=6)
    pulls = fetch.begin(0.0)
    on_the_way: list[int] = []
    asked = 0
    while not fetch.complete:
        for pull in pulls:
            assert (pull.room, pull.attempt, pull.epoch) == (1, 1, 7)
            on_the_way += range(pull.first, pull.first + pull.count)
            asked += pull.count
        assert len(on_the_way) <= 6
        pulls = fetch.received(on_the_way.pop(0), True, 0.0)
    assert asked == 20
    assert on_the_way == []


def test_a_damaged_block_alone_is_asked_for_again_and_not_for_ever() -> None:
    fetch = Fetch(1, 1, 7, 3, window=6)
    fetch.begin(0.0)
    for _ in range(MAX_REPAIRS):
        assert ask(fetch.received(1, False, 0.0)) == [(1, 1)]
        assert not fetch.failure
    assert fetch.received(1, False, 0.0) == []
    assert "damaged" in fetch.failure
    assert not fetch.wants(1)


def test_a_stall_asks_for_everything_missing_in_runs_then_fails() -> None:
    fetch = Fetch(1, 1, 7, 6, window=6)
    fetch.begin(0.0)
    fetch.received(2, True, 0.0)
    assert fetch.tick(STALL_S - 0.01) == []
    now = STALL_S
    assert ask(fetch.tick(now)) == [(0, 2), (3, 3)]
    assert fetch.tick(now) == []
    for _ in range(MAX_STALLS - 1):
        now += STALL_S
        assert fetch.tick(now)
    assert fetch.tick(now + STALL_S) == []
    assert fetch.failure


def test_duplicates_and_strangers_are_not_wanted() -> None:
    fetch = Fetch(1, 1, 7, 2, window=2)
    fetch.begin(0.0)
    fetch.received(0, True, 0.0)
    assert not fetch.wants(0)
    assert not fetch.wants(2)
    assert fetch.wants(1)


@pytest.mark.parametrize(("size", "window"), [(64, 64), (1 << 20, 8), (1 << 28, 2)])
def test_windows_hold_a_few_megabytes(size: int, window: int) -> None:
    assert window_for(size) == window


# --- offers -----------------------------------------------------------------------------------------------------

D = b"decode"


def pull(first: int = 0, count: int = 0, attempt: int = 1) -> KvPull:
    return KvPull(5, attempt, 1, first, count)


def test_a_pull_before_the_dispatch_is_answered_once_the_prompt_is_computed() -> None:
    offers = Offers(SPEC, 1)
    (early,) = offers.pull(D, pull(), 0.0)
    assert early.message == KvMeta(5, 1, 0, 0, 0, 4, "lay", ready=False)  # type: ignore[union-attr]
    offers.open(5, 1, 6, 0.0)
    (told,) = offers.ready(5, [8, 9], 33, 1.0)
    assert told.peer == D
    assert told.message == KvMeta(5, 1, 6, 33, 2, 4, "lay")
    assert offers.pull(D, pull(1, 9), 1.0) == [SendBlock(D, 5, 1, 1, 2, 9)]  # the rest of the prompt is 2 tokens


def test_a_pull_nobody_dispatches_fails_and_one_of_a_failed_room_at_once() -> None:
    offers = Offers(SPEC, 1)
    offers.pull(D, pull(), 0.0)
    assert offers.tick(PARK_S - 0.1) == ([], [])
    offers.pull(D, pull(), PARK_S - 0.1)
    _, (answer,) = offers.tick(PARK_S)
    assert answer.message.code == "unknown_room"  # type: ignore[attr-defined]
    offers.open(5, 1, 6, 0.0)
    offers.close(5, "engine_failed")
    (answer,) = offers.pull(D, pull(), 0.0)  # type: ignore[assignment]
    assert answer.message == KvFail(5, 1, "engine_failed", "the prefill leg has ended")
    (answer,) = offers.pull(D, pull(attempt=2), 0.0)  # type: ignore[assignment]
    assert isinstance(answer.message, KvMeta)


def test_pullers_hear_of_a_failure_but_a_stranger_cannot_cause_one() -> None:
    offers = Offers(SPEC, 1)
    offers.open(5, 1, 6, 0.0)
    offers.pull(D, pull(), 0.0)
    assert not offers.done(b"stranger", KvDone(5, 1, "cancelled"))
    assert not offers.done(D, KvDone(5, 2))
    assert not offers.done(D, KvDone(5, 1))  # nobody can have fetched what is not computed
    (fail,) = offers.close(5, "cancelled", "why")
    assert (fail.peer, fail.message) == (D, KvFail(5, 1, "cancelled", "why"))


def test_who_gives_up_is_not_told_that_it_failed() -> None:
    offers = Offers(SPEC, 1)
    offers.open(5, 1, 6, 0.0)
    offers.pull(D, pull(), 0.0)
    assert offers.done(D, KvDone(5, 1, "kv_failed"))
    assert offers.close(5, "decode_failed") == []


def test_the_kv_cache_is_kept_for_pullers_that_live() -> None:
    offers = Offers(SPEC, 1)
    offers.open(5, 1, 6, 0.0)
    assert offers.tick(10 * HOLD_S)[0] == []  # still computing
    offers.ready(5, [8, 9], 33, 0.0)
    assert offers.tick(HOLD_S - 1)[0] == []
    assert offers.tick(HOLD_S)[0] == [5]
    offers.pull(D, pull(), HOLD_S - 1)
    assert offers.tick(HOLD_S + PULLER_SILENT_S - 1.1)[0] == []
    assert offers.tick(HOLD_S + PULLER_SILENT_S - 1)[0] == [5]


def test_another_attempt_is_told_which_one_is_here() -> None:
    offers = Offers(SPEC, 1)
    offers.open(5, 3, 6, 0.0)
    for attempt in (1, 4):
        (answer,) = offers.pull(D, pull(attempt=attempt), 0.0)
        assert (answer.message.attempt, answer.message.ready) == (3, False)  # type: ignore[union-attr]


def test_pullers_of_one_room_are_bounded() -> None:
    offers = Offers(SPEC, 1)
    offers.open(5, 1, 6, 0.0)
    for number in range(50):
        offers.pull(b"%d" % number, pull(), 0.0)
    assert len(offers.ready(5, [1, 2], 3, 0.0)) == MAX_PULLERS
