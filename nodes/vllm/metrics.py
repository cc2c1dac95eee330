"""vLLM's own counters and gauges, on the metrics port of the node that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from prometheus_client import REGISTRY

from bus.runtime.metrics import Metric, Sample


def figures_of_vllm() -> Iterator[Metric]:
    """Give the metrics of the engine in this process, by vLLM's own names, without histograms, which are many and have
    other buckets than ours."""
    for family in REGISTRY.collect():
        if family.name.startswith("vllm:") and family.type in ("counter", "gauge"):
            kind: Literal["counter", "gauge"] = "counter" if family.type == "counter" else "gauge"
            name = f"{family.name}_total" if kind == "counter" else family.name
            samples = [Sample(each.value, each.labels) for each in family.samples if each.name == name]
            if samples:
                yield Metric(name, family.documentation, kind, samples)
