"""Late binding, for the queue order `slo`: when a prompt goes to ranks, and how soon its first token could come. Pure.

What waits at a rank is out of order for good, so a prompt leaves the central queue only when some rank has less than
`late_tokens` queued: enough to keep it busy until the next one arrives.
"""

from __future__ import annotations

from bus.wire.messages import Load, Model, Role
from controller.load.rank import RankLoad

SMOOTH_TOKENS = 100_000  # computed since: what was measured before counts for half


class LateBinding:
    """Of one controller's ranks."""

    def __init__(self, late_tokens: int) -> None:
        self._late_tokens = late_tokens
        self._paces: dict[tuple[Role, Model], Pace] = {}

    def heard(self, rank: RankLoad, load: Load, now: float) -> None:
        """`load` is about to take the place of what `rank` said last."""
        if rank.load is not None and rank.reported_at is not None and load.seq > rank.load.seq:
            pace = self._paces.setdefault((rank.info.role, rank.info.model), Pace())
            pace.heard(rank.load, load, now - rank.reported_at)

    def open(self, rank: RankLoad | None) -> bool:
        """Whether it has nearly nothing queued."""
        return rank is not None and queued_tokens(rank) < self._late_tokens

    def first_token_s(self, rank: RankLoad | None, work: int) -> float:
        """How long `work` prompt tokens take at `rank` from now on, behind what is queued there; 0 of no rank, and
        before anything was computed."""
        if rank is None:
            return 0.0
        pace = self._paces.get((rank.info.role, rank.info.model))
        return 0.0 if pace is None else (queued_tokens(rank) + work) * pace.s_per_token


class Pace:
    """Seconds of a rank's time for each prompt token that it computes, by reports of several, the recent past first."""

    def __init__(self) -> None:
        self.s_per_token = 0.0  # 0 before anything was computed
        self._tokens = 0.0
        self._busy_s = 0.0

    def heard(self, last: Load, load: Load, elapsed_s: float) -> None:
        """What one rank did between two reports. Where it does not say how long it was busy, it was as long as prompts
        waited there."""
        tokens = _computed(load) - _computed(last)
        if load.busy_us_total:
            busy_s = (load.busy_us_total - last.busy_us_total) / 1e6
        else:
            busy_s = elapsed_s if last.waiting_tokens else 0.0
        if busy_s < 0 or (tokens <= 0 and not load.waiting_tokens):
            return  # it started again; or it did nothing but decode
        keep = 1 / (1 + max(tokens, 0) / SMOOTH_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + busy_s
        if self._tokens > 0:
            self.s_per_token = self._busy_s / self._tokens


def queued_tokens(rank: RankLoad) -> int:
    """Prompt tokens that wait at `rank` or are on their way there: the estimate without what is only held."""
    held = 0 if rank.counts_queue_only or rank.load is None else rank.load.kv_tokens
    return max(0, rank.tokens - held)


def _computed(load: Load) -> int:
    """Prompt tokens computed in all; what waits counts as far as it is not cached."""
    return load.prompt_tokens_total - load.cached_tokens_total - load.waiting_tokens
