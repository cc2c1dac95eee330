"""The receiver's side of KV transfer: which blocks of a prompt's KV cache to ask the prefill rank for, when to ask
again, and when to give up. Pure.

At most `window` blocks of a prompt are on their way (credit), so neither side's queue grows. A damaged block is asked
for again alone; when nothing arrives for `stall_s`, every missing block is asked for again. Both are bounded.
"""

from __future__ import annotations

from typing import TypeAlias

from nodes.own.sequence import Sequence

STALL_S = 2.0
MAX_STALLS = 3
MAX_REPAIRS = 8
WINDOW_BYTES = 8 << 20
MAX_WINDOW = 64

Span: TypeAlias = tuple[int, int]


class FetchFailed(Exception):
    """The fetch of a sequence has failed; the message says why. The runner then fails the leg."""


def window_for(block_bytes: int) -> int:
    """Return how many blocks of this size may be on their way for one prompt: enough to keep a connection busy, not
    more than 8 MiB (but at least 2)."""
    return max(2, min(MAX_WINDOW, WINDOW_BYTES // max(1, block_bytes)))


class KvReceiver:
    """The fetches of one rank. Its runner calls `begin` once for a sequence, `received` for each block, and `tick` a
    few times a second. Each returns the blocks to ask for now, as `(first block, count)`. The state of a fetch is kept
    in its sequence."""

    def __init__(self, *, window: int, stall_s: float = STALL_S) -> None:
        self.window = window
        self.stall_s = stall_s

    def begin(self, sequence: Sequence, blocks: range, now: float) -> list[Span]:
        """Start the fetch of these blocks of a sequence."""
        sequence.unasked = blocks
        sequence.fetch_began = sequence.moved_at = now
        return self._ask_more(sequence)

    def received(self, sequence: Sequence, index: int, intact: bool, now: float) -> list[Span]:
        """Record that block `index`, which is `missing`, came. The fetch is complete when none is missing. FetchFailed
        when too many were damaged."""
        assert index in sequence.missing
        if not intact:
            sequence.damaged += 1
            if sequence.damaged > MAX_REPAIRS:
                raise FetchFailed(f"{sequence.damaged} damaged blocks")
            return [(index, 1)]
        del sequence.missing[index]
        sequence.moved_at = now
        return self._ask_more(sequence) if len(sequence.missing) <= self.window // 2 else []

    def tick(self, sequence: Sequence, now: float) -> list[Span]:
        """Return what to ask for again, if nothing came for `stall_s`; FetchFailed when that happened too often."""
        if now - sequence.moved_at < self.stall_s:
            return []
        sequence.stalls += 1
        if sequence.stalls > MAX_STALLS:
            raise FetchFailed(f"no block for {self.stall_s * sequence.stalls:g} s")
        sequence.moved_at = now
        pulls: list[Span] = []
        run: list[int] = []
        for index in sorted(sequence.missing):
            if run and index != run[-1] + 1:
                pulls.append((run[0], len(run)))
                run = []
            run.append(index)
        pulls.append((run[0], len(run)))
        return pulls

    def _ask_more(self, sequence: Sequence) -> list[Span]:
        asked = sequence.unasked[: self.window - len(sequence.missing)]
        sequence.unasked = sequence.unasked[len(asked) :]
        sequence.missing.update(dict.fromkeys(asked))
        return [(asked.start, len(asked))] if asked else []
