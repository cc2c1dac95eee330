"""The load balancing methods that come with pdbus, side by side, with their assumptions.

Among equals the rank with the oldest turn wins, so ties rotate, and ranks that come and go leave the rotation even.
"""

from __future__ import annotations

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies.base import Policy, PolicySettings, PrefixPolicy


class RoundRobin(Policy):
    """Pick the next live rank, whatever its load. Assumes equal requests and equal ranks."""

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TURN)


class TotalRequests(Policy):
    """Pick the rank with the fewest requests: running, waiting and in flight. Assumes that a step costs much the same
    for every request in it: decode with plenty of KV memory."""

    unit = "requests"

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.REQUESTS)

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        return rank.requests


class TotalTokens(Policy):
    """Pick the rank with the fewest tokens: held or queued, and in flight; ties by requests. Assumes that cost follows
    tokens: prefill always, decode when KV memory is scarce."""

    unit = "tokens"

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TOKENS)

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        return rank.tokens


class FollowBootstrapRoom(Policy):
    """Pick rank number `bootstrap_room % dp_size`, so that a decode rank can compute where the prefill ran. Where that
    rank is not ready, there is no other. Of several instances, pick the one whose rank had the oldest turn. Requests
    without a room have no rank."""

    fixed = True

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        room = request.bootstrap_room
        if room is None:
            return None
        chosen: RankLoad | None = None
        for ranks in view.instances():
            dp_size = next(iter(ranks.values())).info.dp_size if ranks else 1
            rank = ranks.get(room % dp_size)
            if rank is not None and rank.ready and (chosen is None or rank.last_turn < chosen.last_turn):
                chosen = rank
        return chosen


class CacheAware(PrefixPolicy):
    """Pick the rank with the least (tokens queued + tokens of this prompt that it would have to compute): a cached
    prefix wins unless the queue there costs more than the prefix saves. Of a request without hashes that says its
    session, the session's last rank is taken to cache the last prompt.

    `cache_weight` multiplies the tokens to compute: above 1 holds on to caches longer (fewer tokens computed in all),
    below 1 spreads sooner. Ties as elsewhere: fewer requests, then the longest without a turn. Requests without hashes
    and session, or hashed in blocks of another size than a rank's, count as cached nowhere, which is `total_tokens`.

    Of ranks that hold the same run of blocks the least loaded is the best. So one candidate stands for each depth at
    which the holders of the prompt get fewer, and the least loaded of all stands for those that hold less than it does.
    The walk down the prompt ends where no remaining rank can win any more.
    """

    counts_queue_only = True
    unit = "tokens"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self.weight = (settings or PolicySettings()).cache_weight

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        best = view.least(Metric.TOKENS)
        if best is None or not request.block_hashes:
            return self._of_session(view, request, best) if best is not None and request.session else best
        size = request.block_tokens
        if not (usable := view.same_block_size(size)):
            return best
        hashes, weight = unpack_hashes(request.block_hashes), self.weight
        compute = max(1, request.prompt_tokens)
        at_least = weight * max(1, compute - len(hashes) * size)  # a rank that holds all of it
        chosen, least = best, best.tokens + weight * compute
        rank: RankLoad | None = best
        before = 0
        for depth, ranks in self.prefixes.runs(hashes):
            if ranks != before:
                before, holders = ranks, ranks & usable
                rank = best if holders >> best.slot & 1 else view.least_loaded(holders)
            if rank is None:  # none of them is a candidate
                break
            cost = rank.tokens + weight * max(1, compute - depth * size)
            if cost < least or (
                cost == least and (rank.requests, rank.last_turn) < (chosen.requests, chosen.last_turn)
            ):
                chosen, least = rank, cost
            if rank.tokens + at_least > least or (rank is chosen and not holders & (holders - 1)):
                break
        return chosen

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        cached = 0
        if not request.block_hashes:
            cached = self.prefixes.sessions.tokens(request.session, rank.slot) if request.session else 0
        elif rank.info.block_tokens == request.block_tokens:
            cached = self.prefixes.depth(rank.slot, unpack_hashes(request.block_hashes)) * request.block_tokens
        return rank.tokens + self.weight * max(1, max(1, request.prompt_tokens) - cached)

    def _of_session(self, view: View, request: Submit, best: RankLoad) -> RankLoad:
        """Return the rank where the request's session was, unless it has no credit or its queue costs more than the
        session's prefix saves; else `best`."""
        place = self.prefixes.sessions.place(request.session)
        rank = None if place is None else view.least_loaded(1 << place[0])
        if place is None or rank is None:
            return best
        compute = max(1, request.prompt_tokens)
        lacks = max(1, compute - place[1])
        return rank if rank.tokens + self.weight * lacks <= best.tokens + self.weight * compute else best
