"""Records the decisions of a run in virtual time and what came of them, for a page (`pdbus.explore`). Owns the facts;
it changes nothing of the run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq

from bus.wire.messages import Role
from controller.decisions import Weighed
from controller.trips import TRIPS
from pdbus.explore.facts import LegFacts, RunFacts
from pdbus.lab.config import LabConfig
from pdbus.lab.outcome import Outcome, RequestOutcome
from pdbus.lab.traces import Trace


class Journal:
    """The journal of one run of `trace`, as it was stretched for it. A request is named by its number there."""

    def __init__(self, trace: Trace, rooms: Seq[int], config: LabConfig) -> None:
        requests = trace.requests
        count = len(requests)
        self.facts = facts = RunFacts(
            trace.keys(), [each.rid for each in requests], [*rooms],
            array("I", [each.prompt_tokens for each in requests]),
            array("I", [each.output_tokens for each in requests]),
            ttft_slo_s=config.slo_ttft_s, tpot_slo_s=config.slo_tpot_s, prefill_ranks=config.ranks,
            unified_ranks=config.unified_ranks, decode_ranks=config.decode_ranks,
        )  # fmt: skip
        facts.decided_s, facts.here_s, facts.there_s = (array("d", [math.nan]) * count for _ in range(3))

    def decides(self, number: int, now: float) -> None:
        """Note that a request goes to ranks now."""
        self.facts.decided_s[number] = now

    def predicts(self, number: int, predicted: tuple[float, float] | None) -> None:
        """Note the seconds until a request's first token that its policy compared, if it did: all of it at one rank,
        and as a pair."""
        if predicted is not None:
            self.facts.here_s[number], self.facts.there_s[number] = predicted

    def picks(self, role: Role, number: int, rank: int, weighed: Weighed | None, queued: int) -> None:
        """Note the choice of a rank of `role`, where `queued` prompt tokens (at a decode rank: requests) truly are."""
        legs = self.facts.legs
        if role not in legs:
            legs[role] = LegFacts(role)
            legs[role].begin(len(self.facts.keys))
        if weighed is not None:
            legs[role].set(number, rank, weighed, queued)

    def ends(self, courses: Seq[RequestOutcome], counted: Seq[int], outcome: Outcome) -> None:
        """Take in what became of the requests, `counted` of which count."""
        facts = self.facts
        facts.counted = array("I", sorted(counted))
        facts.arrived_s = array("d", [each.arrived_s for each in courses])
        facts.first_token_s = array("d", [each.first_token_s for each in courses])
        facts.finished_s = array("d", [each.finished_s for each in courses])
        facts.cached = array("q", [each.cached_tokens for each in courses])
        facts.regret = array("q", [-1 if each.regret_tokens is None else each.regret_tokens for each in courses])
        facts.trips = array("b", [-1 if (trip := each.trip) is None else TRIPS.index(trip) for each in courses])
        facts.began_s, facts.sample_s = outcome.began_s, outcome.sample_s
        facts.load, facts.decode_load = outcome.load, outcome.decode_load
