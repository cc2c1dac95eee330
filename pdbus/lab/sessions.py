"""Generates sessions of coding agents from a seed, so that the lab runs without a data set. Owns the shape; reads
nothing.

The shape is that of AIPerf's generator (its configuration inference-day-2026): a prompt begins with what all sessions
share (tools and system prompt), then what the sessions of a group share (a repository's instructions), then the
session's own; each turn adds the answer before it and new tokens. Restarts of sessions are left out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate

from pdbus.lab.traces import BLOCK_TOKENS, Trace, TraceRequest, checked


@dataclass(frozen=True, slots=True)
class Draw:
    """A log-normal distribution by its mean and median; values above `most` become `most`. The mean is not below the
    median."""

    mean: float
    median: float
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        """Return a random value from `rng`."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        return min(self.most, rng.lognormvariate(math.log(self.median), sigma))

    def count(self, rng: random.Random) -> int:
        """Return a random value as a whole number, at least 1."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class SessionShape:
    """The parameters of generated sessions: tokens, and times in seconds."""

    shared_tokens: int = 32_000  # the same in all sessions
    group_tokens: int = 10_000  # the same in a group's sessions
    groups: int = 100
    zipf: float = 0.6  # the n-th group has sessions in proportion to n ** -zipf
    own: Draw = Draw(15_000, 5_000, 50_000)  # a session's own first tokens
    turn: Draw = Draw(6_000, 4_000, 50_000)  # new tokens of a later turn
    output: Draw = Draw(1_000, 800, 10_000)
    tool_share: float = 0.7  # of the turns: after `tool`, the others after `human`
    tool: Draw = Draw(5, 2)  # seconds from an answer to the next turn
    human: Draw = Draw(30, 15)
    end_probability: float = 0.05  # of a session's end before a turn, rising ...
    end_rise: float = 1.5  # ... to this many times as much at the limit
    limit_tokens: int = 200_000  # a session ends before a turn whose prompt would reach it


def generate_sessions(
    sessions: int, *, seed: int = 1, shape: SessionShape | None = None, block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """Return that many sessions, without starts of their own (`Trace.timed` is false), with a hash for each
    `block_tokens` tokens. The same arguments give the same trace; `shape` None is `SessionShape()`."""
    shape = shape or SessionShape()
    rng = random.Random(f"sessions {seed}")
    next_id = iter(range(1, 1 << 62)).__next__
    shared = [next_id() for _ in range(shape.shared_tokens // block_tokens)]
    weights = list(accumulate((number + 1) ** -shape.zipf for number in range(shape.groups)))
    common = (shape.shared_tokens + shape.group_tokens) // block_tokens  # blocks of what a group shares
    groups = [shared + [next_id() for _ in range(common - len(shared))] for _ in range(shape.groups)]
    requests: list[TraceRequest] = []
    for session in range(sessions):
        blocks = list(rng.choices(groups, cum_weights=weights)[0])  # of the session's longest prompt so far
        tokens = shape.shared_tokens + shape.group_tokens + shape.own.count(rng)
        at_s = think_s = 0.0
        after: tuple[int, ...] = ()
        while tokens < shape.limit_tokens:
            blocks += [next_id() for _ in range(tokens // block_tokens - len(blocks))]
            output = shape.output.count(rng)
            requests.append(TraceRequest(at_s, tokens, output, tuple(blocks), session, after, think_s))
            after = (len(requests) - 1,)
            think_s = (shape.tool if rng.random() < shape.tool_share else shape.human).draw(rng)
            at_s += think_s
            tokens += output + shape.turn.count(rng)
            rise = 1 + (shape.end_rise - 1) * tokens / shape.limit_tokens
            if rng.random() < shape.end_probability * rise:
                break
    return checked(f"sessions-{seed}", requests, block_tokens, timed=False)
