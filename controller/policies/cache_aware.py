"""`cache_aware`: least (tokens queued + tokens of this prompt that the rank would have to compute)."""

from __future__ import annotations

from collections.abc import Callable

from bus.hashing import unpack_hashes
from bus.messages import MemberKey, Submit
from controller.groups import Metric, View
from controller.prefix_index import PrefixIndex
from controller.rank import RankLoad


class CacheAware:
    """Goes to a cached prefix unless the queue there costs more than the prefix saves.

    `weight` multiplies the tokens to compute: above 1 holds on to caches longer (fewer tokens computed in all), below
    1 spreads sooner. Ties as elsewhere: fewer requests, then the longest without a turn. Requests without hashes, or
    hashed in blocks of another size than a rank's, count as cached nowhere, which is `total_tokens`.

    Of the ranks that hold nothing of the prompt the least loaded is the best, so one look at the view's index and the
    ranks with a hit are all that is weighed.
    """

    fixed = False

    def __init__(self, index: PrefixIndex | None = None, *, weight: float = 1.0) -> None:
        self.index = index if index is not None else PrefixIndex()
        self.weight = weight

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        best = view.least(Metric.TOKENS)
        hits = self.index.match(unpack_hashes(request.block_hashes)) if request.block_hashes else None
        if best is None or not hits:
            return best
        compute = max(1, request.prompt_tokens)

        def cost(rank: RankLoad) -> tuple[float, int, int]:
            left = compute
            if rank.info.block_tokens == request.block_tokens:
                left = max(1, compute - hits.get(rank.key, 0) * request.block_tokens)
            return rank.tokens + self.weight * left, rank.requests, rank.picked

        return min([best, *_holders(view, hits.__contains__)], key=cost)

    def dispatched(self, rank: RankLoad, request: Submit) -> None:
        """`request` went to `rank`, which will soon hold its prefix."""
        if request.block_hashes and rank.info.block_tokens == request.block_tokens:
            self.index.expected(rank.key, unpack_hashes(request.block_hashes))


def _holders(view: View, holds: Callable[[MemberKey], bool]) -> list[RankLoad]:
    """Candidates of `view` that hold some of the prompt."""
    return [rank for rank in view if holds(rank.key)]
