"""A node process's Prometheus metrics, read off its counters once a second, not while a request is served.

Every metric has the labels `instance`, `dp_rank` and `role`. A count of the process as a whole names all its ranks
there, as in `0,1`. A request is never a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from bus.errors import REASONS
from bus.runtime.metrics import Distribution, Histogram, Metric, Sample, counter, gauge, labelled
from nodes.link.host import Host
from nodes.link.rank import LinkedRank

SOCKETS = (
    "controller",
    "data",
    "kv",
)  # whose counts are there from 0 on: one that is born with a count has no increase
LATENCIES = {
    "first_token": "From ingest to the first token, at the node.",
    "step": "Duration of a forward step.",
    "kv_fetch": "From the first pull of blocks to the last.",
}


class NodeFigures:
    """The distributions of each rank, which grow from snapshot to snapshot."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], Histogram] = {}

    def take(self, what: str, ranks: Mapping[int, LinkedRank]) -> dict[str, Distribution]:
        """Move the ranks' new values of one of LATENCIES (seconds) into the distributions, and return these by
        dp_rank."""
        taken = {}
        for dp_rank, rank in ranks.items():
            core, histogram = rank.core, self._of.setdefault((what, dp_rank), Histogram())
            noted = {"first_token": core.first_token_s, "step": core.step_s, "kv_fetch": core.fetch_s}[what]
            while noted:
                histogram.observe(noted.popleft())
            taken[str(dp_rank)] = histogram.frozen()
        return taken


def snapshot(host: Host, figures: NodeFigures) -> Iterator[Metric]:
    """Yield the metrics of ranks and process, with their labels; those of the runners come from `Node`. Reading it to
    the end empties the ranks' lists of latencies, so only the loop does, once a second."""
    config = host.config
    usual = {"instance": config.instance, "dp_rank": ",".join(map(str, host.ranks)), "role": config.role}
    for metric in (*_of_ranks(host.ranks, figures), *_of_process(host)):
        samples = tuple(Sample(sample.value, {**usual, **sample.labels}) for sample in metric.samples)
        yield Metric(metric.name, metric.help, metric.kind, samples)


def _of_ranks(ranks: Mapping[int, LinkedRank], figures: NodeFigures) -> Iterator[Metric]:
    yield from _of_loads(ranks, figures)
    yield from _of_counts(ranks)


def _of_loads(ranks: Mapping[int, LinkedRank], figures: NodeFigures) -> Iterator[Metric]:
    loads = {str(dp_rank): rank.core.figures() for dp_rank, rank in ranks.items()}
    gauges: Literal["gauge"] = "gauge"
    counters: Literal["counter"] = "counter"
    for kind, name, text, attribute in (
        (gauges, "running", "Requests that hold a run slot.", "running"),
        (gauges, "waiting", "Requests ingested that do not run yet.", "waiting"),
        (gauges, "waiting_tokens", "Prompt tokens not yet computed or fetched.", "waiting_tokens"),
        (gauges, "kv_tokens", "KV tokens held by live requests.", "kv_tokens"),
        (counters, "steps_total", "Forward steps completed.", "step"),
        (counters, "prompt_tokens_total", "Prompt tokens ingested.", "prompt_tokens_total"),
        (counters, "admitted_tokens_total", "Of those, of prompts that have begun.", "admitted_tokens_total"),
        (counters, "cached_tokens_total", "Of those that have begun, from the prefix cache.", "cached_tokens_total"),
        (counters, "computed_tokens_total", "Prompt tokens computed.", "computed_tokens_total"),
        (counters, "output_tokens_total", "Output tokens made.", "output_tokens_total"),
    ):
        values = {dp_rank: float(getattr(load, attribute)) for dp_rank, load in loads.items()}
        yield labelled(kind, f"pdbus_node_{name}", text, "dp_rank", values)
    for name, text, limit in (
        ("kv_capacity_tokens", "KV tokens there is room for (0: not said).", "kv_capacity"),
        ("max_running", "Run slots (0: not said).", "max_running"),
    ):
        values = {str(dp_rank): float(getattr(rank.runner.facts, limit)) for dp_rank, rank in ranks.items()}
        yield labelled("gauge", f"pdbus_node_{name}", text, "dp_rank", values)
    busy = {dp_rank: load.busy_us_total / 1e6 for dp_rank, load in loads.items()}
    yield labelled("counter", "pdbus_node_busy_seconds_total", "Time spent in forward steps.", "dp_rank", busy)
    for what, text in LATENCIES.items():
        taken = [Sample(value, {"dp_rank": dp_rank}) for dp_rank, value in figures.take(what, ranks).items()]
        yield Metric(f"pdbus_node_{what}_seconds", text, "histogram", taken)


def _of_counts(ranks: Mapping[int, LinkedRank]) -> Iterator[Metric]:
    damaged: list[Sample] = []
    unsaid: list[Sample] = []
    odd: list[Sample] = []
    ended: list[Sample] = []
    rooms: list[Sample] = []
    for dp_rank, rank in ranks.items():
        label = {"dp_rank": str(dp_rank)}
        counts = dict(rank.core.counts)
        damaged.append(Sample(counts.pop("kv_block_damaged", 0), label))
        unsaid.append(Sample(counts.pop("kv_client_unsaid", 0), label))
        for what in ("dispatch_gap", "dispatch_repeated", "dispatch_known"):
            if what in counts:
                odd.append(Sample(counts.pop(what), label | {"what": what}))
        ended += [Sample(count, label | {"code": code}) for code, count in counts.items()]
        rooms += [Sample(count, label | {"what": what}) for what, count in rank.publisher.counts.items()]
    for name, text, samples in (
        ("kv_checksum_errors", "KV blocks that arrived damaged.", damaged),
        ("kv_client_unsaid", "KV messages of release 0.1.0 that did not say whose the cache is.", unsaid),
        ("dispatch_anomalies", "Dispatches lost, repeated, or of an attempt that is or was here.", odd),
        ("legs_ended", "Legs that ended, by code.", ended),
        ("rooms", "What was published of rooms, by what.", rooms),
    ):
        yield Metric(f"pdbus_node_{name}_total", text, "counter", samples)


def _of_process(host: Host) -> Iterator[Metric]:
    yield gauge("pdbus_node_streams", "Token streams kept.", len(host.streams))
    located = host.resolver.counts
    yield labelled("counter", "pdbus_node_rooms_located_total", "Rooms looked for, and how it went.", "what", located)
    yield counter("pdbus_node_kv_sent_bytes_total", "KV bytes sent.", host.kv.sent_bytes)
    yield counter("pdbus_node_kv_received_bytes_total", "KV bytes received.", host.kv.received_bytes)
    yield counter(
        "pdbus_node_unsent_publications_total", "Publications dropped at a full queue.", host.unsent_publications
    )
    unsent = {
        "controller": float(sum(each.unsent for rank in host.ranks.values() for each in rank.connections)),
        "kv_block": float(host.kv.unsent_blocks),
        "tokens": float(host.streams.resent_total),
    }
    text = "Messages that the queue to a peer did not take; they are sent or asked for again."
    yield labelled("counter", "pdbus_node_unsent_messages_total", text, "what", unsent)
    dropped = host.streams.pending_dropped_total
    yield counter("pdbus_node_attaches_dropped_total", "Attaches forgotten before their request came.", dropped)
    rejected = {f"{socket}:{reason}": 0 for socket in SOCKETS for reason in REASONS}
    rejected |= {**host.rejected, **{f"kv:{reason}": count for reason, count in host.kv.rejected.items()}}
    samples = [
        Sample(count, dict(zip(("socket", "reason"), key.split(":", 1), strict=True)))
        for key, count in rejected.items()
    ]
    text = "Messages turned down, by socket and reason."
    yield Metric("pdbus_node_rejected_messages_total", text, "counter", samples)
