"""Latencies as counts: what they say of quantiles, how they travel; and the protocol's document names their bounds."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from bus.histogram import BOUNDS_S, Histogram, quantile, since, trimmed

PROTOCOL = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def of(*values: float) -> list[int]:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram.buckets


def test_bounds_are_those_of_the_document_and_near_enough_for_a_quantile() -> None:
    listed = PROTOCOL.split("A LatencyCounts has")[1].split("in milliseconds:")[1].split(";")[0]
    assert tuple(float(number.replace(",", "")) for number in re.findall(r"[\d,.]*\d", listed)) == tuple(
        pytest.approx(1000 * bound) for bound in BOUNDS_S
    )
    assert all(low < high <= 2.5 * low for low, high in pairwise(BOUNDS_S))


def test_a_quantile_lies_within_its_bucket() -> None:
    counts = of(*[0.012] * 98, 0.4, 0.4)
    assert 0.01 < (quantile(counts, 0.5) or 0) < 0.015
    assert 0.3 < (quantile(counts, 0.99) or 0) < 0.5
    assert quantile(of(0.0004), 1.0) == 0.0005
    assert quantile(of(5000.0), 0.5) == BOUNDS_S[-1]
    assert quantile((), 0.5) is quantile([0] * 5, 0.5) is None


def test_counts_travel_without_trailing_zeros_and_their_difference_is_what_came_in_between() -> None:
    before, after = trimmed(of(0.002)), trimmed(of(0.002, 0.002, 0.01))
    assert (len(before), len(after)) == (3, 7)
    assert since(after, before) == trimmed(of(0.002, 0.01))
    assert since(before, after) == before, "counted anew"
    assert since(after, ()) == after
    assert trimmed(of()) == ()
