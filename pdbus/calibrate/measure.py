"""Measures the steps of an engine: prompts alone, then requests that decode together.

Prompts differ in every block, so that no prefix cache helps. Other work of the machine only makes a step longer. So the
quickest of a few rounds counts; in a round of decode steps it is their median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from typing import Protocol

from nodes.link.facts import RankFacts
from pdbus.calibrate.fit import Point
from pdbus.calibrate.probe import LegTimes

STEPS = 12  # decode steps that count, for each point
SHORTEST = 16
FIRST_ID = 3  # lower ids are special tokens
VOCABULARY = 500  # ids that prompts are made of; every model has at least as many


class Runs(Protocol):
    """The interface of `Probe`: it runs prompts on an engine and returns the times of their tokens."""

    facts: RankFacts

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[LegTimes]:
        """Run all prompts at once and return the times of their tokens."""


def measure(
    probe: Runs, step_tokens: int, longest: int, rounds: int = 3, progress: Callable[[str], None] = lambda line: None
) -> list[Point]:
    """Run prompts of many lengths and batch sizes on the probe's engine; return the points for `fit`. `step_tokens` is
    the maximum of prompt tokens in a step, `longest` the longest prompt in tokens; each measurement is repeated
    `rounds` times. It blocks for all runs (minutes on a slow engine); `progress` gets a line before each. Raises as
    `probe.run` does."""
    rng = Random(1)
    facts = probe.facts
    most = min(longest, facts.max_context - 2, facts.kv_capacity - facts.block_tokens - 2)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[FIRST_ID + rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]

    probe.run(prompts(2, min(most, 2 * SHORTEST)), [4, 4])  # warm up: first-time work is not counted
    points = []
    for length in _doubled(SHORTEST, most):
        progress(f"prompts of {length} tokens")
        seconds = [probe.run(prompts(1, length), [1])[0].tokens_at[0] for _ in range(rounds)]
        steps = math.ceil(length / step_tokens)
        context = sum(range(0, length, step_tokens))
        points.append(Point(steps, length, 0, context, min(seconds)))
    for rows, length in _batches(facts, most):
        progress(f"{rows} requests of {length} tokens")
        warm = math.ceil(rows * length / step_tokens) + 2  # steps in which some of the prompts are computed
        got = [_decoded(probe.run(prompts(rows, length), [warm + STEPS] * rows)) for _ in range(rounds)]
        points.append(min(got, key=lambda point: point.seconds))
    return points


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _batches(facts: RankFacts, most: int) -> Iterator[tuple[int, int]]:
    """Yield the number of requests and the length of their prompts, as far as all can run at once."""
    for rows in _doubled(1, min(64, facts.max_running)):
        room = 0.9 * facts.kv_capacity / rows - 4 * STEPS - facts.block_tokens
        for length in dict.fromkeys((SHORTEST, most // 8, most // 2)):
            context = length + 4 * STEPS + rows * length // 64
            if SHORTEST <= length <= room and context < facts.max_context:
                yield rows, length


def _decoded(courses: Sequence[LegTimes]) -> Point:
    """Return the point of the steps in which all requests decode."""
    began = max(course.tokens_at[0] for course in courses)
    ended = min(course.tokens_at[-1] for course in courses)
    last = max(courses, key=lambda course: course.tokens_at[0])
    inside = [at for at in last.tokens_at if began <= at <= ended]
    context = sum(  # the token that a step feeds is not part of its context
        course.prompt_tokens + sum(at <= began for at in course.tokens_at) - 1 for course in courses
    )
    grown = len(courses) * (len(inside) - 2) / 2  # growth of the context until the middle of these steps
    seconds = median(after - before for before, after in pairwise(inside))
    return Point(1, 0, len(courses), context + grown, seconds)
