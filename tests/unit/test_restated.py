"""A controller that was started again hears what is cached, without anything being stored anew."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from bus.wire.kv_names import Stored
from controller.feeds.follower import Follower
from nodes.link.runner import CacheChanged
from nodes.own.blocks import BlockPool
from nodes.own.kv_events import MAX_BLOCKS, KvEventLog
from nodes.own.runner import OwnRunner
from nodes.own.scheduler import Scheduler

SPEC = SimpleNamespace(
    model="m", max_context=100, kv_capacity=100, block_tokens=4, vocab_size=9, eos_ids=(), layout="", params=(),
    block_bytes=4,
)  # fmt: skip


def test_what_is_cached_is_told_again_to_who_comes_late_a_message_a_tick() -> None:
    count = 2 * MAX_BLOCKS + 10
    pool = BlockPool(count, 4, record_events=True)
    runner = OwnRunner(
        SimpleNamespace(spec=SPEC), Scheduler(pool, max_running=4, chunk_tokens=4), KvEventLog("p", 0, 4)
    )  # type: ignore[arg-type]
    told: list[Any] = []
    runner.attach(told.append)
    taken = pool.take(count)
    assert taken is not None
    for number, block in enumerate(taken[0], 1):
        pool.commit(block, number, number - 1, (number,) * 4)
    pool.release(taken[0])
    runner.turn(0.0)
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
