"""The ranks of one role as they truly are, which no controller sees: for the samples of a run, its regret, and the
oracles. It decides nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from pdbus.lab.clock import VirtualLoop
from pdbus.lab.rank import VirtualRank


class TrueState:
    """The true state of one role's ranks, with the requests on their way to them."""

    def __init__(self, loop: VirtualLoop, ranks: list[VirtualRank]) -> None:
        self._loop = loop
        self.ranks = ranks
        self.travelling = [0] * len(ranks)
        self.travelling_tokens = [0] * len(ranks)
        self._busy_before_us = 0

    def queued_tokens(self, dp_rank: int) -> int:
        rank = self.ranks[dp_rank]
        rank.catch_up()
        return rank.scheduler.waiting_tokens + self.travelling_tokens[dp_rank]

    def queues(self) -> list[int]:
        """Return the queued tokens of all ranks."""
        self._catch_up()
        return [
            rank.scheduler.waiting_tokens + on_way
            for rank, on_way in zip(self.ranks, self.travelling_tokens, strict=True)
        ]

    def requests(self, dp_rank: int) -> int:
        scheduler = self.ranks[dp_rank].scheduler
        return scheduler.running + scheduler.waiting + self.travelling[dp_rank]

    def cached_tokens(self, dp_rank: int, hashes: Seq[int]) -> int:
        rank = self.ranks[dp_rank]
        rank.catch_up()
        return rank.pool.cached_tokens(hashes)

    def depart(self, dp_rank: int, tokens: int) -> None:
        """Note that a request of so many prompt tokens is on its way to a rank."""
        self.travelling[dp_rank] += 1
        self.travelling_tokens[dp_rank] += tokens

    def arrive(self, dp_rank: int, tokens: int) -> None:
        """Note that it has come."""
        self.travelling[dp_rank] -= 1
        self.travelling_tokens[dp_rank] -= tokens

    def regret(self, chosen: int, hashes: array[int]) -> int:
        """Return the tokens that the chosen rank must compute before a request's first token, minus those at the best
        rank. `hashes` are those of the prompt's blocks that may come from a cache."""
        queued, pools = self.queues(), [rank.pool for rank in self.ranks]
        cost = least = queued[chosen] - pools[chosen].cached_tokens(hashes)
        whole = len(hashes) * pools[chosen].block_tokens
        for tokens, rank in sorted(zip(queued, range(len(queued)), strict=True)):
            if tokens - whole >= least:  # no cache makes it the best, or one after it
                break
            if rank != chosen:
                least = min(least, tokens - pools[rank].cached_tokens(hashes))
        return cost - least

    def begin_to_count(self) -> None:
        """Leave what the ranks did so far out of `busy`."""
        self._busy_before_us = self._busy_us()

    def busy(self, elapsed_s: float) -> float:
        """Return the share of the time since `begin_to_count`, `elapsed_s` ago, that the ranks computed; at most 1,
        since a step counts wholly on one side of an edge."""
        busy_s = (self._busy_us() - self._busy_before_us) / 1e6
        return min(1.0, busy_s / (len(self.ranks) * elapsed_s)) if self.ranks and elapsed_s else 0.0

    def _busy_us(self) -> int:
        self._catch_up()
        return sum(rank.scheduler.busy_us_total for rank in self.ranks)

    def _catch_up(self) -> None:
        now = self._loop.now
        for rank in self.ranks:
            if rank.due_s <= now:
                rank.catch_up()
