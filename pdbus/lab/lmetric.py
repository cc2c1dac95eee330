"""LMetric's policy (arXiv 2603.15202), to compare with: `pdbus replay --methods pdbus.lab.lmetric:LMetric`."""

from __future__ import annotations

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import Submit
from controller.load.groups import View
from controller.load.rank import RankLoad
from controller.policies.base import PrefixPolicy


class LMetric(PrefixPolicy):
    """Pick the rank with the least product of prompt tokens to compute and requests.

    The tokens are those that wait at the rank or are on their way there, and of this prompt what the rank does not
    cache. The requests are those of the rank, and this one. Among equals the rank with the oldest turn wins.
    """

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """Return the candidate with the least product; None: there is no candidate."""
        cached: dict[int, int] = {}  # tokens of this prompt, by slot
        usable = view.same_block_size(request.block_tokens)
        ranks = [*view]
        for depth, slots in self.prefixes.runs(unpack_hashes(request.block_hashes)):
            cached |= {rank.slot: depth * request.block_tokens for rank in ranks if slots & usable & 1 << rank.slot}

        def product(rank: RankLoad) -> tuple[int, int]:
            waiting = rank.in_flight_tokens + (rank.load.waiting_tokens if rank.load is not None else 0)
            fresh = max(1, request.prompt_tokens - cached.get(rank.slot, 0))
            return (waiting + fresh) * (rank.requests + 1), rank.last_turn

        return min(ranks, key=product, default=None)
