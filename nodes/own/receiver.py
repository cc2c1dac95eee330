"""The receiver's side of KV transfer: which blocks of one prompt to ask for, when again, when to give up. Pure.

At most `window` blocks are on their way (credit), so neither side's queue grows. A damaged block is asked for again
by itself; when nothing arrives for `stall_s`, everything missing is. Both are bounded.
"""

from __future__ import annotations

from typing import TypeAlias

STALL_S = 2.0
MAX_STALLS = 3
MAX_REPAIRS = 8
WINDOW_BYTES = 8 << 20
MAX_WINDOW = 64

Span: TypeAlias = tuple[int, int]


def window_for(block_bytes: int) -> int:
    """Blocks in flight for one prompt: enough to keep a connection busy, not more than 8 MiB."""
    return max(2, min(MAX_WINDOW, WINDOW_BYTES // max(1, block_bytes)))


class KvReceiver:
    """`begin` once, `received` for each block, `tick` a few times a second; each returns what to ask for now, as
    `(first block, count)`."""

    def __init__(self, blocks: int, *, window: int, stall_s: float = STALL_S) -> None:
        self.blocks = blocks
        self.window = window
        self.stall_s = stall_s
        self.failure = ""  # why it gave up
        self.damaged = 0
        self.stalls = 0
        self._missing: dict[int, None] = {}  # asked for, not received intact; in order of asking
        self._next = 0
        self._moved_at = 0.0

    @property
    def complete(self) -> bool:
        return self._next == self.blocks and not self._missing

    def begin(self, now: float) -> list[Span]:
        self._moved_at = now
        return self._ask_more()

    def wants(self, index: int) -> bool:
        """Whether this block is awaited; anything else is a duplicate or unasked for."""
        return index in self._missing and not self.failure

    def received(self, index: int, intact: bool, now: float) -> list[Span]:
        """An awaited block came."""
        assert self.wants(index)
        if not intact:
            self.damaged += 1
            if self.damaged > MAX_REPAIRS:
                self.failure = f"{self.damaged} damaged blocks"
                return []
            return [(index, 1)]
        del self._missing[index]
        self._moved_at = now
        return self._ask_more() if len(self._missing) <= self.window // 2 else []

    def tick(self, now: float) -> list[Span]:
        if not self._missing or self.failure or now - self._moved_at < self.stall_s:
            return []
        self.stalls += 1
        if self.stalls > MAX_STALLS:
            self.failure = f"no block for {self.stall_s * self.stalls:g} s"
            return []
        self._moved_at = now
        pulls: list[Span] = []
        run: list[int] = []
        for index in sorted(self._missing):
            if run and index != run[-1] + 1:
                pulls.append((run[0], len(run)))
                run = []
            run.append(index)
        pulls.append((run[0], len(run)))
        return pulls

    def _ask_more(self) -> list[Span]:
        count = min(self.window - len(self._missing), self.blocks - self._next)
        if count <= 0:
            return []
        first, self._next = self._next, self._next + count
        self._missing.update(dict.fromkeys(range(first, self._next)))
        return [(first, count)]
