"""The method of decode ranks in a soak of conversations: every trip of a pair at random, so that each loses its other
half at each stage."""

from __future__ import annotations

import random

from bus.wire.messages import Submit
from controller.load.rank import RankLoad
from controller.policies.least_cost import LeastCost


class AnyTrip(LeastCost):
    """Ranks as `least_cost` picks them."""

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        return random.random() < 0.4

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        return random.random() < 0.7
