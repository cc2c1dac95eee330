"""One publisher's sequence numbers: what is in order, what is missing, and when it restarted. Pure; it moves no bytes.

There is no epoch on this wire, so a live number that does not rise means that the publisher restarted, and that all
that was known of it is wrong now. Skipped numbers (a hole) are asked for (`Replay`). A replay may end before it has
sent all of them; what is still missing is asked for again. When the publisher no longer has it, all that is known is
given up (`Void`), and the sequence starts again after the hole."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from msgspec import Struct

MAX_HELD = 4096  # live messages kept while a hole is being filled
ATTEMPTS = 3


class Deliver(Struct, frozen=True, gc=False):
    """Take this message: it is the next one in order."""

    payload: bytes


class Replay(Struct, frozen=True, gc=False):
    """Ask the publisher for everything from `start` on."""

    start: int


class Void(Struct, frozen=True, gc=False):
    """Forget what is known of this publisher's cache."""


Step: TypeAlias = Deliver | Replay | Void


class Sequencer:
    """The sequence of one publisher. Call `live` for each message of the stream, `replayed` for each answer of a
    replay; both return the steps to take.

    With `replay`, holes and the beginning of a stream joined late are asked for; without it, a hole gives Void at once
    and a stream begins where it is joined. `counts` gets one more for each new hole (`kv_gaps`) and restart
    (`kv_restarts`).
    """

    def __init__(self, counts: Counter[str], *, replay: bool) -> None:
        self._counts = counts
        self._replay = replay
        self._next: int | None = None
        self._last_live = -1
        self._held: dict[int, bytes] = {}
        self._asked_at: int | None = None  # the first missing number when the running replay was asked for
        self._attempts = 0

    @property
    def replaying(self) -> bool:
        """True while a replay was asked for and has not ended."""
        return self._asked_at is not None

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """Take message `seq` of the stream; return the steps in order: Void after a restart (`seq` is not above the
        last one), Deliver for what is now in order, Replay for a new hole unless a replay runs. With more than
        MAX_HELD held messages it gives the hole up: Void, then Deliver for what follows the last hole."""
        steps: list[Step] = []
        if self._next is None:
            self._next = 0 if self._replay else seq
        elif seq <= self._last_live:
            self._counts["kv_restarts"] += 1
            self._held.clear()
            self._asked_at, self._attempts = None, 0
            self._next = 0 if self._replay else seq
            steps.append(Void())
        self._last_live = seq
        if seq > self._next and not self._replay:
            self._counts["kv_gaps"] += 1
            self._next = seq
            steps.append(Void())
        self._held[seq] = payload
        steps += self._contiguous()
        if len(self._held) > MAX_HELD:
            return steps + self._give_up()
        if self._held and not self.replaying:
            self._counts["kv_gaps"] += 1
            steps.append(self._ask())
        return steps

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        """Take one answer of the running replay and return the steps. A `seq` of -1 ends the replay: a remaining hole
        is asked for again, or given up after ATTEMPTS replays in a row that brought nothing into order. Without a
        running replay there are no steps."""
        if not self.replaying:
            return []
        assert self._next is not None
        if seq >= 0:
            if self._next <= seq <= self._last_live and len(self._held) <= MAX_HELD:
                self._held.setdefault(seq, payload)
            return self._contiguous()
        asked_at, self._asked_at = self._asked_at, None
        if not self._held:
            self._attempts = 0
            return []
        self._attempts = self._attempts + 1 if self._next == asked_at else 1
        return [self._ask()] if self._attempts < ATTEMPTS else self._give_up()

    def unanswered(self) -> list[Step]:
        """End the running replay, because the caller has waited too long for its answers, as `replayed` with -1 does.
        Without one there are no steps."""
        return self.replayed(-1, b"") if self.replaying else []

    def _ask(self) -> Replay:
        assert self._next is not None
        self._asked_at = self._next
        return Replay(self._next)

    def _contiguous(self) -> list[Step]:
        assert self._next is not None
        steps: list[Step] = []
        while (payload := self._held.pop(self._next, None)) is not None:
            steps.append(Deliver(payload))
            self._next += 1
        return steps

    def _give_up(self) -> list[Step]:
        """Begin again after the last hole, because the missing messages will not come."""
        last = max(self._held)
        first = last
        while first - 1 in self._held:
            first -= 1
        self._next, self._asked_at, self._attempts = first, None, 0
        self._held = {seq: payload for seq, payload in self._held.items() if seq >= first}
        return [Void(), *self._contiguous()]
