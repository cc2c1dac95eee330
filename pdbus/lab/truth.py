"""The ranks of one role as they truly are, which no controller sees: for the samples of a run, its regret, and the
oracles. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pdbus.lab.rank import VirtualRank


class TrueState:
    """The true state of one role's ranks, with the requests on their way to them."""

    def __init__(self, ranks: list[VirtualRank]) -> None:
        self.ranks = ranks
        self.travelling = [0] * len(ranks)
        self.travelling_tokens = [0] * len(ranks)

    def queued_tokens(self, dp_rank: int) -> int:
        return self.ranks[dp_rank].scheduler.waiting_tokens + self.travelling_tokens[dp_rank]

    def queues(self) -> list[int]:
        """Return the queued tokens of all ranks."""
        return [
            rank.scheduler.waiting_tokens + on_way
            for rank, on_way in zip(self.ranks, self.travelling_tokens, strict=True)
        ]

    def requests(self, dp_rank: int) -> int:
        scheduler = self.ranks[dp_rank].scheduler
        return scheduler.running + scheduler.waiting + self.travelling[dp_rank]

    def cached_tokens(self, dp_rank: int, hashes: Seq[int]) -> int:
        return self.ranks[dp_rank].pool.cached_tokens(hashes)

    def depart(self, dp_rank: int, tokens: int) -> None:
        self.travelling[dp_rank] += 1
        self.travelling_tokens[dp_rank] += tokens

    def arrive(self, dp_rank: int, tokens: int) -> None:
        self.travelling[dp_rank] -= 1
        self.travelling_tokens[dp_rank] -= tokens
