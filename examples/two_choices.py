"""A balancing method of one's own, outside the package: power of two choices, with affinity to cached prefixes.

    pdbus replay --methods total_tokens,cache_aware,power_of_two,examples/two_choices.py:TwoChoices
    pdbus up --model sim --prefill-method examples/two_choices.py:TwoChoices

Two ranks are drawn at random, and for each depth to which some rank holds the prompt's prefix the least loaded of those
joins them. Of these few the request goes to the one with the least tokens queued + tokens to compute.
"""

import random

from bus.wire.hashing import unpack_hashes
from controller import PrefixPolicy


class TwoChoices(PrefixPolicy):
    def __init__(self, settings):
        super().__init__(settings)  # `self.prefixes`: who caches what, kept up to date from now on
        self._rng = random.Random(settings.seed)
        self._weight = settings.cache_weight

    def pick(self, view, request, tokens):
        candidates = list(view)
        some = self._rng.sample(candidates, min(2, len(candidates)))
        cached = {}  # tokens of this prompt, by slot
        usable = view.same_block_size(request.block_tokens)
        for depth, slots in self.prefixes.runs(unpack_hashes(request.block_hashes)):
            holder = view.least_loaded(slots & usable)
            if holder is not None:
                some.append(holder)
            cached |= {rank.slot: depth * request.block_tokens for rank in some if slots & usable & 1 << rank.slot}

        def cost(rank):
            return rank.tokens + self._weight * (tokens - cached.get(rank.slot, 0)), rank.last_turn

        return min(some, key=cost, default=None)
