"""The lab's KV memory by runs, beside that of the nodes by blocks: the same answers, events and order of eviction."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bus.wire.hashing import ROOT
from bus.wire.kv_names import Removed, Stored
from nodes.own.blocks import BlockPool, BlockRemoved, BlockStored, KvEvent
from pdbus.lab.pool import RunPool


def of_a_tree(rng: random.Random) -> list[int]:
    """A prompt's hashes: a way down a tree, so that equal hashes have equal beginnings."""
    found, place = [], 1
    for _ in range(rng.randrange(14)):
        place = 2 * place + (rng.random() < 0.2)
        found.append(place)
    return found


def of_anything(rng: random.Random) -> list[int]:
    """Hashes as no correct trace has them: in any order, and several times."""
    return [rng.randrange(1, 10) for _ in range(rng.randrange(8))]


def events_of(changes: list[Stored | Removed]) -> list[KvEvent]:
    """Return the changes block by block, without parents."""
    return [
        BlockStored(block_hash, 0, ()) if isinstance(change, Stored) else BlockRemoved(block_hash)
        for change in changes
        for block_hash in change.hashes
    ]


@pytest.mark.parametrize("draw", [of_a_tree, of_anything])
@pytest.mark.parametrize("seed", range(15))
def test_it_does_what_the_nodes_memory_does(draw: object, seed: int) -> None:
    assert callable(draw)
    rng = random.Random(seed)
    blocks = rng.randrange(5, 45)
    theirs, ours = BlockPool(blocks, 16, record_events=True), RunPool(blocks, 16, record_changes=True)
    held: list[tuple[list[int], list[int], list[int]]] = []  # two tables, and a prompt's hashes
    named: list[int] = []  # how many of them have been given to the pool
    for _ in range(250):
        step = rng.random()
        if step < 0.4:
            hashes = draw(rng)
            count = len(hashes) + rng.randrange(3)
            one, other = theirs.take(count, hashes), ours.take(count, hashes)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one[1] == other[1]
                held.append((one[0], other[0], hashes))
                named.append(one[1])
        elif held:
            place = rng.randrange(len(held))
            table, number, hashes = held[place]
            if step < 0.75:
                stop = rng.randint(named[place], len(hashes))
                for index in range(named[place], stop):
                    theirs.commit(table[index], hashes[index], hashes[index - 1] if index else ROOT)
                ours.name(number, hashes, named[place], stop)
                named[place] = stop
            else:
                theirs.release(table)
                ours.release(number)
                del held[place], named[place]
        ours.validate()
        assert events_of(ours.take_changes()) == [
            replace(event, parent=0) if isinstance(event, BlockStored) else event for event in theirs.take_events()
        ]
        assert (ours.available, ours.held, ours.cached) == (theirs.available, theirs.held, theirs.cached)
        assert ours.names() == theirs.names()
        asked = draw(rng)
        assert len(ours.match_prefix(asked)) == len(theirs.match_prefix(tuple(asked)))


def test_a_long_session_is_one_run_and_its_turns_look_up_only_what_is_new() -> None:
    """A table that counts shows what a turn costs, without a clock."""

    class Counting(dict[int, object]):
        asked = 0

        def __getitem__(self, key: int) -> object:
            self.asked += 1
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            self.asked += 1
            return super().__contains__(key)

    pool = RunPool(5_000, 64)
    pool._run_of = counting = Counting()  # type: ignore[assignment]
    spent = []
    for turn in range(1, 41):
        hashes = list(range(1, 1 + 100 * turn))
        counting.asked = 0
        taken = pool.take(len(hashes), hashes)
        assert taken is not None
        assert taken[1] == 100 * (turn - 1)
        pool.name(taken[0], hashes, taken[1], len(hashes))
        pool.release(taken[0])
        spent.append(counting.asked)
    assert spent[-1] == spent[1] <= 110
    assert pool.cached == 4_000
