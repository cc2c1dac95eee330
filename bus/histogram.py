"""Latencies counted by upper bound: a status carries the counts, Prometheus scrapes them, `pdbus top` reads quantiles.

Counts only grow, so the difference of two readings counts what was observed in the time between them. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

# Half a millisecond (a step of a small model) to ten minutes (the first token of a prompt that waited long). Part of
# the protocol (docs/protocol.md): counts that cross the wire mean nothing without their bounds.
BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class Histogram:
    """Counts of observed values by upper bound (`bounds`, ascending; by default latencies in seconds), and their sum
    `total`. The last of `buckets` counts values beyond the last bound. Only one thread may use it; other threads
    get copies (`frozen`)."""

    __slots__ = ("bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value, in the unit of `bounds`; a value equal to a bound counts below that bound."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    def frozen(self) -> Distribution:
        """Return a copy that other threads may read."""
        return Distribution(self.bounds, tuple(self.buckets), self.total)


class Distribution(NamedTuple):
    """A histogram's value at one moment; `buckets` are per bucket, not cumulative."""

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    total: float


def trimmed(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts without the zeros at the end, the form in messages."""
    if not any(counts):  # as most are in a fleet that begins
        return ()
    last, half = len(counts), len(counts) >> 1
    if not any(counts[half:]):  # few latencies are that long
        last = half
    while not counts[last - 1]:
        last -= 1
    return tuple(counts[:last])


def since(counts: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Return what a counter counted between two readings of it, `before` and now (`counts`). If `counts` is lower
    anywhere, the counter was started again, and all of `counts` is returned."""
    more = [count - (before[at] if at < len(before) else 0) for at, count in enumerate(counts)]
    return tuple(more) if len(before) <= len(counts) and min(more, default=0) >= 0 else tuple(counts)


def quantile(counts: Sequence[int], q: float) -> float | None:
    """Return the value in seconds below which the share `q` (0 to 1) of the counts lies, where `counts` are those of a
    histogram with the default bounds, perhaps `trimmed`; within a bucket by linear interpolation. None: nothing was
    counted. Values beyond the last bound count as that bound."""
    wanted = q * sum(counts)
    if not wanted:
        return None
    below = 0
    for at, count in enumerate(counts[: len(BOUNDS_S)]):
        if count and below + count >= wanted:
            low = BOUNDS_S[at - 1] if at else 0.0
            return low + (BOUNDS_S[at] - low) * (wanted - below) / count
        below += count
    return BOUNDS_S[-1]
