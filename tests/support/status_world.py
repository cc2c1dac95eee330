"""Statuses of a cluster that never ran, one after the other."""

from __future__ import annotations

from typing import Any

from bus.histogram import Histogram, trimmed
from bus.wire.messages import BrokerStatus, Load, RankStatus, Status
from pdbus.fleet.figures import Sample


def latencies(*values_s: float) -> tuple[int, ...]:
    histogram = Histogram()
    for value_s in values_s:
        histogram.observe(value_s)
    return trimmed(histogram.buckets)


def rank(instance: str = "decode-0", dp_rank: int = 0, **fields: Any) -> RankStatus:
    """With `load=...` as a dictionary of what differs from an idle rank's."""
    load: dict[str, Any] = {
        "seq": 1, "step": 1, "running": 2, "waiting": 1, "waiting_tokens": 300, "kv_tokens": 250, "kv_capacity": 1000,
        "max_running": 8,
    }  # fmt: skip
    load |= fields.pop("load", {})
    usual: dict[str, Any] = {
        "role": instance.partition("-")[0], "model": "m", "state": "ready", "epoch": 1, "endpoint": "ipc:///x",
        "max_context": 4096, "report_age_s": 0.1, "load": Load(**load), "in_flight_requests": 0, "in_flight_tokens": 0,
        "estimate_requests": 3, "estimate_tokens": 550, "outstanding": 3, "dispatched_total": 3, "ended_total": 0,
        "failed_total": 0, "state_age_s": 5.0, "epoch_age_s": 6.0,
    }  # fmt: skip
    return RankStatus(instance, dp_rank, **usual | fields)


def sample(
    at: float, *ranks: RankStatus, epoch: int = 7, broker: dict[str, int] | None = None, **counts: int
) -> Sample:
    status = Status(1, "controller-0", epoch, at, {"decode": "total_requests"}, counts, ranks)
    return Sample(at, 1e9 + at, status, BrokerStatus(1, 2, at, broker) if broker is not None else None)
