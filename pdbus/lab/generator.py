"""Generates a trace from a seed, so that the lab runs without a file. Owns the shape; reads nothing.

The shape follows published traces: conversations arrive in bursts, each begins with one of a few system prompts, every
turn repeats the whole history before it, and lengths have long tails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pdbus.lab.traces import BLOCK_TOKENS, Trace, TraceRequest, checked

SYSTEM_PROMPTS = 12
MAX_PROMPT_TOKENS = 120_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a generated trace. Means are those of the distributions before their tails are cut; times in
    seconds."""

    turns_per_s: float = 3.4
    continue_probability: float = 0.6
    think_s: float = 45.0
    first_tokens: float = 5_000.0  # median of a conversation's first turn, without its system prompt
    turn_tokens: float = 700.0  # median of each further turn
    output_tokens: float = 300.0
    tail: float = 1.1  # sigma of the log-normal lengths
    burst: float = 3.0  # arrivals come this many times as often in a burst as outside
    burst_s: float = 15.0
    calm_s: float = 60.0


def generate(duration_s: float = 600.0, *, seed: int = 1, shape: Shape | None = None) -> Trace:
    """Return a trace of `duration_s` seconds with about `duration_s * shape.turns_per_s` requests in order of arrival,
    none with more than MAX_PROMPT_TOKENS prompt tokens. The same arguments give the same trace; `shape` None is
    `Shape()`. Raises ConfigError where `duration_s` is too short for two requests."""
    shape = shape or Shape()
    rng = random.Random(seed)
    next_id = iter(range(1, 1 << 62)).__next__
    systems = [[next_id() for _ in range(rng.randint(1, 6))] for _ in range(SYSTEM_PROMPTS)]
    requests: list[TraceRequest] = []
    for began in _arrivals(rng, duration_s, shape):
        blocks = list(systems[min(int(rng.paretovariate(1.0)) - 1, SYSTEM_PROMPTS - 1)])
        tokens = len(blocks) * BLOCK_TOKENS + _length(rng, shape.first_tokens, shape.tail)
        at = began
        while at <= duration_s and tokens <= MAX_PROMPT_TOKENS:
            _grow(blocks, tokens, next_id)
            output = _length(rng, shape.output_tokens, shape.tail / 2)
            requests.append(TraceRequest(at, tokens, output, tuple(blocks[: tokens // BLOCK_TOKENS])))
            if rng.random() >= shape.continue_probability:
                break
            tokens += output + _length(rng, shape.turn_tokens, shape.tail)
            at += rng.expovariate(1 / shape.think_s)
    return checked(f"generated-{seed}", requests, BLOCK_TOKENS)


def _arrivals(rng: random.Random, duration_s: float, shape: Shape) -> list[float]:
    """Return the starts of conversations: a Poisson process that switches between calm and burst."""
    turns = 1 / (1 - shape.continue_probability)
    mean = shape.turns_per_s / turns
    calm = mean * (shape.calm_s + shape.burst_s) / (shape.calm_s + shape.burst * shape.burst_s)
    times: list[float] = []
    at, bursting, until = 0.0, False, rng.expovariate(1 / shape.calm_s)
    while at <= duration_s:
        gap = rng.expovariate(calm * (shape.burst if bursting else 1.0))
        if at + gap > until:  # memoryless: draw again from the switch on
            at, bursting = until, not bursting
            until = at + rng.expovariate(1 / (shape.burst_s if bursting else shape.calm_s))
            continue
        at += gap
        times.append(at)
    return times


def _grow(blocks: list[int], tokens: int, next_id: Callable[[], int]) -> None:
    while len(blocks) < tokens // BLOCK_TOKENS:
        blocks.append(next_id())


def _length(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))
