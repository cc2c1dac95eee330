"""Where a prompt is computed, and from where its prefix comes: three policies for decode ranks.

An agent's next turn has few new tokens; the decode rank of its last turn has the rest. The lab has such decode ranks:

    pdbus replay --sessions 200 --concurrency 32 --methods cache_aware --decode-cache --decode-prefills \\
        --decode-method examples/where_to_prefill.py:Cheaper

Live, unified ranks beside prefill and decode ranks can (`--unified-method examples/where_to_prefill.py:Cheaper`).
"""

from controller.policies.methods import CacheAware


class FewHere(CacheAware):
    """Up to 1,024 new tokens are computed where they decode, whatever the load."""

    def prefill_here(self, rank, request):
        return request.prompt_tokens - self.costs.cached(rank, request) <= 1024


class Cheaper(CacheAware):
    """The prompt is computed where that costs less, by what waits there and the paces that reports show. In a decode
    batch it costs every request in it the same time."""

    def prefill_here(self, rank, request):
        costs = self.costs
        others = list(costs.view("prefill", rank.info.model))
        pace = costs.pace(others[0]) if others else 0.0
        if not pace:  # no prefill rank is there, or none has computed anything yet
            return not others
        new = request.prompt_tokens - costs.cached(rank, request)
        here_s = pace * (costs.queued(rank) + new * (1 + rank.requests))
        least = min(costs.queued(other) - costs.cached(other, request) for other in others)
        there_s = pace * (request.prompt_tokens + least) + new * costs.link_s(others[0], rank)
        return here_s < there_s


class ReadBack(CacheAware):
    """The prefill rank reads what the decode rank has, if that is quicker than to compute it.

    pdbus replay --sessions 200 --concurrency 32 --methods cache_aware --decode-cache \\
        --decode-method examples/where_to_prefill.py:ReadBack
    """

    def read_back(self, rank, prefill, request):
        return self.costs.link_s(rank, prefill) < self.costs.pace(prefill)
