"""The method `least_cost`: where a pair's prompt is computed and where it is decoded, by predicted seconds."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from bus.wire.hashing import unpack_hashes
from bus.wire.messages import Submit
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies.methods import CacheAware

DELAY = 0.1  # what a second counts by which a request that decodes is delayed, in seconds until a first token
TO_COME = 100  # tokens that each request at a decode rank is taken to decode still
READ_S = 0.005  # that a prefill rank waits for the decode rank's first answer
GUESS_S = 1e-4  # of a prompt token, before any report shows its pace


class _Pair(NamedTuple):
    """A pair, wherever it decodes: its prefill rank (None: there is none), the seconds of a prompt token, those until
    that rank has computed the prompt, and the tokens of it that it caches."""

    prefill: RankLoad | None
    pace_s: float
    computed_s: float
    cached: int


class LeastCost(CacheAware):
    """Pick the decode rank and the place where the prompt is computed together: the least seconds until the first
    token, and a tenth (`DELAY`) of those by which the requests that decode there are delayed.

    Until the first token: at the rank itself, its queue and what it must compute, which delays every request there as
    long. As a pair: the prefill rank's queue, what it must compute, and the transfer of what the decode rank lacks. The
    prefill rank reads what the decode rank caches, and it lacks itself, where that is quicker than to compute it.
    Afterwards: the request and those beside it each decode `TO_COME` tokens, in steps as long as the fitted step model
    says. Where the request has a wish for its first token (`ttft_slo_s`) that one of the two would keep, that one is
    taken. Assumes that both compute at the pace that the prefill ranks show.

    The candidates are those of `cache_aware`, and the rank with the fewest requests. Where the trip is settled
    (`--prefill-at`), and of requests without hashes, the rank is picked as `cache_aware` does.
    """

    unit = "seconds"
    _about: tuple[Submit, _Pair] | None = None  # of the last pick
    _pace_s = GUESS_S  # of the last pair that had a prefill rank

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        if not (request.block_hashes and self.costs.undecided is request):
            return super().pick(view, request, tokens)
        best, fewest = view.least(Metric.TOKENS), view.least(Metric.REQUESTS)
        if best is None or fewest is None:
            return None
        self._about = request, self._pair(best, request)
        harm_s = self._harm_s(best, request)
        candidates = [(best, 0), (fewest, 0)]
        size, before = request.block_tokens, 0
        usable = view.same_block_size(size)
        for depth, ranks in self.prefixes.runs(unpack_hashes(request.block_hashes)) if usable else ():
            if ranks == before:
                candidates.pop()  # the same ranks hold more of it
            before = ranks
            rank = view.least_loaded(ranks & usable)
            if rank is None:  # none of them is a candidate
                break
            candidates.append((rank, depth * size))
        chosen, least = best, (inf, 0, 0)
        for rank, cached in candidates:
            cost = self._cost(rank, request, cached, harm_s), rank.requests, rank.last_turn
            if cost < least:
                chosen, least = rank, cost
        return chosen

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        if self._about is None or self._about[0] is not request:
            return None
        return self._cost(rank, request, self.costs.cached(rank, request), self._harm_s(rank, request))

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        about = self._about
        pair = about[1] if about is not None and about[0] is request else self._pair(rank, request)
        if pair.prefill is None:
            self.predicted = None
            return True
        cached = self.costs.cached(rank, request)
        here_s, there_s = self._seconds(rank, pair, request, cached, self.costs.readable(rank, request))
        self.predicted = here_s, there_s
        wish_s = request.ttft_slo_s
        if wish_s and (here_s <= wish_s) != (there_s <= wish_s):
            return here_s <= wish_s
        return here_s + self._delay_s(rank, pair, request.prompt_tokens - cached) < there_s

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        tokens = self.costs.readable(rank, request) - self.costs.cached(prefill, request)
        return self._saved_s(rank, prefill, tokens, self.costs.pace(prefill) or GUESS_S) > 0.0

    def _pair(self, rank: RankLoad, request: Submit) -> _Pair:
        """Return what `request` would find as a pair with a decode rank like `rank`."""
        costs = self.costs
        prefill = costs.choice("prefill", request) or costs.view("prefill", rank.info.model).least(Metric.TOKENS)
        if prefill is None:
            return _Pair(None, self._pace_s, inf, 0)
        self._pace_s = pace_s = costs.pace(prefill) or GUESS_S
        cached = costs.cached(prefill, request)
        return _Pair(prefill, pace_s, pace_s * (costs.queued(prefill) + request.prompt_tokens - cached), cached)

    def _seconds(self, rank: RankLoad, pair: _Pair, request: Submit, cached: int, readable: int) -> tuple[float, float]:
        """Return the seconds until the first token: with all of it at `rank`, and as a pair. `rank` has `cached` tokens
        of the prompt, of which another rank can read those that are `readable`."""
        lacks, prefill = request.prompt_tokens - cached, pair.prefill
        here_s = pair.pace_s * (self.costs.queued(rank) + lacks)
        if prefill is None:
            return here_s, inf
        there_s = pair.computed_s + lacks * self.costs.link_s(prefill, rank)
        if cached > pair.cached and rank.info.reads_back and prefill.info.reads_back:
            there_s -= max(0.0, self._saved_s(rank, prefill, readable - pair.cached, pair.pace_s))
        return here_s, there_s

    def _delay_s(self, rank: RankLoad, pair: _Pair, lacks: int) -> float:
        """Return what it counts that `rank` computes so many tokens while its requests wait for their next ones."""
        return DELAY * pair.pace_s * lacks * rank.requests

    def _harm_s(self, rank: RankLoad, request: Submit) -> float:
        """Return the seconds by which `request` makes each step of a rank like `rank` longer."""
        return self.costs.step_s(rank, request.prompt_tokens) - self.costs.step_s(rank)

    def _cost(self, rank: RankLoad, request: Submit, cached: int, harm_s: float) -> float:
        """Return the seconds that the request costs at `rank`, by the cheaper of the two ways, and decoded there."""
        assert self._about is not None
        pair, cached = self._about[1], min(cached, request.prompt_tokens - 1)
        here_s, there_s = self._seconds(rank, pair, request, cached, cached)
        first_s = min(here_s + self._delay_s(rank, pair, request.prompt_tokens - cached), there_s)
        return first_s + DELAY * TO_COME * (self.costs.step_s(rank, request.prompt_tokens) + rank.requests * harm_s)

    def _saved_s(self, rank: RankLoad, prefill: RankLoad, tokens: int, pace_s: float) -> float:
        """Return the seconds that `prefill` is done earlier if it reads `tokens` from `rank` instead of computing
        them."""
        return tokens * (pace_s - self.costs.link_s(rank, prefill)) - READ_S
