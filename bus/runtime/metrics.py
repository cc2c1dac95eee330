"""Prometheus metrics of a part: the form of a snapshot, which `bus.runtime.probes` serves over HTTP.

This is not called while a request is served. A part counts in plain ints and `Histogram`s, and builds its snapshot
about once a second.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from bus import build
from bus.histogram import Distribution as Distribution
from bus.histogram import Histogram as Histogram
from bus.runtime import logs

SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, with its labels by name."""

    value: float | Distribution
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, with its `name` in Prometheus (`pdbus_<part>_<what>_<unit|total>`); all its samples have the same
    label names.

    The samples of a `histogram` hold Distributions, those of other kinds hold numbers.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    samples: Sequence[Sample]


Snapshot: TypeAlias = Callable[[], Iterable[Metric]]


def counter(name: str, help: str, value: float) -> Metric:
    """Return a counter (it only grows) with one value and no labels."""
    return Metric(name, help, "counter", (Sample(value),))


def gauge(name: str, help: str, value: float) -> Metric:
    """Return a gauge (it may fall) with one value and no labels."""
    return Metric(name, help, "gauge", (Sample(value),))


def labelled(
    kind: Literal["counter", "gauge"], name: str, help: str, label: str, values: Mapping[str, float]
) -> Metric:
    """Return a metric with one sample for each key of `values`; the key is the value of `label`."""
    return Metric(name, help, kind, tuple(Sample(value, {label: key}) for key, value in values.items()))


def histogram(name: str, help: str, value: Distribution) -> Metric:
    """Return a histogram metric of one distribution, without labels."""
    return Metric(name, help, "histogram", (Sample(value),))


def registry(snapshot: Snapshot, labels: Mapping[str, str] | None = None) -> CollectorRegistry:
    """Return a Prometheus registry: each scrape reads `snapshot()`, on the scraping thread, so it should return the
    tuple that the loop built last. `labels` go to each sample of the part."""
    made = CollectorRegistry()
    made.register(_Reader(snapshot, labels or {}))
    return made


class _Reader(Collector):
    def __init__(self, snapshot: Snapshot, labels: Mapping[str, str]) -> None:
        self._snapshot = snapshot
        self._labels = labels
        self._build = {"version": build.version(), "cores": build.CORES, "python": platform.python_version()}

    def describe(self) -> Iterable[Family]:
        return ()  # so that registering does not read a snapshot that is not there yet

    def collect(self) -> Iterator[Family]:
        for metric in self._snapshot():
            yield _family(metric, self._labels)
        yield _family(Metric("pdbus_build_info", "which build runs, always 1", "gauge", (Sample(1.0, self._build),)))
        yield _family(counter("pdbus_log_events_lost_total", "events that the log could not take", logs.lost()))


def _family(metric: Metric, labels: Mapping[str, str] = MappingProxyType({})) -> Family:
    names = (*labels, *(metric.samples[0].labels if metric.samples else ()))
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for sample in metric.samples:
            assert isinstance(sample.value, Distribution), metric.name
            values = tuple({**labels, **sample.labels}[name] for name in names)
            histograms.add_metric(values, _cumulative(sample.value), sample.value.total)
        return histograms
    plain = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        metric.name, metric.help, labels=names
    )
    for sample in metric.samples:
        assert not isinstance(sample.value, Distribution), metric.name
        plain.add_metric(tuple({**labels, **sample.labels}[name] for name in names), sample.value)
    return plain


def _cumulative(value: Distribution) -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip((*value.bounds, float("inf")), value.buckets, strict=True):
        seen += count
        pairs.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
    return pairs
