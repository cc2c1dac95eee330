"""The open questions about ranks that were lost: which requests may have died with them, and which may still run there.
Pure bookkeeping, bounded.

A lost connection says nothing about the process behind it, nor does silence. A request may have killed its rank: that
is known once the rank is heard again (with the same epoch it lived on, with another one it was started again), or once
it has said nothing for a lease more. And a leg whose cancel did not reach its rank ends when the rank comes back and
says that the leg runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from bus.wire.messages import Attempt, Rid, Room
from controller.rank import Rank

MAX_UNTOLD = 16_384


class Unclear:
    """The open cases. `at`: by rank, the requests that were lost with it while it is not known whether it died (a
    lease at most), each with the offset at which that counts, and the attempt (0: a token may have come since).
    `attempts`: by rid, the newest attempt that was given up without a message to its rank, and its room (None: unknown,
    or several); of more than `MAX_UNTOLD` the oldest is dropped."""

    def __init__(self) -> None:
        self.at: dict[Rank, dict[Rid, tuple[int, Attempt]]] = {}
        self.attempts: OrderedDict[Rid, tuple[Attempt, Room | None]] = OrderedDict()

    def lost(self, rank: Rank, rid: Rid, offset: int, attempt: Attempt) -> None:
        """Record that this attempt of `rid` was lost with this rank. `offset` is its submit's: the output tokens that
        the client had when it submitted, not those that came since."""
        self.passed(rid, attempt)
        self.at.setdefault(rank, {})[rid] = offset, attempt

    def passed(self, rid: Rid, attempt: Attempt) -> None:
        """Note that the losses of `rid` before this attempt are not its last: it was lost again, or had a token."""
        for lost in self.at.values():
            if rid in lost and lost[rid][1] < attempt:
                lost[rid] = lost[rid][0], 0

    def resumes(self, rid: Rid, offset: int) -> None:
        """Note that a client with `offset` output tokens submits `rid`: these came before the last loss, which
        therefore counts from now on for this offset."""
        for lost in self.at.values():
            if rid in lost and lost[rid][1] and lost[rid][0] < offset:
                lost[rid] = offset, 0

    def settle(self, rank: Rank) -> dict[Rid, tuple[int, Attempt]]:
        """Return the requests lost with `rank`, as in `at`, and forget them: it is known now whether it has died."""
        return self.at.pop(rank, {})

    def count(self, rid: Rid, offset: int, known: Iterable[Hashable] = ()) -> int:
        """Return how many processes besides those `known` (`Rank.process`) may have died with the request `rid`,
        counting only losses with exactly this `offset`: a request that has got more tokens since did not kill them."""
        may_have = {rank.process for rank, lost in self.at.items() if rid in lost and lost[rid][0] == offset}
        return len(may_have.difference(known))

    def untold(self, rid: Rid, attempt: Attempt, room: Room | None) -> None:
        """Record that the cancel of this attempt reached no rank."""
        before, other = self.attempts.pop(rid, (0, room))
        self.attempts[rid] = max(attempt, before), room if room == other else None
        if len(self.attempts) > MAX_UNTOLD:
            self.attempts.popitem(last=False)

    def begins(self, rid: Rid, attempt: Attempt) -> None:
        """Note that this attempt of `rid` is wanted now, and forget that it, or a later one, was given up before. (A
        client that submits the same request again uses the same attempt number.)"""
        if self.attempts.get(rid, (0,))[0] >= attempt:
            del self.attempts[rid]

    def given_up(self, running: Iterable[tuple[Rid, Attempt]]) -> list[tuple[Rid, Attempt, Room | None]]:
        """Return those of these running legs whose attempt was given up, or is older than one that was, each with the
        recorded room (None: unknown); the caller cancels them. They stay recorded until `begins`."""
        return [
            (rid, attempt, known[1])
            for rid, attempt in running
            if (known := self.attempts.get(rid)) is not None and attempt <= known[0]
        ]
