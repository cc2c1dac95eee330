"""KV caches on their way: the receiver's credit, repairs and stalls; what the sender answers and for how long.

M63 M65 M66 are held here: when a pull is answered and with what, the checksum, and what a failed room says.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import Counter

import pytest

from bus.actions import Send
from bus.wire.codes import Code
from bus.wire.hashing import block_crc32
from bus.wire.messages import KvDone, KvFail, KvMeta, KvPull, Params
from nodes.link.actions import SendBlock
from nodes.link.leg import Leg
from nodes.link.runner import FOR_EVER, RankFacts
from nodes.link.sender import HOLD_S, MAX_PULLERS, PARK_S, PULLER_SILENT_S, KvSender
from nodes.own.receiver import MAX_REPAIRS, MAX_STALLS, STALL_S, FetchFailed, KvReceiver, Span, window_for
from nodes.own.sequence import Sequence

FACTS = RankFacts(model="m", max_context=100, kv_capacity=40, block_tokens=4, kv_layout="lay")


def leg(attempt: int = 1) -> Leg:
    """A prefill leg of six tokens in room 5."""
    return Leg("r", attempt, "prefill", 0, 1, 5, array("i"), 6, 1, 0, 0, Params(), frozenset(), None)


def test_the_checksum_covers_place_and_bytes() -> None:
    data = b"some bytes of a block"
    assert block_crc32(9, 2, 3, data) == zlib.crc32(struct.pack("<QII", 9, 2, 3) + data)
    assert len({block_crc32(*place, data) for place in ((9, 2, 3), (9, 2, 4), (9, 3, 3), (8, 2, 3))}) == 4


class Fetch:
    """A receiver and one sequence whose blocks it asks for."""

    def __init__(self, blocks: int, *, window: int) -> None:
        self.receiver = KvReceiver(window=window)
        self.sequence = Sequence(1, range(blocks), 9)
        self.pulls = self.receiver.begin(self.sequence, range(blocks), 0.0)

    def wants(self, index: int) -> bool:
        return index in self.sequence.missing

    def received(self, index: int, intact: bool = True) -> list[Span]:
        return self.receiver.received(self.sequence, index, intact, 0.0)

    def tick(self, now: float) -> list[Span]:
        return self.receiver.tick(self.sequence, now)


def test_no_more_than_a_window_is_ever_on_its_way() -> None:
    fetch = Fetch(20, window=6)
    pulls = fetch.pulls
    on_the_way: list[int] = []
    asked = 0
    while fetch.sequence.missing:
        for first, count in pulls:
            on_the_way += range(first, first + count)
            asked += count
        assert len(on_the_way) <= 6
        pulls = fetch.received(on_the_way.pop(0))
    assert asked == 20
    assert on_the_way == []


def test_a_damaged_block_alone_is_asked_for_again_and_not_for_ever() -> None:
    fetch = Fetch(3, window=6)
    for _ in range(MAX_REPAIRS):
        assert fetch.received(1, intact=False) == [(1, 1)]
    with pytest.raises(FetchFailed, match="damaged"):
        fetch.received(1, intact=False)


def test_a_stall_asks_for_everything_missing_in_runs_then_fails() -> None:
    fetch = Fetch(6, window=6)
    fetch.received(2)
    assert fetch.tick(STALL_S - 0.01) == []
    now = STALL_S
    assert fetch.tick(now) == [(0, 2), (3, 3)]
    assert fetch.tick(now) == []
    for _ in range(MAX_STALLS - 1):
        now += STALL_S
        assert fetch.tick(now)
    with pytest.raises(FetchFailed, match="no block for"):
        fetch.tick(now + STALL_S)


def test_duplicates_and_strangers_are_not_wanted() -> None:
    fetch = Fetch(2, window=2)
    fetch.received(0)
    assert not fetch.wants(0)
    assert not fetch.wants(2)
    assert fetch.wants(1)


@pytest.mark.parametrize(("size", "window"), [(64, 64), (1 << 20, 8), (1 << 28, 2)])
def test_windows_hold_a_few_megabytes(size: int, window: int) -> None:
    assert window_for(size) == window


# --- sender -----------------------------------------------------------------------------------------------------

D = b"decode"


def pull(first: int = 0, count: int = 0, attempt: int = 1) -> KvPull:
    return KvPull(5, attempt, 1, first, count)


def held(sender: KvSender, leg: Leg, token: int, data: bytes, valid_s: float, now: float) -> list[Send]:
    leg.step("held")
    return sender.held(leg, token, data, valid_s, now)


def close(sender: KvSender, leg: Leg, code: Code, message: str = "") -> list[Send]:
    leg.end(code, message, 0.0)
    return sender.close(leg)


def test_a_pull_before_the_dispatch_is_answered_once_the_prompt_is_computed() -> None:
    sender = KvSender(FACTS, Counter())
    (early,) = sender.pull(D, pull(), 0.0)
    assert early.message == KvMeta(5, 1, 0, 0, 0, 4, "lay", ready=False)  # type: ignore[union-attr]
    prefill = leg()
    sender.open(prefill, 0.0)
    (told,) = held(sender, prefill, 33, b"", FOR_EVER, 1.0)
    assert told.peer == D
    assert told.message == KvMeta(5, 1, 6, 33, 2, 4, "lay")
    assert sender.pull(D, pull(1, 9), 1.0) == [SendBlock(D, prefill, 1, 2)]  # the rest of the prompt is 2 tokens


def test_a_pull_nobody_dispatches_fails_and_one_of_a_failed_room_at_once() -> None:
    sender = KvSender(FACTS, Counter())
    sender.pull(D, pull(), 0.0)
    assert sender.tick(PARK_S - 0.1) == ([], [])
    sender.pull(D, pull(), PARK_S - 0.1)
    _, (answer,) = sender.tick(PARK_S)
    assert answer.message.code == "unknown_room"  # type: ignore[attr-defined]
    prefill = leg()
    sender.open(prefill, 0.0)
    close(sender, prefill, "engine_failed")
    (answer,) = sender.pull(D, pull(), 0.0)  # type: ignore[assignment]
    assert answer.message == KvFail(5, 1, "engine_failed", "the prefill leg has ended")
    (answer,) = sender.pull(D, pull(attempt=2), 0.0)  # type: ignore[assignment]
    assert isinstance(answer.message, KvMeta)


def test_pullers_hear_of_a_failure_but_a_stranger_cannot_cause_one() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    sender.pull(D, pull(), 0.0)
    assert not sender.done(b"stranger", KvDone(5, 1, "cancelled"))
    assert not sender.done(D, KvDone(5, 2))
    assert not sender.done(D, KvDone(5, 1))  # nobody can have received what is not computed
    (fail,) = close(sender, prefill, "cancelled", "why")
    assert (fail.peer, fail.message) == (D, KvFail(5, 1, "cancelled", "why"))


def test_who_gives_up_is_not_told_that_it_failed() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    sender.pull(D, pull(), 0.0)
    assert sender.done(D, KvDone(5, 1, "kv_failed")) is prefill
    assert close(sender, prefill, "decode_failed") == []


def test_the_kv_cache_is_kept_for_pullers_that_live() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    assert sender.tick(10 * HOLD_S)[0] == []  # still computing
    held(sender, prefill, 33, b"", FOR_EVER, 0.0)
    assert sender.tick(HOLD_S - 1)[0] == []
    assert sender.tick(HOLD_S)[0] == [prefill]
    sender.pull(D, pull(), HOLD_S - 1)
    assert sender.tick(HOLD_S + PULLER_SILENT_S - 1.1)[0] == []
    assert sender.tick(HOLD_S + PULLER_SILENT_S - 1)[0] == [prefill]


def test_another_attempt_is_told_which_one_is_here() -> None:
    sender = KvSender(FACTS, Counter())
    sender.open(leg(3), 0.0)
    for attempt in (1, 4):
        (answer,) = sender.pull(D, pull(attempt=attempt), 0.0)
        assert (answer.message.attempt, answer.message.ready) == (3, False)  # type: ignore[union-attr]


def test_pullers_of_one_room_are_bounded() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    for number in range(50):
        sender.pull(b"%d" % number, pull(), 0.0)
    assert len(held(sender, prefill, 3, b"", FOR_EVER, 0.0)) == MAX_PULLERS


def test_a_handle_goes_with_the_meta_and_its_time_runs_out() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    sender.pull(D, pull(), 0.0)
    (told,) = held(sender, prefill, 33, b"opaque", 30.0, 1.0)
    assert (told.frames, told.message.valid_s) == ((b"opaque",), 30.0)  # type: ignore[attr-defined]
    (again,) = sender.pull(D, pull(), 26.0)
    assert again.message.valid_s == 5.0  # type: ignore[union-attr]
    (late,) = sender.pull(b"another", pull(), 31.0)
    assert late.message == KvFail(5, 1, "kv_failed", "the KV cache is kept no longer")  # type: ignore[union-attr]
    assert sender.tick(31.0)[0] == [], "who asked in time may have it still"


def test_a_handle_that_nobody_asked_for_ends_when_it_lapses() -> None:
    sender = KvSender(FACTS, Counter())
    prefill = leg()
    sender.open(prefill, 0.0)
    held(sender, prefill, 33, b"opaque", 30.0, 0.0)
    assert sender.tick(29.9)[0] == []
    assert sender.tick(30.0)[0] == [prefill]


@pytest.mark.parametrize("second", ["before the prompt is computed", "after"])
def test_an_engines_own_handle_is_given_to_one_puller_alone(second: str) -> None:
    """M81: it may have fetched the KV cache, which frees it, and died before it could say so."""
    sender, prefill = KvSender(FACTS, Counter()), leg()
    sender.open(prefill, 0.0)
    sender.pull(D, pull(), 0.0)
    if second != "after":
        sender.pull(b"other", pull(), 0.1)
    answers = held(sender, prefill, 3, b"handle", 30.0, 1.0)
    if second == "after":
        answers += sender.pull(b"other", pull(), 2.0)
    told, refused = answers
    assert (told.peer, type(told.message)) == (D, KvMeta)
    assert isinstance(refused.message, KvFail)
    assert (refused.peer, refused.message.code) == (b"other", "kv_failed")
    (again,) = sender.pull(D, pull(), 3.0)
    assert again.message.ready  # type: ignore[union-attr]
    assert not sender.done(b"other", KvDone(5, 1, "kv_failed")), "nor can it end the leg"


def test_blocks_over_the_bus_are_for_whoever_asks() -> None:
    sender, prefill = KvSender(FACTS, Counter()), leg()
    sender.open(prefill, 0.0)
    sender.pull(D, pull(), 0.0)
    sender.pull(b"other", pull(), 0.0)
    assert {answer.peer for answer in held(sender, prefill, 3, b"", FOR_EVER, 1.0)} == {D, b"other"}
