"""Clients that share a rank: turns at admission and in a step, what is left to others, and places that nobody uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from legs_world import Rank, World

from nodes.link.core import UNCLAIMED, UNCLAIMED_MIN_S
from nodes.link.streams import ATTACH_GRACE_S, UNREAD_S
from nodes.own.admission import HERE_STEPS, RESERVE, SHARE_MIN, SHARES
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import StepResult
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence

CHUNK = 960
SHARE = CHUNK // SHARES


class Shared:
    """A scheduler with blocks of 4 tokens, and sequences of several clients in it."""

    def __init__(self, *, max_running: int = 16, blocks: int = 8_192, chunk_tokens: int = CHUNK) -> None:
        self.scheduler = Scheduler(BlockPool(blocks, 4), max_running=max_running, chunk_tokens=chunk_tokens)
        self.whose: dict[int, str] = {}

    def add(self, client: str, tokens: int = 4, *, hold: bool = True, **more: Any) -> int:
        number = len(self.whose) + 1
        self.whose[number] = client
        leg: Any = SimpleNamespace(client=client)
        more = {"max_tokens": 100} | more
        self.scheduler.add(Sequence(number, range(tokens), hold=hold, hashes=[], leg=leg, **more))
        return number

    def step(self) -> list[tuple[str, int]]:
        """One step: tokens by client, in the order of rows; prompts that are computed leave."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        wanted = tuple((row.seq, 9) for row in plan.rows if row.params is not None)
        for sequence in self.scheduler.complete(StepResult(plan.number, wanted, 0.0)):
            if sequence.hold:
                self.scheduler.release(sequence.id)
        self.scheduler.validate()
        return [(self.whose[row.seq], len(row.tokens)) for row in plan.rows]

    def running(self, client: str) -> int:
        live = (self.scheduler._sequences[seq] for seq in self.scheduler._sequences)
        return sum(s.client == client and s.phase not in (Phase.WAITING, Phase.PARKED) for s in live)


def test_a_newcomer_is_admitted_before_the_backlog_of_another_whatever_its_priority() -> None:
    shared = Shared(max_running=1)
    for _ in range(50):
        shared.add("mallory", priority=1000)
    assert shared.step() == [("mallory", 4)]
    shared.add("alice")
    shared.add("alice")
    assert [shared.step()[0][0] for _ in range(4)] == ["alice", "mallory", "alice", "mallory"]


def test_a_client_alone_has_its_order_and_whole_steps() -> None:
    shared = Shared(max_running=4)
    first, second = shared.add("alice", 2000), shared.add("alice", 10, priority=1)
    plan = shared.scheduler.plan()
    assert plan is not None
    assert [(row.seq, len(row.tokens)) for row in plan.rows] == [(second, 10), (first, CHUNK - 10)]


def test_a_step_that_a_newcomer_is_in_is_short_and_none_is_filled_by_one_client_meanwhile() -> None:
    shared = Shared()
    for _ in range(3):
        shared.add("mallory", 10_000)
    assert shared.step() == [("mallory", CHUNK)]  # alone
    shared.add("alice", 5)
    assert shared.step() == [("alice", 5), ("mallory", 5)]
    for _ in range(HERE_STEPS):
        assert sum(tokens for _, tokens in shared.step()) == SHARE
    assert shared.step() == [("mallory", CHUNK)]  # alone again


def test_steps_of_few_tokens_are_not_cut_to_pieces() -> None:
    shared = Shared(chunk_tokens=2 * SHARE_MIN)
    shared.add("alice", 1)
    shared.add("mallory", 10_000)
    shared.step()
    assert shared.step() == [("mallory", SHARE_MIN)]


def test_a_stream_of_tiny_prompts_does_not_keep_the_steps_of_others_short() -> None:
    shared = Shared(blocks=26_000)
    shared.add("alice", 100_000)
    computed = 0
    for _ in range(90):
        shared.add("mallory", 1)
        computed += sum(tokens for client, tokens in shared.step() if client == "alice")
    assert computed >= 90 * SHARE // 3, "nor to less than a third of its share"


def test_clients_with_much_to_compute_fill_a_step_together_in_turn() -> None:
    shared = Shared()
    names = [f"c{number}" for number in range(2 * SHARES)]
    for name in names:
        shared.add(name, 10 * SHARE)
    got = [shared.step() for _ in range(4)]
    assert [[tokens for _, tokens in step] for step in got] == [[SHARE] * SHARES] * 4
    assert sorted(client for step in got[:2] for client, _ in step) == sorted(names)
    assert sorted(client for step in got[2:] for client, _ in step) == sorted(names)


def test_nobody_takes_the_last_slots_while_others_are_here() -> None:
    shared = Shared(max_running=16)
    shared.add("alice", hold=False, max_tokens=2)
    for _ in range(40):
        shared.add("mallory", hold=False)
    shared.step()
    assert shared.running("mallory") == 16 - 16 // RESERVE
    shared.add("alice", hold=False)
    shared.step()
    assert shared.running("alice") == 1, "it need not wait for a slot"
    alone = Shared(max_running=16)
    for _ in range(40):
        alone.add("mallory", hold=False)
    alone.step()
    assert alone.running("mallory") == 16


def test_nor_the_last_of_the_memory() -> None:
    shared = Shared(max_running=64, blocks=64)  # 256 tokens
    shared.add("alice", hold=False, max_tokens=1)
    for _ in range(16):
        shared.add("mallory", 1, hold=False, max_tokens=28)  # 7 blocks each
    shared.step()
    assert shared.running("mallory") == 8, "7/8"
    shared.add("alice", 1, hold=False, max_tokens=32)
    shared.step()
    assert shared.running("alice") == 1


def test_a_newcomer_passes_a_large_request_that_waits_for_memory_and_nobody_else_does() -> None:
    shared = Shared(max_running=64, blocks=64)
    shared.add("mallory", 1, hold=False, max_tokens=128)
    shared.step()
    shared.add("mallory", 1, hold=False, max_tokens=200)  # more than is left
    shared.add("mallory", 1, hold=False, max_tokens=4)
    shared.step()
    assert shared.running("mallory") == 1, "one's own are not overtaken"
    for _ in range(3):
        shared.add("alice", 1, hold=False, max_tokens=20)
        shared.step()
    assert shared.running("alice") == 1, "who holds some waits as well: a large request has its turn"


# --- places that nobody uses ----------------------------------------------------------------------------------------


@pytest.fixture
def rank() -> Rank:
    return Rank(World(), "unified", "u", blocks=4096)


def begin(rank: Rank, rid: str, client: str, **more: Any) -> None:
    rank.dispatch(rid, [5, 6, 7], client=client, max_tokens=4000, bootstrap_room=None, **more)


def live(rank: Rank) -> set[str]:
    return {leg.rid for leg in rank.core.legs}


def test_what_nobody_came_to_read_goes_when_another_client_comes(rank: Rank) -> None:
    begin(rank, "left", "clients/mallory")
    begin(rank, "stays", "clients/mallory", continue_on_disconnect=True)
    begin(rank, "read", "clients/mallory")
    rank.read("read")
    rank.world.run(2 * ATTACH_GRACE_S)
    assert live(rank) == {"left", "stays", "read"}, "nobody wants its place"
    begin(rank, "new", "clients/alice")
    rank.world.run(0.2)
    assert live(rank) == {"stays", "read", "new"}
    assert rank.code("left") == "overloaded", "which a client that lives tries again"
    rank.world.run(ATTACH_GRACE_S)
    assert live(rank) == {"stays", "read"}, "nor has anybody come for the new one"


def test_or_when_one_waits_for_a_place(rank: Rank) -> None:
    for number in range(rank.scheduler.max_running):
        begin(rank, f"r{number}", "")
    rank.world.run(2 * ATTACH_GRACE_S)
    assert len(live(rank)) == rank.scheduler.max_running
    assert 2 * ATTACH_GRACE_S < UNREAD_S
    begin(rank, "waits", "")
    rank.world.run(0.2)
    assert live(rank) == {"waits"}


def test_of_a_key_that_has_many_they_go_sooner(rank: Rank) -> None:
    for number in range(10 * UNCLAIMED):
        begin(rank, f"m{number}", "clients/mallory")
    begin(rank, "a", "clients/alice")
    rank.world.run(UNCLAIMED_MIN_S - 0.1)
    assert len(live(rank)) == 10 * UNCLAIMED + 1
    rank.world.run(0.3)
    assert live(rank) == {"a"}, "which is late too, but has only this one"
