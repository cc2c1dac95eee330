"""Late binding and an order of one's own: requests wait at the controller until a rank has little to do, and those with
the least to compute go first.

    pdbus replay --methods cache_aware,late_cache,examples/shortest_first.py:ShortestFirst
    pdbus up --model sim --prefill-method examples/shortest_first.py:ShortestFirst
"""

from controller.policies.methods import CacheAware


class ShortestFirst(CacheAware):
    def admit(self, rank, request):
        return self.costs.queued(rank) < 2048

    def order(self, request, work, now):
        return work  # prompt tokens that no rank has cached
