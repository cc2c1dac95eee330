"""Compares placements for decode ranks that run in lockstep (DP attention): all ranks begin each step together, and
wait for the slowest.

The model is smaller than the lab's: no memory limit, no prefill, every rank takes part in every step, and the heaviest
rank decides the duration of a step. Owns that model and the placements; `examine` runs one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from nodes.own.engines.timing import SimTiming
from pdbus.lab.traces import Trace


@dataclass(slots=True)
class _Rank:
    number: int
    rows: int = 0
    context: int = 0  # KV tokens of its requests
    ends: dict[int, list[int]] = field(default_factory=dict)  # step -> context that leaves with it
    last_turn: int = 0


Placement = Callable[[list[_Rank], int, SimTiming, random.Random], _Rank]

PLACEMENTS: dict[str, Placement] = {
    "random": lambda ranks, prompt, timing, rng: rng.choice(ranks),
    "round_robin": lambda ranks, prompt, timing, rng: min(ranks, key=lambda r: r.last_turn),
    "total_requests": lambda ranks, prompt, timing, rng: min(ranks, key=lambda r: (r.rows, r.last_turn)),
    "total_tokens": lambda ranks, prompt, timing, rng: min(ranks, key=lambda r: (r.context, r.rows, r.last_turn)),
    "step_time": lambda ranks, prompt, timing, rng: min(
        ranks, key=lambda r: (timing.step_s(0, r.rows, r.context), r.last_turn)
    ),
}


@dataclass(frozen=True, slots=True)
class Lockstep:
    """The result: mean and p99 of the seconds for an output token (over requests), and `imbalance`, the work of the
    heaviest rank divided by the mean (over steps; 1 is even)."""

    tpot_mean_s: float
    tpot_p99_s: float
    imbalance: float
    rows: float  # requests running at once on all ranks


def examine(trace: Trace, placement: str, ranks: int, *, timing: SimTiming | None = None, seed: int = 1) -> Lockstep:
    """Run `trace` with a placement (a name of PLACEMENTS) on `ranks` decode ranks in virtual time: every request
    arrives at its time, already prefilled, and decodes to its end; requests with fewer than two output tokens are left
    out. `timing` None is the default of SimTiming; `seed` is for `random`."""
    timing = timing or SimTiming()
    rng, choose = random.Random(seed), PLACEMENTS[placement]
    group = [_Rank(number) for number in range(ranks)]
    begun: dict[int, list[tuple[float, int]]] = {}  # last step -> (arrival, tokens) of the requests that end with it
    tpots: list[float] = []
    now, step, turn, heavy, even, rows_seen = 0.0, 0, 0, 0.0, 0.0, 0
    arrivals = sorted((r for r in trace.requests if r.output_tokens > 1), key=lambda r: r.arrival_s)
    at = 0
    while at < len(arrivals) or any(rank.rows for rank in group):
        if not any(rank.rows for rank in group):
            now = max(now, arrivals[at].arrival_s)
        while at < len(arrivals) and arrivals[at].arrival_s <= now:
            request = arrivals[at]
            at += 1
            turn += 1
            rank = choose(group, request.prompt_tokens, timing, rng)
            rank.last_turn = turn
            rank.rows += 1
            rank.context += request.prompt_tokens
            steps = request.output_tokens - 1
            rank.ends.setdefault(step + steps, []).append(request.prompt_tokens + steps)
            begun.setdefault(step + steps, []).append((now, steps))
        works = [timing.step_s(0, rank.rows, rank.context) - timing.base_s for rank in group]
        now += timing.base_s + max(works)
        heavy += max(works)
        even += sum(works) / ranks
        step += 1
        for rank in group:
            rows_seen += rank.rows
            rank.context += rank.rows
            for context in rank.ends.pop(step, ()):
                rank.rows -= 1
                rank.context -= context
        tpots += [(now - began) / steps for began, steps in begun.pop(step, ())]
    tpots.sort()
    return Lockstep(sum(tpots) / len(tpots), tpots[len(tpots) * 99 // 100], heavy / even, rows_seen / step)
