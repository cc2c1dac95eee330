"""Fetching one prompt's KV blocks: which to ask for, when to ask again, when to give up. Pure; moves no bytes.

At most `window` blocks are on their way (credit), so neither side's queue grows. A damaged block is asked for again
by itself; when nothing arrives for `stall_s`, everything missing is. Both are bounded.
"""

from __future__ import annotations

import struct
from zlib import crc32

from bus.wire.messages import KvPull

STALL_S = 2.0
MAX_STALLS = 3
MAX_REPAIRS = 8
WINDOW_BYTES = 8 << 20
MAX_WINDOW = 64


def window_for(block_bytes: int) -> int:
    """Blocks in flight for one prompt: enough to keep a connection busy, not more than 8 MiB."""
    return max(2, min(MAX_WINDOW, WINDOW_BYTES // max(1, block_bytes)))


def block_crc32(room: int, attempt: int, index: int, data: bytes | memoryview) -> int:
    """The checksum of `KvBlock`: it covers the block's place as well as its bytes, so a mix-up shows."""
    return crc32(data, crc32(struct.pack("<QII", room, attempt, index)))


class Fetch:
    """`begin` once, `received` for each block, `tick` a few times a second; each returns what to ask for now."""

    def __init__(
        self, room: int, attempt: int, epoch: int, blocks: int, *, window: int, stall_s: float = STALL_S
    ) -> None:
        self.room, self.attempt, self.epoch = room, attempt, epoch
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

    def begin(self, now: float) -> list[KvPull]:
        self._moved_at = now
        return self._ask_more()

    def wants(self, index: int) -> bool:
        """Whether this block is awaited; anything else is a duplicate or unasked for."""
        return index in self._missing and not self.failure

    def received(self, index: int, intact: bool, now: float) -> list[KvPull]:
        """An awaited block came."""
        assert self.wants(index)
        if not intact:
            self.damaged += 1
            if self.damaged > MAX_REPAIRS:
                self.failure = f"{self.damaged} damaged blocks"
                return []
            return [self._pull(index, 1)]
        del self._missing[index]
        self._moved_at = now
        return self._ask_more() if len(self._missing) <= self.window // 2 else []

    def tick(self, now: float) -> list[KvPull]:
        if not self._missing or self.failure or now - self._moved_at < self.stall_s:
            return []
        self.stalls += 1
        if self.stalls > MAX_STALLS:
            self.failure = f"no block for {self.stall_s * self.stalls:g} s"
            return []
        self._moved_at = now
        pulls: list[KvPull] = []
        run: list[int] = []
        for index in sorted(self._missing):
            if run and index != run[-1] + 1:
                pulls.append(self._pull(run[0], len(run)))
                run = []
            run.append(index)
        pulls.append(self._pull(run[0], len(run)))
        return pulls

    def _ask_more(self) -> list[KvPull]:
        count = min(self.window - len(self._missing), self.blocks - self._next)
        if count <= 0:
            return []
        first, self._next = self._next, self._next + count
        self._missing.update(dict.fromkeys(range(first, self._next)))
        return [self._pull(first, count)]

    def _pull(self, first: int, count: int) -> KvPull:
        return KvPull(self.room, self.attempt, self.epoch, first, count)
