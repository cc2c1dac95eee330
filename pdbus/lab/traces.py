"""Request traces: spreading coarse timestamps, slicing, stretching. Owns what a request of a trace is; reads no file and
simulates nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from bus.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival (s since the trace began), prompt and output tokens, and the hashes of its full prompt
    blocks."""

    arrival_s: float  # since the trace began
    prompt_tokens: int  # of the prompt, cached ones included
    output_tokens: int  # generated
    hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Without any hashes no prompt shares a prefix."""

    name: str  # of its file
    requests: tuple[TraceRequest, ...]  # two or more
    block_tokens: int = BLOCK_TOKENS  # of the blocks that `hashes` stand for

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """The seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def first(self, duration_s: float) -> Trace:
        """Return the trace of the requests in the first `duration_s` seconds. Raises ConfigError for fewer than two, or
        all at one time."""
        start = self.requests[0].arrival_s
        return checked(self.name, (r for r in self.requests if r.arrival_s - start <= duration_s), self.block_tokens)

    def spread(self, seed: int) -> Trace:
        """Return the trace with coarse timestamps (several requests on each) spread at random, by `seed`, over their
        intervals; a trace with fine timestamps is returned as it is."""
        times = sorted({request.arrival_s for request in self.requests})
        if len(times) < 2 or len(times) > len(self.requests) / 2:
            return self
        bucket_s = min(later - sooner for sooner, later in pairwise(times))
        rng = random.Random(seed)
        moved = (replace(r, arrival_s=r.arrival_s + rng.random() * bucket_s) for r in self.requests)
        return Trace(self.name, tuple(sorted(moved, key=lambda r: r.arrival_s)), self.block_tokens)

    def scaled(self, factor: float) -> Trace:
        """Return the trace with the first arrival at 0 and the time between arrivals multiplied by `factor`."""
        start = self.requests[0].arrival_s
        moved = (replace(r, arrival_s=(r.arrival_s - start) * factor) for r in self.requests)
        return Trace(self.name, tuple(moved), self.block_tokens)

    def shrunk(self, times: int) -> Trace:
        """Return the trace with prompts, outputs and blocks divided by `times` (rounded up; blocks down), for small
        engines. Shared blocks stay shared; times stay."""
        moved = (
            replace(r, prompt_tokens=-(-r.prompt_tokens // times), output_tokens=-(-r.output_tokens // times))
            for r in self.requests
        )
        return Trace(self.name, tuple(moved), max(1, self.block_tokens // times))


def checked(name: str, requests: Iterable[TraceRequest], block_tokens: int) -> Trace:
    found = tuple(sorted(requests, key=lambda r: r.arrival_s))
    if len(found) < 2 or found[0].arrival_s == found[-1].arrival_s:
        raise ConfigError(f"the trace {name} has {len(found)} requests at one time: too little to replay")
    return Trace(name, found, block_tokens)
