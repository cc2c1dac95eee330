"""A static threshold for where prompts are computed, as routers have one, to compare with:
`pdbus replay --decode-cache --decode-prefills --decode-method pdbus.lab.threshold:Threshold`."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.rank import RankLoad
from controller.policies.methods import CacheAware

LOCAL_TOKENS = 16


class Threshold(CacheAware):
    """Up to `LOCAL_TOKENS` tokens that the decode rank lacks are computed there, whatever the load."""

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        return request.prompt_tokens - self.costs.cached(rank, request) <= LOCAL_TOKENS
