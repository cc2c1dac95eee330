"""Sequence numbers of a publisher: order, holes, replays, restarts; and against a simulated lossy publisher."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from retained import retained

from controller.feeds.sequence import ATTEMPTS, Deliver, Replay, Sequencer, Step, Void


def names(steps: list[Step]) -> list[object]:
    return [step.payload if isinstance(step, Deliver) else step for step in steps]


def live(sequencer: Sequencer, *seqs: int) -> list[object]:
    return [step for seq in seqs for step in names(sequencer.live(seq, b"%d" % seq))]


def replayed(sequencer: Sequencer, *seqs: int) -> list[object]:
    return [step for seq in seqs for step in names(sequencer.replayed(seq, b"%d" % seq))]


def test_in_order() -> None:
    assert live(Sequencer(Counter(), replay=True), 0, 1, 2) == [b"0", b"1", b"2"]


def test_a_stream_joined_late_without_replay_begins_where_it_is() -> None:
    assert live(Sequencer(Counter(), replay=False), 7, 8) == [b"7", b"8"]


def test_a_stream_joined_late_is_asked_for_its_beginning() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    assert live(sequencer, 2, 3) == [Replay(0)]
    assert replayed(sequencer, 0, 1, 2, 3, -1) == [b"0", b"1", b"2", b"3"]
    assert live(sequencer, 4) == [b"4"]


def test_a_hole_without_replay_voids() -> None:
    counts: Counter[str] = Counter()
    sequencer = Sequencer(counts, replay=False)
    assert live(sequencer, 0, 1, 3, 4) == [b"0", b"1", Void(), b"3", b"4"]
    assert counts == {"kv_gaps": 1}


def test_a_hole_is_filled_in_order_while_the_stream_goes_on() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    assert live(sequencer, 0, 3) == [b"0", Replay(1)]
    assert live(sequencer, 4) == []
    assert replayed(sequencer, 1) == [b"1"]
    assert replayed(sequencer, 2) == [b"2", b"3", b"4"]
    assert replayed(sequencer, 3, 4, -1) == []
    assert live(sequencer, 5) == [b"5"]


def test_the_end_of_a_replay_proves_nothing_a_hole_is_asked_for_again_and_given_up_in_the_end() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    live(sequencer, 0)
    asked = live(sequencer, 5)
    for _ in range(ATTEMPTS):
        assert asked == [Replay(1)]
        asked = replayed(sequencer, 3, 4, -1)  # 1 and 2 are gone from the publisher's buffer
    assert asked == [Void(), b"3", b"4", b"5"]
    assert live(sequencer, 6) == [b"6"]
    assert not sequencer.replaying


def test_progress_earns_further_attempts() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    live(sequencer, 9)
    for got in range(8):
        assert replayed(sequencer, got, -1) == [b"%d" % got, Replay(got + 1)]
    assert replayed(sequencer, 8, -1) == [b"8", b"9"]


def test_a_number_that_falls_is_a_restart() -> None:
    counts: Counter[str] = Counter()
    sequencer = Sequencer(counts, replay=False)
    live(sequencer, 0, 1, 2)
    assert live(sequencer, 0, 1) == [Void(), b"0", b"1"]
    assert live(sequencer, 1) == [Void(), b"1"]  # even the same number again: nobody publishes one twice
    assert counts == {"kv_restarts": 2}


def test_a_restart_while_a_hole_is_being_filled() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    live(sequencer, 0, 5)
    assert live(sequencer, 0) == [Void(), b"0"]
    assert replayed(sequencer, 1, -1) == []  # of the old start
    assert live(sequencer, 1) == [b"1"]


def test_what_is_held_is_bounded() -> None:
    sequencer = Sequencer(Counter(), replay=True)
    live(sequencer, 0)
    found = live(sequencer, *range(2, 5_000))
    assert found[0] == Replay(1)
    assert Void() in found
    assert found[-1] == b"4999"
    assert retained(sequencer) < 1_000


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_a_follower_never_believes_what_is_not_so(seed: int) -> None:
    """A publisher with a small replay buffer adds and removes items; the follower's set, applied from what is
    delivered, must be a prefix-consistent subset: right after a quiet exchange it equals the publisher's set unless it
    was voided, and then it holds nothing that the publisher removed before the void."""
    rng = random.Random(seed)
    sequencer = Sequencer(Counter(), replay=True)
    log: list[tuple[str, int]] = []
    theirs: set[int] = set()
    mine: set[int] = set()
    pending: list[int] = []

    def do(steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Void):
                mine.clear()
            elif isinstance(step, Replay):
                pending.append(step.start)
            else:
                kind, item = log[int(step.payload)]
                (mine.add if kind == "+" else mine.discard)(item)

    def answer() -> None:
        while pending:
            start = pending.pop()
            for seq in range(max(start, len(log) - 15), len(log)):
                if rng.random() < 0.95:
                    do(sequencer.replayed(seq, b"%d" % seq))
            do(sequencer.replayed(-1, b""))

    for _ in range(300):
        if rng.random() < 0.02:
            log.clear()
            theirs.clear()
        if theirs and rng.random() < 0.4:
            item = rng.choice(sorted(theirs))
            theirs.discard(item)
            log.append(("-", item))
        else:
            item = rng.randrange(20)
            theirs.add(item)
            log.append(("+", item))
        if rng.random() < 0.9:
            do(sequencer.live(len(log) - 1, b"%d" % (len(log) - 1)))
            if rng.random() < 0.7:
                answer()
            if not sequencer.replaying:
                assert mine <= theirs
