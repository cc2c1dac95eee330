"""The ranks that hold (cache) each block of prompts, kept by runs. This module owns the sets of holders; it knows no
times, bounds or loads.

Blocks that were named one after the other and have the same holders are one run, an array. A prompt is compared with it
in C, so a walk down a prompt goes by the runs on its way and not by its blocks. A change of holders cuts runs where
they become different; `add` joins neighbours that have become equal. The order in which hashes are named only decides
how long runs get: the result for a prompt is exact in any case.

A rank is a bit, a set of ranks an integer, a list of hashes an array of unsigned 64-bit integers (`as_array`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

LONGEST = 512  # blocks of a run: one in its middle is found by looking at each


def as_array(hashes: Iterable[int]) -> array[int]:
    """Return the hashes as an array. Raises OverflowError for a value that is no unsigned 64-bit integer."""
    return hashes if isinstance(hashes, array) and hashes.typecode == "Q" else array("Q", hashes)


class _Run:
    __slots__ = ("hashes", "holders", "next")

    def __init__(self, hashes: array[int], holders: int) -> None:
        self.hashes = hashes
        self.holders = holders  # of each of them
        self.next = 0  # the hash that followed it when runs were cut; may be out of date


class Holders:
    """The holders of all blocks. `add` and `remove` take O(blocks named), and O(`longest`) where they cut a run;
    `prefixes` O(runs on its way)."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._runs: dict[int, _Run] = {}  # by each hash in it

    def prefixes(self, hashes: array[int]) -> Iterator[tuple[int, int]]:
        """Yield `(depth, ranks that hold the first depth blocks)` with rising depth: where the ranks get fewer, at the
        end, and sometimes between, at least twice as deep each time. Nothing if no rank holds the first block."""
        find = self._runs.get
        depth, holders, look = 0, -1, 1
        while depth < len(hashes):
            run = find(hashes[depth])
            still = holders & run.holders if run is not None else 0
            if depth and (still != holders or depth >= look):
                yield depth, holders
                look = 2 * depth
            if run is None or not still:
                return
            holders = still
            length = len(run.hashes)
            if length == 1 or hashes[depth : depth + length] == run.hashes:
                depth += length
            else:
                depth += self._match(hashes, depth)[2]
        if depth:
            yield depth, holders

    def add(self, bit: int, hashes: array[int]) -> None:
        """Let `bit` hold all of `hashes`, some of which it may hold already."""
        at_end: _Run | None = None  # the run that ends with the block before
        start = 0
        while start < len(hashes):
            run, at, same = self._match(hashes, start)
            if run is None:
                run, same = self._new(hashes, start, bit)
            elif not run.holders & bit:
                run, at = self._cut(run, at, at + same), 0
                run.holders |= bit
            start += same
            ends = at + same == len(run.hashes)
            if at == 0 and at_end is not None:
                run = self._joined(at_end, run)
            at_end = run if ends else None

    def remove(self, bit: int, hashes: array[int]) -> None:
        """Let `bit` hold none of `hashes` any more. It must hold each of them, and they must all be different."""
        start = 0
        while start < len(hashes):
            run, at, same = self._match(hashes, start)
            assert run is not None
            if run.holders == bit and at + same == len(run.hashes):  # the end of a run that only this rank holds
                del run.hashes[at:]
                self._forget(hashes[start : start + same])
            else:
                run = self._cut(run, at, at + same)
                self._leave(bit, run)
                rest = self._runs.get(run.next)  # what the rank gave up just before: engines begin at the end
                if run.holders and rest is not None and rest.hashes[0] == run.next:
                    self._joined(run, rest)
            start += same

    def remove_all(self, bit: int, hashes: Iterable[int]) -> None:
        """Remove all hashes that `bit` holds; they may come in any order, but must be complete."""
        for block_hash in hashes:
            run = self._runs.get(block_hash)
            if run is not None and run.holders & bit:
                self._leave(bit, run)

    def validate(self) -> dict[int, int]:
        """Return the holders of each hash, and check that each is in one run, once (for tests)."""
        runs = {id(run): run for run in self._runs.values()}.values()
        assert all(self._runs[block_hash] is run for run in runs for block_hash in run.hashes)
        assert sum(len(run.hashes) for run in runs) == len(self._runs), "a hash twice in a run"
        assert all(len(run.hashes) <= self._longest for run in runs)
        return {block_hash: run.holders for block_hash, run in self._runs.items()}

    # --- inside -----------------------------------------------------------------------------------------------

    def _match(self, hashes: array[int], start: int) -> tuple[_Run | None, int, int]:
        """Return the run that has `hashes[start]`, the position in it, and how many blocks are equal from there on."""
        first = hashes[start]
        run = self._runs.get(first)
        if run is None:
            return None, 0, 0
        known = run.hashes
        if hashes[start : start + len(known)] == known:
            return run, 0, len(known)
        at = 0 if known[0] == first else len(known) - 1 if known[-1] == first else known.index(first)
        same, differ = 1, min(len(known) - at, len(hashes) - start) + 1
        while differ - same > 1:
            middle = (same + differ) // 2
            if hashes[start + same : start + middle] == known[at + same : at + middle]:
                same = middle
            else:
                differ = middle
        return run, at, same

    def _new(self, hashes: array[int], start: int, bit: int) -> tuple[_Run, int]:
        """Return a new run of `hashes` from `start` to the next that has a holder, and its length."""
        named, runs = hashes[start : start + self._longest], self._runs
        run = _Run(named, bit)
        entries = dict.fromkeys(named, run)
        if len(entries) == len(named) and runs.keys().isdisjoint(named):  # nearly always: all of it at once, in C
            runs.update(entries)
            return run, len(named)
        run.hashes = array("Q")
        append = run.hashes.append
        for block_hash in named:
            if block_hash in runs:
                break
            runs[block_hash] = run
            append(block_hash)
        return run, len(run.hashes)

    def _leave(self, bit: int, run: _Run) -> None:
        run.holders &= ~bit
        if not run.holders:
            self._forget(run.hashes)

    def _forget(self, hashes: array[int]) -> None:
        for block_hash in hashes:
            del self._runs[block_hash]

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
        first, rest = run, _Run(run.hashes[at:], run.holders)
        if 2 * at < len(run.hashes):
            first, rest = _Run(run.hashes[:at], run.holders), run
            del run.hashes[:at]
            self._moved(first.hashes, first)
        else:
            del run.hashes[at:]
            self._moved(rest.hashes, rest)
            rest.next = run.next
        first.next = rest.hashes[0]
        return first, rest

    def _joined(self, first: _Run, rest: _Run) -> _Run:
        """Return the joined run of two neighbours; `rest` where they stay two."""
        if first is rest or first.holders != rest.holders or len(first.hashes) + len(rest.hashes) > self._longest:
            return rest
        if len(first.hashes) < len(rest.hashes):
            moved = first.hashes
            rest.hashes = moved + rest.hashes
            return self._moved(moved, rest)
        first.next = rest.next
        first.hashes += rest.hashes
        return self._moved(rest.hashes, first)

    def _moved(self, hashes: array[int], run: _Run) -> _Run:
        for block_hash in hashes:
            self._runs[block_hash] = run
        return run
