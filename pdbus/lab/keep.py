"""Searches the highest rate (starts of sessions, or of requests where there are none, in a second) at which a method
keeps a wanted share of the requests within their SLO. Runs nothing itself.

Each method and seed has a search of its own, by bisection, on the seed's requests: their starts are the same at each
rate, only closer. It takes for granted that a higher rate keeps fewer. Seeds are pairs: a method is compared with the
first one by the ratio of their rates at the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from bus.errors import ConfigError
from pdbus.lab.capacity import stretch
from pdbus.lab.compare import Result, Run
from pdbus.lab.config import LabConfig
from pdbus.lab.traces import Trace

PRECISION = 1.02  # the rate found keeps the share, and one this many times as high does not
WIDEST = 256.0  # the search stays within so many times the rate at which it begins

Runner = Callable[[Sequence[Run]], Sequence[Result]]


def search(share: float, start: float) -> Generator[float, float, float]:
    """Yield rates to try, each above 0 and beginning with `start`, and get the share that each keeps. Return the
    highest that keeps `share`; 0 if none does."""
    low, high, rate = 0.0, math.inf, start
    while True:
        if (yield rate) >= share:
            low = rate
        else:
            high = rate
        if low >= start * WIDEST or high <= start / WIDEST or high <= low * PRECISION:
            return low
        rate = 2 * low if high == math.inf else high / 2 if not low else math.sqrt(low * high)


def keep(runs: Sequence[Run], share: float, run: Runner) -> list[Result]:
    """Search for each of `runs` the highest rate that keeps `share` of its requests, and return the results at these
    rates in the same order, with `kept_rate_per_s` and `kept_ratio` (to the first run with the same seed). `run` makes
    the given runs and returns their results in the same order; it is called a dozen times, with a run for each search
    that goes on. Raises ConfigError for a trace whose starts cannot be stretched, and where no rate is low enough."""
    starts = [_start(each.trace, each.config) for each in runs]
    searches = [search(share, start) for start in starts]
    rates = {number: next(each) for number, each in enumerate(searches)}
    best: dict[int, tuple[float, Result]] = {}
    while rates:
        asked = [*rates.items()]
        tried = [replace(runs[number], config=replace(runs[number].config, rate=rate)) for number, rate in asked]
        for (number, rate), result in zip(asked, run(tried), strict=True):
            kept = result.summary.slo_attainment
            if kept >= share:
                best[number] = max(best.get(number, (0.0, result)), (rate, result), key=lambda found: found[0])
            try:
                rates[number] = searches[number].send(kept)
            except StopIteration:
                del rates[number]
                if number not in best:
                    lowest = starts[number] / WIDEST
                    why = "some requests exceed the limits however few there are"
                    raise ConfigError(
                        f"{runs[number]} keeps {share:.0%} at no rate from {lowest:.2g} starts/s on: {why}"
                    ) from None
    results = []
    firsts: dict[int, float] = {}  # by seed
    for number in range(len(runs)):
        rate, result = best[number]
        first = firsts.setdefault(result.seed, rate)
        figures = replace(result.summary, kept_rate_per_s=rate, kept_ratio=rate / first)
        results.append(replace(result, summary=figures))
    return results


def _start(trace: Trace, config: LabConfig) -> float:
    """Return the starts in a second at a load of a half, or at `config.rate`: where a search begins."""
    starts_s = [*stretch(trace, config if config.rate else replace(config, load=0.5)).starts_s.values()]
    return (len(starts_s) - 1) / (starts_s[-1] - starts_s[0])
