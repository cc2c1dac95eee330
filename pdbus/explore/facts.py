"""The facts that a run in virtual time hands over to a page: its decisions, the outcome of each, and the loads of its
ranks. Owns shapes; `pdbus.lab.journal` records, `figures` reads.

All columns have an entry for each request of the run's trace. Times are in seconds of the run, and NaN where there is
none; ranks are -1 there.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from controller.decisions import SHOWN, Candidate, Weighed


@dataclass(slots=True)
class LegFacts:
    """The decisions for one leg of each request. `ranks`, `costs` and `cached` have SHOWN entries a request: those of
    the rank chosen, then of the next by cost. `queued` is what truly waited at the rank chosen: prompt tokens, or
    requests at a decode rank."""

    role: str  # of the ranks, and the name of each
    method: str = ""
    unit: str = ""
    candidates: array[int] = field(default_factory=lambda: array("I"))  # 0: the rank follows from the room
    ranks: array[int] = field(default_factory=lambda: array("i"))
    costs: array[float] = field(default_factory=lambda: array("d"))
    cached: array[int] = field(default_factory=lambda: array("q"))
    queued: array[int] = field(default_factory=lambda: array("q"))

    def begin(self, requests: int) -> None:
        """Make room for so many requests."""
        self.candidates = array("I", [0]) * requests
        self.ranks = array("i", [-1]) * (requests * SHOWN)
        self.costs = array("d", [math.nan]) * (requests * SHOWN)
        self.cached = array("q", [0]) * (requests * SHOWN)
        self.queued = array("q", [-1]) * requests

    def set(self, number: int, rank: int, weighed: Weighed, queued: int) -> None:
        """Note why request `number` went to `rank`."""
        self.method, self.unit = weighed.method, weighed.unit
        self.candidates[number], self.queued[number] = weighed.candidates, queued
        at = number * SHOWN
        self.ranks[at] = rank
        for place, candidate in enumerate(weighed.shown, at):
            self.ranks[place], self.costs[place] = candidate.rank[1], candidate.cost
            self.cached[place] = candidate.cached

    def weighed(self, number: int, room: int) -> Weighed | None:
        """Return what the method compared for request `number`, whose bootstrap room is given; None: it has no such
        leg."""
        at = number * SHOWN
        if self.ranks[at] < 0:
            return None
        shown = [
            Candidate((self.role, self.ranks[place]), self.costs[place], self.cached[place])
            for place in range(at, at + SHOWN)
            if not math.isnan(self.costs[place])
        ]
        candidates = self.candidates[number]
        return Weighed(self.method, self.unit, candidates, tuple(shown), None if candidates else room)


@dataclass(slots=True)
class RunFacts:
    """The facts of one run. `keys` name a request in all runs of a trace (`Trace.keys`). `load` and `decode_load` are
    as in the lab's `Outcome`: samples each `sample_s` from `began_s` on."""

    keys: list[tuple[int, int]]
    rids: list[str]
    rooms: list[int]
    prompt_tokens: array[int]
    output_tokens: array[int]
    counted: array[int] = field(default_factory=lambda: array("I"))  # numbers of the requests that count, in order
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    decided_s: array[float] = field(default_factory=lambda: array("d"))
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    finished_s: array[float] = field(default_factory=lambda: array("d"))
    cached: array[int] = field(default_factory=lambda: array("q"))  # prompt tokens that were found cached
    regret: array[int] = field(default_factory=lambda: array("q"))  # tokens; -1: not measured
    trips: array[int] = field(default_factory=lambda: array("b"))  # places in TRIPS; -1: none
    here_s: array[float] = field(default_factory=lambda: array("d"))  # predicted until the first token, all at one rank
    there_s: array[float] = field(default_factory=lambda: array("d"))  # predicted as a pair
    legs: dict[str, LegFacts] = field(default_factory=dict)  # by the role of their ranks
    began_s: float = 0.0
    sample_s: float = 1.0
    load: list[array[int]] = field(default_factory=list)
    decode_load: list[array[int]] = field(default_factory=list)
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    prefill_ranks: int = 0
    unified_ranks: int = 0
    decode_ranks: int = 0
