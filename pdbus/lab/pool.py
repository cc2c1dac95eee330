"""KV memory of a virtual rank, by runs: what `nodes.own.blocks` does block by block, at the cost of the new blocks.
The module owns the counts and the names; a test holds it to the same answers, events and order of eviction.

Blocks that were named one after the other, and are held by the same sequences, are one run, an array. A prompt is
compared with a run at once, in C, and a sequence holds runs and not blocks. So a turn of a long session costs by its
new blocks and by the runs on its way, not by its length. Blocks without a name are a number.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from bus.wire.hashing import ROOT, pack_hashes
from bus.wire.kv_names import Removed, Stored
from nodes.own.blocks import BlockPool


def as_array(hashes: Sequence[int]) -> array[int]:
    """Return the hashes as an array of unsigned 64-bit integers."""
    return hashes if isinstance(hashes, array) else array("Q", hashes)


def packed(hashes: array[int]) -> bytes:
    """Return the hashes as `pack_hashes` does."""
    return hashes.tobytes() if sys.byteorder == "little" else pack_hashes(hashes)


class _Run:
    __slots__ = ("hashes", "holds", "newer", "older")

    def __init__(self, hashes: array[int], holds: dict[int, int]) -> None:
        self.hashes = hashes
        self.holds = holds  # how often each hold has it, by number
        self.older = self.newer = self  # beside it among the runs that can be reclaimed


class _Hold:
    __slots__ = ("runs", "unnamed")

    def __init__(self, unnamed: int) -> None:
        self.runs: list[_Run] = []  # in the order of the prompt
        self.unnamed = unnamed  # blocks without a name


class RunPool(BlockPool):
    """A `BlockPool` without numbers for its blocks: a table is the number of a hold, in a list. `name` names blocks,
    not `commit`, and `take_changes` returns what `record_changes` recorded."""

    def __init__(self, blocks: int, block_tokens: int, *, record_changes: bool = False) -> None:
        super().__init__(0, block_tokens)
        self.blocks = blocks
        self._record_changes = record_changes
        self._changes: list[Stored | Removed] = []
        self._unused = blocks
        self._unheld = 0  # blocks of runs that no sequence holds
        self._run_of: dict[int, _Run] = {}  # by each hash in it
        self._holds: dict[int, _Hold] = {}  # by number
        self._numbers = 0
        self._ends = _Run(array("Q"), {})  # newer: the run that is reclaimed next; older: the last one

    @property
    def available(self) -> int:
        return self._unused + self._unheld

    @property
    def held(self) -> int:
        return self.blocks - self._unused - self._unheld

    @property
    def cached(self) -> int:
        return len(self._run_of)

    def names(self) -> list[int]:
        return list(self._run_of)

    def is_cached(self, block_hash: int) -> bool:
        return block_hash in self._run_of

    def match_prefix(self, hashes: Sequence[int]) -> list[int]:
        """Return a list as long as the longest cached prefix of `hashes`, in blocks."""
        return [0] * self._match(as_array(hashes))[0]

    def cached_tokens(self, hashes: Sequence[int]) -> int:
        """Return the tokens of the longest cached prefix of `hashes`."""
        return self._match(as_array(hashes))[0] * self.block_tokens

    def take(self, count: int, hashes: Sequence[int] = ()) -> tuple[list[int], int] | None:
        wanted = as_array(hashes[:count])
        shared, revived = self._match(wanted)
        if count - shared > self.available - revived:
            return None
        self._numbers += 1
        number, hold = self._numbers, _Hold(count - shared)
        self._holds[number] = hold
        at = 0
        while at < shared:
            run, begin, length = self._piece(wanted, at, shared)
            run = self._cut(run, begin, begin + length)
            if not run.holds:
                self._unlink(run)
                self._unheld -= length
            run.holds[number] = run.holds.get(number, 0) + 1
            hold.runs.append(run)
            at += length
        self._reclaim(count - shared)
        return [number], shared

    def name(self, table: Sequence[int], hashes: Sequence[int], start: int, stop: int) -> None:
        """Give the held blocks from `start` to `stop` of a prompt, which are full now, their names `hashes[start:stop]`
        for the cache. A second copy of a known prefix stays without a name."""
        (number,) = table
        hold, run_of = self._holds[number], self._run_of
        own = {number: 1}
        last = hold.runs[-1] if hold.runs else None  # the run that the next block may join
        if last is not None and last.holds != own:
            last = None
        parent = hashes[start - 1] if start else ROOT
        new = hashes[start:stop]
        if not new:
            return
        if len(set(new)) == len(new) and run_of.keys().isdisjoint(new):  # nearly always: all at once, in C
            if last is None or last.hashes[-1] != parent:
                last = _Run(array("Q"), own)
                hold.runs.append(last)
            last.hashes.extend(new)
            run_of.update(dict.fromkeys(new, last))
            hold.unnamed -= len(new)
            self._store(new)
            return
        stored: list[int] = []  # one after the other
        for block_hash in new:
            if block_hash in run_of:
                self._store(stored)
                stored = []
            else:
                if last is None or last.hashes[-1] != parent:
                    last = _Run(array("Q"), own.copy())
                    hold.runs.append(last)
                last.hashes.append(block_hash)
                run_of[block_hash] = last
                hold.unnamed -= 1
                stored.append(block_hash)
            parent = block_hash
        self._store(stored)

    def release(self, table: Sequence[int]) -> None:
        for number in table:
            hold = self._holds.pop(number)
            self._unused += hold.unnamed
            for run in reversed(hold.runs):
                run.holds[number] -= 1
                if not run.holds[number]:
                    del run.holds[number]
                    if not run.holds:
                        self._link(run, self._ends)
                        self._unheld += len(run.hashes)

    def take_changes(self) -> list[Stored | Removed]:
        """Return the changes of the cache since the last call, in order: what a rank's KV events say of them."""
        changes, self._changes = self._changes, []
        return changes

    def validate(self) -> None:
        runs = {id(run): run for run in self._run_of.values()}.values()
        assert all(self._run_of[block_hash] is run for run in runs for block_hash in run.hashes)
        assert sum(len(run.hashes) for run in runs) == len(self._run_of), "a block is in two runs"
        held: dict[int, list[int]] = {id(run): [] for run in runs}
        for number, hold in self._holds.items():
            for run in hold.runs:
                held[id(run)].append(number)
        for run in runs:
            assert sorted(held[id(run)]) == sorted(each for each, times in run.holds.items() for _ in range(times))
        unheld, run = [], self._ends.newer
        while run is not self._ends:
            assert run.newer.older is run
            unheld.append(run)
            run = run.newer
        assert set(map(id, unheld)) == {id(run) for run in runs if not run.holds}
        assert self._unheld == sum(len(run.hashes) for run in unheld)
        named = sum(len(run.hashes) for run in runs if run.holds)
        assert self.blocks == self.available + named + sum(hold.unnamed for hold in self._holds.values())

    # --- inside -----------------------------------------------------------------------------------------------

    def _store(self, hashes: Sequence[int]) -> None:
        if hashes and self._record_changes:
            self._changes.append(Stored(tuple(hashes)))

    def _match(self, hashes: array[int]) -> tuple[int, int]:
        """Return how many of the first blocks are cached, and how many of those no sequence holds."""
        at = unheld = 0
        while at < len(hashes) and hashes[at] in self._run_of:
            run, _, length = self._piece(hashes, at, len(hashes))
            at += length
            unheld += 0 if run.holds else length
        return at, unheld

    def _piece(self, hashes: array[int], at: int, end: int) -> tuple[_Run, int, int]:
        """Return the run of the block at `at`, its position there, and how many blocks before `end` are equal from
        there on."""
        run = self._run_of[hashes[at]]
        known = run.hashes
        begin = 0 if known[0] == hashes[at] else known.index(hashes[at])
        length = min(len(known) - begin, end - at)
        if known[begin : begin + length] == hashes[at : at + length]:
            return run, begin, length
        unlike = int.from_bytes(known[begin : begin + length].tobytes(), "little")
        unlike ^= int.from_bytes(hashes[at : at + length].tobytes(), "little")
        same = ((unlike & -unlike).bit_length() - 1) // 64  # the lowest bit that differs is in the first such block
        return run, begin, same

    def _cut(self, run: _Run, start: int, stop: int) -> _Run:
        """Cut the blocks from `start` to `stop` out as a run of their own."""
        if stop < len(run.hashes):
            run, _ = self._split(run, stop)
        if start:
            _, run = self._split(run, start)
        return run

    def _split(self, run: _Run, at: int) -> tuple[_Run, _Run]:
        """Split a run and return both parts; the shorter one is new, since each of its blocks must be looked up
        again."""
        if 2 * at < len(run.hashes):
            moved = first = _Run(run.hashes[:at], run.holds.copy())
            rest = run
            del run.hashes[:at]
        else:
            first = run
            moved = rest = _Run(run.hashes[at:], run.holds.copy())
            del run.hashes[at:]
        for block_hash in moved.hashes:
            self._run_of[block_hash] = moved
        for number in run.holds:
            hold = self._holds[number]
            hold.runs = [part for each in hold.runs for part in ((first, rest) if each is run else (each,))]
        if not run.holds:  # the end is reclaimed before the beginning
            self._link(moved, run if moved is rest else run.newer)
        return first, rest

    def _reclaim(self, count: int) -> None:
        """Use `count` blocks: unused ones, then the least recently used of those that no sequence holds, the end of a
        prefix first."""
        unused = min(count, self._unused)
        self._unused -= unused
        left = count - unused
        self._unheld -= left
        while left:
            run = self._ends.newer
            gone = run.hashes[-left:]
            for block_hash in gone:
                del self._run_of[block_hash]
            if self._record_changes:
                self._changes.append(Removed(tuple(reversed(gone))))
            del run.hashes[-left:]
            left -= len(gone)
            if not run.hashes:
                self._unlink(run)

    @staticmethod
    def _link(run: _Run, newer: _Run) -> None:
        """Put a run into the order of reclaiming, just before `newer`."""
        run.newer, run.older = newer, newer.older
        run.older.newer = newer.older = run

    @staticmethod
    def _unlink(run: _Run) -> None:
        run.older.newer, run.newer.older = run.newer, run.older
