"""The outcome of a run: what became of each request, and samples of the ranks' loads. Owns the records alone;
`pdbus.lab.metrics` makes figures of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from bus.errors import ConfigError
from controller.trips import Trip
from pdbus.explore.facts import RunFacts
from pdbus.lab.arrivals import Arrivals
from pdbus.lab.traces import TraceRequest


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times are in seconds of the run, NaN until they are known; ranks are -1 until then,
    and where they take no part. `regret_tokens`: see `pdbus.lab.metrics`; None: not measured."""

    request: TraceRequest
    prefill_rank: int = -1
    decode_rank: int = -1
    first_token_s: float = float("nan")  # at the client
    finished_s: float = float("nan")
    cached_tokens: int = 0
    regret_tokens: int | None = None
    arrived_s: float = float("nan")  # of a later turn of a session: as its session came to it
    unified_rank: int = -1
    moved_tokens: int = 0  # prompt tokens whose KV cache the decode rank fetched
    prefilled_s: float = float("nan")  # at the prefill rank
    fetched_s: float = float("nan")  # at the decode rank
    read_tokens: int = 0  # prompt tokens whose KV cache the prefill rank read from the decode rank

    @property
    def trip(self) -> Trip | None:
        """The trip of a pair, by what moved; None for other requests, and where nothing was to decode."""
        if self.decode_rank < 0:
            return None
        if self.prefill_rank < 0:
            return "at_decode"
        if self.read_tokens:
            return "read_back"
        if not self.moved_tokens:
            return None
        return "delta" if self.moved_tokens < self.request.prompt_tokens else "whole"


@dataclass(slots=True)
class Outcome:
    """The outcome of a run: all requests, and samples of the true load of each prefill rank and then of each unified
    one (`load[sample][rank]`, queued tokens)."""

    method: str  # the method for prefill and unified ranks
    courses: list[RequestOutcome]  # the outcome of each request that counts
    sample_s: float  # between samples
    load: list[array[int]] = field(default_factory=list)  # since the warm-up
    decode_load: list[array[int]] = field(default_factory=list)  # the same for decode ranks, in requests
    began_s: float = 0.0  # when requests began to count
    until_s: float = 0.0  # when they ceased to: the end of the window (see `pdbus.lab.arrivals`), or of the run
    ended_s: float = 0.0  # when the last request that counts ended
    prefill_busy: float = 0.0  # share of the time that prefill ranks computed
    decode_busy: float = 0.0  # share of the time that decode ranks computed
    unified_busy: float = 0.0  # share of the time that unified ranks computed
    trips: Mapping[Trip, int] | None = None  # how many pairs made each, where the requests do not say
    cache_hit_rate: float | None = None  # set where the requests have no cached tokens of their own
    facts: RunFacts | None = None  # of the run's decisions, where they were wanted

    def count(self, courses: Seq[RequestOutcome], arrivals: Arrivals, ended_s: float) -> None:
        """Set the requests that count, of all `courses` of the trace, and the times of a run that ended at `ended_s`.
        Raises ConfigError where none counts."""
        self.courses = [courses[place] for place in sorted(arrivals.counted)]
        self.began_s, self.until_s, self.ended_s = arrivals.began_s, arrivals.until_s(ended_s), ended_s
        if not self.courses:
            raise ConfigError(
                f"no request came after the warm-up ({self.began_s:g} s) and before the figures ended "
                f"({self.until_s:g} s): warm up for less, or give more sessions"
            )
