"""Decision regret, live: how much better the best rank would have been, seen when a report acknowledges a dispatch.

At that moment the chosen rank's true load is known. Regret is what it had queued besides the requests just ingested,
beyond the least loaded rank's tokens. Owns the figure alone; decides nothing. Each sample looks at all ranks of the
role, so samples are thinned to `MAX_PER_S` (`due`).
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.load.rank import RankLoad

MAX_PER_S = 50


class Regret:
    """`tokens` / `dispatches` is the mean regret of the dispatches sampled."""

    def __init__(self) -> None:
        self.tokens = 0
        self.dispatches = 0
        self.due = 0.0  # from then on the next sample may be taken

    def acknowledged(self, rank: RankLoad, ranks: Iterable[RankLoad], now: float) -> None:
        """`rank`'s last report ingested new requests of mine (`RankLoad.news`). `ranks`: all known."""
        if rank.news <= 0:
            return
        self.due = now + 1 / MAX_PER_S
        role, model = rank.info.role, rank.info.model
        best = min(
            (other.tokens for other in ranks if other.open and (other.info.role, other.info.model) == (role, model)),
            default=0,
        )
        before = rank.base_tokens - rank.news_tokens
        self.tokens += rank.news * max(0, before - best)
        self.dispatches += rank.news
