"""Fits the sim engine's timing model (`SimTiming`: the seconds of a step, linear in its content) to measured steps:
least squares of relative errors, no term below 0. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations

from nodes.own.engines.timing import SimTiming


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement of `steps` engine steps together: all numbers are totals over these steps. `prefill_tokens` are
    prompt tokens computed, `decode_rows` are output tokens made, `context_tokens` are the KV tokens that they attend
    to, `seconds` is the duration of all steps."""

    steps: int
    prefill_tokens: int
    decode_rows: int
    context_tokens: float
    seconds: float

    @property
    def work(self) -> tuple[float, ...]:
        """The factors of the timing's terms, in the order of the fields of `SimTiming`. The last one counts the steps
        that feed more than one token: all steps of a point or none."""
        batched = self.prefill_tokens + self.decode_rows > self.steps
        return self.steps, self.prefill_tokens, self.decode_rows, self.context_tokens, self.steps * batched

    def predicted_s(self, timing: SimTiming) -> float:
        """Return the seconds that these steps take by `timing`."""
        each_s: tuple[float, ...] = astuple(timing)
        return sum(count * seconds for count, seconds in zip(self.work, each_s, strict=True))


def fit(points: Sequence[Point]) -> SimTiming:
    """Return the timing whose predictions have the least sum of squared relative errors, with no term below 0. All sets
    of nonzero terms are tried. `seconds` of each point must be above 0; without points all terms are 0."""
    count = len(fields(SimTiming))
    rows = [[count / point.seconds for count in point.work] for point in points]
    best, least = [0.0] * count, float(len(points))
    for terms in _sets(count):
        solved = _solved(rows, terms)
        if solved is not None and min(solved) >= 0:
            values = [0.0] * count
            for term, value in zip(terms, solved, strict=True):
                values[term] = value
            error = sum((sum(a * x for a, x in zip(row, values, strict=True)) - 1.0) ** 2 for row in rows)
            if error < least:
                best, least = values, error
    return SimTiming(*best)


def relative_errors(points: Sequence[Point], timing: SimTiming) -> list[float]:
    """Return predicted / measured - 1 for each point: 0.1 where the model is 10 % too slow."""
    return [point.predicted_s(timing) / point.seconds - 1.0 for point in points]


def _sets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count + 1):
        yield from combinations(range(count), size)


def _solved(rows: Sequence[Sequence[float]], terms: Sequence[int]) -> list[float] | None:
    """Solve the normal equations of `rows` times the unknown `terms` equal 1 by elimination; None: they are singular.
    The columns differ by orders of magnitude, so each is scaled to 1."""
    scale = [sum(row[term] ** 2 for row in rows) ** 0.5 for term in terms]
    if not all(scale):
        return None
    scaled = [[row[term] / size for term, size in zip(terms, scale, strict=True)] for row in rows]
    size = len(terms)
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)] + [sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(matrix[i][at]))
        if abs(matrix[pivot][at]) < 1e-9:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for i in range(size):
            if i != at:
                factor = matrix[i][at] / matrix[at][at]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[at], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]
