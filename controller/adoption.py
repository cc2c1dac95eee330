"""What nodes still run of requests that a former controller dispatched, so that a resubmit is not run twice.

Filled by hellos, emptied by resubmits, time, and the ranks' ends. Owns that map only.
"""

from __future__ import annotations

from bus.messages import Attempt, Rid, Role
from controller.rank import RankLoad

KEPT_S = 60.0


class Adoption:
    """By rid and role: the rank that runs it and the attempt."""

    def __init__(self) -> None:
        self._held: dict[Rid, dict[Role, tuple[RankLoad, Attempt]]] = {}
        self._offers: dict[RankLoad, tuple[float, tuple[tuple[Rid, Attempt], ...]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, rank: RankLoad, now: float) -> None:
        """Take over the list of `rank`'s hello: once for each epoch, from its first hello."""
        if rank in self._offers or not rank.info.running:
            return
        self._offers[rank] = now, rank.info.running
        for rid, attempt in rank.info.running:
            self._held.setdefault(rid, {})[rank.info.role] = (rank, attempt)

    def take(self, rid: Rid) -> dict[Role, tuple[RankLoad, Attempt]]:
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
