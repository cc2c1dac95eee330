"""The controller's Prometheus metrics, built from its core about once a second, off the request path."""

from __future__ import annotations

from collections.abc import Sequence

from bus.runtime.metrics import Metric, Sample, gauge, labelled
from controller.core import ControllerCore
from controller.load.rank import RankLoad

ALIVE = ("requests", "queue_requests", "queue_bytes", "payload_bytes", "adoptable", "prefix_blocks")


def collect(core: ControllerCore, now: float) -> Sequence[Metric]:
    """A snapshot of `core`; a request id is never a label."""
    tally = core.tally()
    failed = {name.removeprefix("failed_"): tally.pop(name) for name in list(tally) if name.startswith("failed_")}
    rejected = {name.removeprefix("rejected_"): tally.pop(name) for name in list(tally) if name.startswith("rejected_")}
    alive = [gauge(f"pdbus_controller_{name}", f"{name} now", tally.pop(name)) for name in ALIVE]
    ranks = list(core.table.ranks.values())
    regret = (
        ("regret_tokens", "tokens queued at chosen ranks beyond the best one's, when their reports acknowledged"),
        ("regret_dispatches", "dispatches that the regret was sampled of"),
    )
    return (
        *alive,
        *(
            Metric(f"pdbus_controller_{name}_total", help, "counter", [Sample(tally.pop(name))])
            for name, help in regret
        ),
        labelled("counter", "pdbus_controller_events_total", "what happened so far, by name", "event", tally),
        labelled("counter", "pdbus_controller_failed_total", "requests failed, by code", "code", failed),
        labelled("counter", "pdbus_controller_rejected_total", "messages dropped, by reason", "reason", rejected),
        _dispatches(core, ranks),
        _gauge("estimate_requests", "load in force: requests", ranks, [rank.requests for rank in ranks]),
        _gauge("estimate_tokens", "load in force: tokens", ranks, [rank.tokens for rank in ranks]),
        _gauge("reported_requests", "requests in the last report", ranks, [rank.base_requests for rank in ranks]),
        _gauge("reported_tokens", "tokens of work in the last report", ranks, [rank.base_tokens for rank in ranks]),
        _gauge("outstanding", "legs dispatched and not ended", ranks, [rank.outstanding for rank in ranks]),
        _gauge("ready", "1 when it may be dispatched to", ranks, [int(rank.ready) for rank in ranks]),
        _gauge(
            "report_age_seconds",
            "since the last report (-1: none yet)",
            ranks,
            [-1.0 if rank.reported_at is None else now - rank.reported_at for rank in ranks],
        ),
    )


def _labels(rank: RankLoad) -> dict[str, str]:
    return {"instance": rank.key[0], "dp_rank": str(rank.key[1])}


def _gauge(name: str, help: str, ranks: Sequence[RankLoad], values: Sequence[float]) -> Metric:
    samples = [Sample(value, _labels(rank)) for rank, value in zip(ranks, values, strict=True)]
    return Metric(f"pdbus_controller_{name}", help, "gauge", samples)


def _dispatches(core: ControllerCore, ranks: Sequence[RankLoad]) -> Metric:
    samples = []
    for rank in ranks:
        by_method = {
            core.config.methods[rank.info.role]: rank.dispatched_total - rank.routed_total,
            "routed_dp_rank": rank.routed_total,
        }
        samples += [Sample(count, _labels(rank) | {"method": method}) for method, count in by_method.items()]
    return Metric("pdbus_controller_dispatches_total", "legs sent, by rank and method", "counter", samples)
