"""The method `least_cost`: cache-aware, and it says where a pair's prompt is computed, by predicted seconds."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import Metric
from controller.load.rank import RankLoad
from controller.policies.methods import CacheAware

DELAY = 0.1  # what a second counts by which a request that decodes is delayed, in seconds until a first token
READ_S = 0.005  # that a prefill rank waits for the decode rank's first answer
GUESS_S = 1e-4  # of a prompt token, before any report shows its pace


class LeastCost(CacheAware):
    """Pick the rank as `cache_aware` does. Where that rank could both compute the prompt and decode, let it do both if
    this costs less than the pair would.

    The costs are seconds until the first token. At the rank: its queue, and what it must compute, which delays every
    request there (each second of that counts `DELAY` seconds). As a pair: the prefill rank's queue, what it must
    compute, and the transfer of what the decode rank lacks. The prefill rank reads what the decode rank caches, and it
    lacks itself, where that is quicker than to compute it. Where the request has a wish for its first token
    (`ttft_slo_s`) that one of the two would keep, that one is taken. Assumes that both compute at the pace that the
    prefill ranks show.
    """

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        costs = self.costs
        other = costs.choice("prefill", request) or costs.view("prefill", rank.info.model).least(Metric.TOKENS)
        if other is None:
            self.predicted = None
            return True
        pace_s = costs.pace(other) or GUESS_S
        cached = costs.cached(rank, request)
        lacks = request.prompt_tokens - cached
        here_s = pace_s * (costs.queued(rank) + lacks)
        cached_there = costs.cached(other, request)
        there_s = pace_s * (costs.queued(other) + request.prompt_tokens - cached_there)
        there_s += lacks * costs.link_s(other, rank)
        if cached > cached_there and rank.info.reads_back and other.info.reads_back:
            tokens = costs.readable(rank, request) - cached_there
            there_s -= max(0.0, self._saved_s(rank, other, tokens, pace_s))
        self.predicted = here_s, there_s
        wish_s = request.ttft_slo_s
        if wish_s and (here_s <= wish_s) != (there_s <= wish_s):
            return here_s <= wish_s
        return here_s + DELAY * pace_s * lacks * rank.requests < there_s

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        tokens = self.costs.readable(rank, request) - self.costs.cached(prefill, request)
        return self._saved_s(rank, prefill, tokens, self.costs.pace(prefill) or GUESS_S) > 0.0

    def _saved_s(self, rank: RankLoad, prefill: RankLoad, tokens: int, pace_s: float) -> float:
        """Return the seconds that `prefill` is done earlier if it reads `tokens` from `rank` instead of computing
        them."""
        return tokens * (pace_s - self.costs.link_s(rank, prefill)) - READ_S
