"""The block pool under any order of takes, commits and releases: no leak, no double use, no false prefix."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.wire.hashing import ROOT, block_hashes
from nodes.own.blocks import BlockPool, BlockStored

SIZE = 2


class PoolMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 12))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE, record_events=True)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the prefix it was committed as
        self.held: list[tuple[list[int], list[int], list[int]]] = []  # (table, prompt, hashes)
        self.names: dict[int, int] = {}  # block -> the last hash that it was committed as
        self.seen: dict[int, int] = {}  # the cache as a subscriber of the events knows it

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def take(self, prompt: list[int]) -> None:
        hashes = block_hashes(prompt, SIZE)
        count = self.pool.blocks_for(len(prompt))
        before = self.pool.available
        taken = self.pool.take(count, hashes)
        if taken is None:
            assert self.pool.available == before
            return
        table, shared = taken
        assert len(table) == len(set(table)) == count
        for index in range(shared):
            assert self.content[table[index]] == tuple(prompt[: (index + 1) * SIZE])
        in_use = {block for other, _, _ in self.held for block in other}
        assert not in_use & set(table[shared:]), "a fresh block already belonged to somebody"
        self.held.append((table, prompt, hashes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        table, prompt, hashes = data.draw(st.sampled_from(self.held))
        if not hashes:
            return
        index = data.draw(st.integers(0, len(hashes) - 1))
        block, name = table[index], hashes[index]
        parent = hashes[index - 1] if index else ROOT
        named = self.names.get(block) in self.seen  # a block keeps its name until it is removed
        self.pool.commit(block, name, parent, prompt[index * SIZE : (index + 1) * SIZE])
        if not named and name not in self.seen:
            self.names[block] = name
            self.content[block] = tuple(prompt[: (index + 1) * SIZE])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index)[0])

    @invariant()
    def consistent(self) -> None:
        self.pool.validate()
        assert self.pool.held == len({block for table, _, _ in self.held for block in table})

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in self.seen
                self.seen[event.block_hash] = event.parent
            else:
                del self.seen[event.block_hash]
        assert len(self.seen) == self.pool.cached
        blocks = {name: self.pool.match_prefix([name]) for name in self.seen}
        assert all(len(found) == 1 and self.names[found[0]] == name for name, found in blocks.items())

    def teardown(self) -> None:
        for table, _, _ in getattr(self, "held", []):
            self.pool.release(table)
        if hasattr(self, "pool"):
            self.pool.validate()
            assert self.pool.available == self.pool.blocks


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
