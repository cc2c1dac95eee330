"""A controller that was started again, or has missed something, hears what is cached without its being stored anew."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from controller_world import U, unified

from bus.wire.kv_names import Stored
from bus.wire.messages import Ping
from controller import events
from controller.feeds.follower import Follower
from controller.feeds.nodes import NodeCaches
from nodes.link.rank import LinkedRank
from nodes.link.runner import CacheChanged
from nodes.own.blocks import BlockPool
from nodes.own.kv_events import MAX_BLOCKS, KvEventLog
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler

SPEC = SimpleNamespace(
    model="m", max_context=100, kv_capacity=100, block_tokens=4, vocab_size=9, eos_ids=(), layout="", params=(),
    block_bytes=4,
)  # fmt: skip


def caching(count: int) -> tuple[BlockPool, OwnRunner, list[Any]]:
    """A rank with `count` cached blocks, named 1 and up, and what its runner told of them."""
    pool = BlockPool(count, 4, record_events=True)
    runner = OwnRunner(
        SimpleNamespace(spec=SPEC), Scheduler(pool, max_running=4, chunk_tokens=4), KvEventLog("u", 0, 4)
    )  # type: ignore[arg-type]
    told: list[Any] = []
    runner.attach(told.append)
    taken = pool.take(count)
    assert taken is not None
    for number, block in enumerate(taken[0], 1):
        pool.commit(block, number, number - 1, (number,) * 4)
    pool.release(taken[0])
    runner.turn(0.0)
    return pool, runner, told


def test_what_is_cached_is_told_again_to_who_comes_late_a_message_a_tick() -> None:
    count = 2 * MAX_BLOCKS + 10
    pool, runner, told = caching(count)
    told.clear()
    runner.restate_cache()
    assert not told
    assert pool.take(3) is not None  # the three that are reclaimed first are cached no more
    for tick in range(5):
        runner.tick(0.05 * tick)
    late = Follower(0, counts := Counter[str](), replay=False, ours=True)
    changes = [
        change
        for event in told
        if isinstance(event, CacheChanged)
        for frames in event.messages
        for change in late.live(frames).changes
    ]
    assert len(changes) == 3
    names = [name for change in changes if isinstance(change, Stored) for name in change.hashes]
    assert names == list(range(1, count - 2))
    assert not counts
    told.clear()
    runner.tick(1.0)
    assert not told


class Followed:
    """A rank's KV events, as a controller by caches gets them, and the pings that it sends the rank."""

    def __init__(self) -> None:
        self.world = unified(U[0], unified_method="cache_aware")
        self.caches = NodeCaches(self.world.core.members.known, self.world.core.counts)
        self.index = self.world.core.prefixes["unified"]

    def take(self, told: list[Any]) -> None:
        for frames in [frames for event in told for frames in event.messages]:
            self.world.feed(events.CacheChanged(*self.caches.received(frames)))
        told.clear()

    def asked(self) -> int:
        """How many of the pings of two seconds ask for it."""
        before = len(self.world.sent(Ping))
        self.world.pass_time(2.1, alive=[U[0]])
        return sum(ping.restate for ping in self.world.sent(Ping)[before:])


@pytest.mark.parametrize("missed", ["dropped", "unreadable"])
def test_after_a_hole_the_next_ping_asks_for_what_is_cached_and_all_of_it_is_known_again(missed: str) -> None:
    count = 3 * MAX_BLOCKS
    _, runner, told = caching(count)
    followed = Followed()
    assert followed.asked() == 0
    (event,) = told
    first, second, third = event.messages
    damaged = [first, (*second[:2], b"?"), third] if missed == "unreadable" else [first, third]
    followed.take([CacheChanged(damaged)])
    assert len(followed.index) == MAX_BLOCKS
    assert followed.asked() == 1
    told.clear()
    runner.restate_cache()
    for tick in range(4):
        runner.tick(0.05 * tick)
    followed.take(told)
    assert len(followed.index) == count
    assert followed.asked() == 0


def test_a_rank_that_comes_back_after_it_was_taken_for_dead_is_asked_likewise() -> None:
    _, _, told = caching(3)
    followed = Followed()
    followed.take(told)
    followed.world.pass_time(3.2)
    assert not len(followed.index)
    followed.world.join(U[0])
    assert followed.asked() == 1


def test_a_rank_that_is_asked_restates_what_it_can() -> None:
    asked: list[str] = []
    rank = SimpleNamespace(runner=SimpleNamespace(restate_cache=lambda: asked.append("runner")))
    LinkedRank.restate_cache(rank)  # type: ignore[arg-type]
    LinkedRank.restate_cache(SimpleNamespace(runner=None))  # type: ignore[arg-type]
    assert asked == ["runner"]
