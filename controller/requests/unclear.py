"""The requests that may have died with ranks, or may still run at ranks, that could not be asked. Pure bookkeeping,
bounded.

A connection that is gone says nothing about the process behind it. A request may have killed its rank; that is known
when the rank says hello again, as the same start or another one, or has not within a lease (the time after which a
silent rank is lost). And a leg that could not be cancelled ends when its rank comes back and states that it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from bus.wire.messages import Attempt, Rid, Room
from controller.rank import Rank

MAX_UNTOLD = 16_384


class Unclear:
    """The open cases. `at`: by rank, the requests that were lost with it while it is not known whether it died.
    `attempts`: by rid, the newest attempt that was given up without a message to its rank, and its room (None:
    unknown, or several)."""

    def __init__(self) -> None:
        self.at: dict[Rank, dict[Rid, int]] = {}
        self.attempts: OrderedDict[Rid, tuple[Attempt, Room | None]] = OrderedDict()

    def lost(self, rank: Rank, rid: Rid, offset: int) -> None:
        """Record that `rid` was lost with this rank. `offset` is its submit's: the output tokens that the client had
        when it submitted, not those that came since."""
        self.at.setdefault(rank, {})[rid] = offset

    def settle(self, rank: Rank) -> dict[Rid, int]:
        """Return the requests lost with `rank`, and their offsets, and forget them: it is known now whether it has
        died."""
        return self.at.pop(rank, {})

    def count(self, rid: Rid, offset: int) -> int:
        """Return how many ranks may have died with `rid` while its submit had this `offset`; a submit with more tokens
        counts from 0."""
        return sum(lost.get(rid) == offset for lost in self.at.values())

    def untold(self, rid: Rid, attempt: Attempt, room: Room | None) -> None:
        """Record that the cancel of this attempt reached no rank."""
        before, other = self.attempts.pop(rid, (0, room))
        self.attempts[rid] = max(attempt, before), room if room == other else None
        if len(self.attempts) > MAX_UNTOLD:
            self.attempts.popitem(last=False)

    def begins(self, rid: Rid, attempt: Attempt) -> None:
        """Note that this attempt is wanted: a client that submits the same request again keeps its number, so that an
        earlier giving-up of this or a higher one no longer counts."""
        if self.attempts.get(rid, (0,))[0] >= attempt:
            del self.attempts[rid]

    def given_up(self, running: Iterable[tuple[Rid, Attempt]]) -> list[tuple[Rid, Attempt, Room | None]]:
        """Return which of these running legs were given up, with their rooms (None: unknown); the caller cancels
        them. They stay recorded until `begins`."""
        return [
            (rid, attempt, known[1])
            for rid, attempt in running
            if (known := self.attempts.get(rid)) is not None and attempt <= known[0]
        ]
