"""Request traces and agents' sessions: their times, slices and starts. Reads no file and simulates nothing.

A request without `after` arrives at its own time, whatever became of the others (an open loop). One with `after` is a
later turn of a session: it arrives `think_s` after the last of those has ended, so that slow answers delay it (a closed
loop). A place is an index in `Trace.requests`. A session forks where two requests follow one, and joins
where one request follows two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from bus.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival (s since the trace began), prompt and output tokens, the hashes of its full prompt
    blocks, its place in its session, and its rid in the recording, if that says one."""

    arrival_s: float  # since the trace began; of a later turn: when it came in the recording, used for its order alone
    prompt_tokens: int  # of the prompt, cached ones included
    output_tokens: int  # generated
    hashes: tuple[int, ...] = ()
    session: int = -1  # the number of its session; -1: it is alone
    after: tuple[int, ...] = ()  # places in the trace of the requests that have to end first
    think_s: float = 0.0  # from the last of those ends to its arrival
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Without any hashes no prompt shares a prefix."""

    name: str  # of its file
    requests: tuple[TraceRequest, ...]  # two or more
    block_tokens: int = BLOCK_TOKENS  # of the blocks that `hashes` stand for
    timed: bool = True  # False: the recording does not say when its sessions began, all stand at 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """The seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def closed(self) -> bool:
        """True where some request waits for the end of others."""
        return any(request.after for request in self.requests)

    @property
    def starts_s(self) -> dict[int, float]:
        """The arrival of each session's first request in seconds, by number of the session (`session_of`), in order."""
        found: dict[int, float] = {}
        for place, request in enumerate(self.requests):
            found.setdefault(self.session_of(place), request.arrival_s)
        return found

    def session_of(self, place: int) -> int:
        """Return the number of the session of the request at `place`; a request that is alone has one of its own, below
        0."""
        session = self.requests[place].session
        return session if session >= 0 else -1 - place

    def keys(self) -> list[tuple[int, int]]:
        """Return for each request its session (-1: none) and its number there: both stay what they are when the trace
        is stretched, which may change the order of requests of different sessions."""
        counts: dict[int, int] = {}
        found = []
        for request in self.requests:
            number = counts.get(request.session, 0)
            counts[request.session] = number + 1
            found.append((request.session, number))
        return found

    def kept_hashes(self) -> list[tuple[int, ...]]:
        """Return the hashes of the blocks that each request leaves where it is decoded: those of its prompt, and of its
        output where a later turn of its session goes on from both."""
        found = [request.hashes for request in self.requests]
        for request in self.requests:
            for place in request.after:
                before = self.requests[place]
                tokens, known = before.prompt_tokens + before.output_tokens, len(before.hashes)
                goes_on = request.prompt_tokens >= tokens and request.hashes[:known] == before.hashes
                if goes_on and known == before.prompt_tokens // self.block_tokens:
                    found[place] = request.hashes[: tokens // self.block_tokens]
        return found

    def first(self, duration_s: float) -> Trace:
        """Return the trace of the requests in the first `duration_s` seconds. Raises ConfigError for fewer than two, or
        all at one time."""
        start = self.requests[0].arrival_s
        kept = [r for r in self.requests if r.arrival_s - start <= duration_s]  # whom a turn follows came before it
        return checked(self.name, kept, self.block_tokens, timed=self.timed)

    def spread(self, seed: int) -> Trace:
        """Return the trace with coarse timestamps (two or more requests on each, on average) spread at random over
        their intervals; a trace with finer ones, or with sessions, as it is."""
        times = sorted({request.arrival_s for request in self.requests})
        if self.closed or not self.timed or len(times) < 2 or len(times) > len(self.requests) / 2:
            return self
        bucket_s = min(later - sooner for sooner, later in pairwise(times))
        rng = random.Random(seed)
        moved = (replace(r, arrival_s=r.arrival_s + rng.random() * bucket_s) for r in self.requests)
        return replace(self, requests=tuple(sorted(moved, key=lambda r: r.arrival_s)))

    def started(self, seed: int) -> Trace:
        """Return the trace with the starts of its sessions drawn, one in a second on average (a Poisson process), in an
        order drawn as well."""
        rng, at, starts = random.Random(f"starts {seed}"), 0.0, {}
        sessions = list(self.starts_s)
        rng.shuffle(sessions)
        for session in sessions:
            starts[session] = at
            at += rng.expovariate(1.0)
        return replace(self._begun(starts), timed=True)

    def scaled(self, factor: float) -> Trace:
        """Return the trace from second 0 on with the time between the starts of its sessions (of requests, where there
        are none) multiplied by `factor`."""
        first = self.requests[0].arrival_s
        return self._begun({session: (at - first) * factor for session, at in self.starts_s.items()})

    def _begun(self, starts: dict[int, float]) -> Trace:
        """Return the trace with its sessions at these starts, their later turns as far behind as before."""
        before = self.starts_s
        moved = []
        for place, request in enumerate(self.requests):
            session = self.session_of(place)
            moved.append(replace(request, arrival_s=request.arrival_s - before[session] + starts[session]))
        return replace(self, requests=in_order(moved))

    def shrunk(self, times: int) -> Trace:
        """Return the trace with prompts, outputs and blocks divided by `times` (rounded up; blocks down), for small
        engines. Shared blocks stay shared; times stay."""
        moved = (
            replace(r, prompt_tokens=-(-r.prompt_tokens // times), output_tokens=-(-r.output_tokens // times))
            for r in self.requests
        )
        return replace(self, requests=tuple(moved), block_tokens=max(1, self.block_tokens // times))


def in_order(requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return `requests` by arrival, with `after` in the places that they have then. Requests that come at one time keep
    their order."""
    given = list(requests)
    order = sorted(range(len(given)), key=lambda place: given[place].arrival_s)
    if not any(request.after for request in given):
        return tuple(given[place] for place in order)
    to = {old: new for new, old in enumerate(order)}
    return tuple(replace(given[old], after=tuple(to[each] for each in given[old].after)) for old in order)


def checked(name: str, requests: Iterable[TraceRequest], block_tokens: int, *, timed: bool = True) -> Trace:
    """Return the trace of these requests, in order of arrival. Raises ConfigError for fewer than two, and for requests
    that all come at one time."""
    found = in_order(requests)
    if len(found) < 2 or (timed and found[0].arrival_s == found[-1].arrival_s):
        at_one_time = " at one time" if found else ""
        raise ConfigError(f"the trace {name} has {len(found)} requests{at_one_time}: too little to replay")
    return Trace(name, found, block_tokens, timed)
