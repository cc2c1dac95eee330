"""From measured steps to the timing model: least squares of relative errors, nothing below 0. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations

from nodes.own.engines.timing import SimTiming


@dataclass(frozen=True, slots=True)
class Point:
    """What was computed, as `SimTiming` counts it, and how long it took."""

    steps: int
    prefill_tokens: int
    decode_rows: int  # summed over the steps
    context_tokens: float  # likewise
    seconds: float

    @property
    def work(self) -> tuple[float, ...]:
        """By the timing's fields, in their order. All steps of a point feed one token, or all feed more."""
        batched = self.prefill_tokens + self.decode_rows > self.steps
        return self.steps, self.prefill_tokens, self.decode_rows, self.context_tokens, self.steps * batched

    def predicted_s(self, timing: SimTiming) -> float:
        each_s: tuple[float, ...] = astuple(timing)
        return sum(count * seconds for count, seconds in zip(self.work, each_s, strict=True))


def fit(points: Sequence[Point]) -> SimTiming:
    """The best of all sets of terms that come out above 0: of so few each set can be tried."""
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


def errors(points: Sequence[Point], timing: SimTiming) -> list[float]:
    """How far off the model is at each point, as a share of what was measured."""
    return [point.predicted_s(timing) / point.seconds - 1.0 for point in points]


def _sets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count + 1):
        yield from combinations(range(count), size)


def _solved(rows: Sequence[Sequence[float]], terms: Sequence[int]) -> list[float] | None:
    """The normal equations of `rows` times the unknown `terms` equal 1, by elimination; None where they don't tell. The
    columns differ by orders of magnitude, so each is scaled to 1."""
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
