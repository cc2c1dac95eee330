"""What nodes still run of requests that a former controller dispatched, so that a resubmit is not run twice.

Filled by the first hello of each start of a rank, emptied by resubmits, cancels, time, and the loss of ranks. Owns that
map only.
"""

from __future__ import annotations

from typing import TypeAlias

from bus.wire.messages import Attempt, Rid, Role
from controller.load.rank import RankLoad

KEPT_S = 60.0
Held: TypeAlias = dict[Role, tuple[RankLoad, Attempt]]  # who runs the legs of one request


class Adoption:
    """By rid and role: the rank that runs it and the attempt."""

    def __init__(self) -> None:
        self._held: dict[Rid, Held] = {}
        self._offers: dict[RankLoad, tuple[float, tuple[tuple[Rid, Attempt], ...]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, rank: RankLoad, now: float) -> None:
        """Take over what `rank` ran when it introduced itself; a later hello may list work that I dispatched."""
        running, rank.inherited = rank.inherited, ()
        if not running:
            return
        self._offers[rank] = now, running
        for rid, attempt in running:
            self._held.setdefault(rid, {})[rank.info.role] = (rank, attempt)

    def of(self, rid: Rid) -> Held:
        """Who runs `rid`."""
        return self._held.get(rid, {})

    def take(self, rid: Rid) -> Held:
        """Who runs `rid`; forgotten with the answer."""
        return self._held.pop(rid, {})

    def forget(self, rank: RankLoad) -> None:
        """What it ran is lost."""
        _, running = self._offers.pop(rank, (0.0, ()))
        for rid, _ in running:
            roles = self._held.get(rid)
            if roles is not None and roles.get(rank.info.role, (None,))[0] is rank:
                del roles[rank.info.role]
                if not roles:
                    del self._held[rid]

    def expire(self, now: float) -> None:
        """Nobody asked for these."""
        for rank, (since, _) in list(self._offers.items()):
            if now - since > KEPT_S:
                self.forget(rank)
