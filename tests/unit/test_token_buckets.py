"""Large answers are rationed by bytes, each peer's by itself; small ones never."""

from __future__ import annotations

from bus.runtime.token_buckets import BURST, LARGE, PEERS_MAX, PER_S, TokenBuckets


def test_a_peer_that_only_asks_gets_its_burst_and_then_its_rate() -> None:
    buckets, size = TokenBuckets(), BURST // 8
    got = sum(buckets.allows(b"greedy", size, 0.01 * turn) for turn in range(1000))
    assert 8 + int(9 * PER_S / size) <= got <= 8 + int(10 * PER_S / size) + 1
    assert buckets.allows(b"another", BURST, 10.0)


def test_small_answers_are_not_rationed() -> None:
    buckets = TokenBuckets()
    assert buckets.allows(b"peer", BURST, 0.0)
    assert not buckets.allows(b"peer", LARGE + 1, 0.0)
    assert all(buckets.allows(b"peer", LARGE, 0.0) for _ in range(10_000))


def test_other_things_are_rationed_likewise() -> None:
    handshakes = TokenBuckets(burst=3, per_s=2, free=0)
    assert [handshakes.allows("key", 1, 0.0) for _ in range(4)] == [True] * 3 + [False]
    assert [handshakes.allows("key", 1, 1.0) for _ in range(3)] == [True] * 2 + [False]
    assert handshakes.allows("another", 1, 1.0)


def test_what_is_remembered_is_bounded() -> None:
    buckets = TokenBuckets()
    for number in range(PEERS_MAX + 1):
        assert buckets.allows(b"%d" % number, BURST, 0.0)
    assert not buckets.allows(b"1", BURST, 0.0)
    assert buckets.allows(b"0", BURST, 0.0), "the first is forgotten"
