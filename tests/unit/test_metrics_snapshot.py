"""Metrics: what is scraped is the last snapshot left, in Prometheus' form."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bus import build
from bus.runtime.metrics import Histogram, Metric, counter, gauge, histogram, labelled, registry


def scrape(left: Sequence[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry(lambda: left)).decode())
        for sample in family.samples
        if sample.name not in ("pdbus_log_events_lost_total", "pdbus_build_info")  # which every part has
    }


def test_every_kind_is_scraped_as_it_was_left() -> None:
    sizes = Histogram((1.0, 10.0))
    for value in (1, 2, 10, 11):
        sizes.observe(value)
    left: list[Metric] = [
        counter("pdbus_test_things_total", "things", 3),
        gauge("pdbus_test_level", "level", 0.5),
        labelled("counter", "pdbus_test_rejected_total", "rejected", "reason", {"size": 2, "tag": 1}),
        labelled("gauge", "pdbus_test_empty", "nothing yet", "rank", {}),
        histogram("pdbus_test_size_rooms", "sizes", sizes.frozen()),
    ]
    assert scrape(left) == {
        ("pdbus_test_things_total", ()): 3,
        ("pdbus_test_level", ()): 0.5,
        ("pdbus_test_rejected_total", (("reason", "size"),)): 2,
        ("pdbus_test_rejected_total", (("reason", "tag"),)): 1,
        ("pdbus_test_size_rooms_bucket", (("le", "1.0"),)): 1,
        ("pdbus_test_size_rooms_bucket", (("le", "10.0"),)): 3,
        ("pdbus_test_size_rooms_bucket", (("le", "+Inf"),)): 4,
        ("pdbus_test_size_rooms_count", ()): 4,
        ("pdbus_test_size_rooms_sum", ()): 24,
    }
    left[:] = [counter("pdbus_test_things_total", "things", 4)]
    assert scrape(left) == {("pdbus_test_things_total", ()): 4}


def test_labels_of_a_whole_part_come_with_those_of_each_sample() -> None:
    sizes = Histogram((1.0,))
    left = [
        labelled("counter", "pdbus_test_rejected_total", "rejected", "reason", {"size": 2}),
        gauge("pdbus_test_level", "level", 0.5),
        histogram("pdbus_test_size_rooms", "sizes", sizes.frozen()),
        labelled("gauge", "pdbus_test_empty", "nothing yet", "rank", {}),
    ]
    said = generate_latest(registry(lambda: left, {"controller": "c-1"})).decode()
    for line in (
        'pdbus_test_rejected_total{controller="c-1",reason="size"} 2.0',
        'pdbus_test_level{controller="c-1"} 0.5',
        'pdbus_test_size_rooms_bucket{controller="c-1",le="1.0"} 0.0',
        'pdbus_test_size_rooms_count{controller="c-1"} 0.0',
    ):
        assert line in said.splitlines()


def test_every_part_says_which_build_it_is() -> None:
    said = generate_latest(registry(lambda: ())).decode()
    labels = f'cores="{build.CORES}",python="{platform.python_version()}",version="{version("pdbus")}"'
    assert f"pdbus_build_info{{{labels}}} 1.0" in said


def test_a_frozen_histogram_does_not_change_any_more() -> None:
    sizes = Histogram((1.0,))
    frozen = sizes.frozen()
    sizes.observe(5)
    assert frozen.buckets == (0, 0)
    assert sizes.frozen().buckets == (0, 1)
