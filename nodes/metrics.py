"""What a node process shows to Prometheus, read off its counters once a second, off a request's way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bus.runtime.metrics import Histogram, Metric, Sample, counter, gauge, histogram, labelled
from nodes.link.host import Host


class NodeFigures:
    """Distributions over all ranks of the process, which grow from snapshot to snapshot."""

    def __init__(self) -> None:
        self.first_token_s = Histogram()
        self.fetch_s = Histogram()
        self.step_s = Histogram()


def snapshot(host: Host, figures: NodeFigures) -> Iterator[Metric]:
    """Gauges have one sample a rank; counters are of the process. No request is ever a label."""
    ranks = host.ranks
    loads = {str(dp_rank): rank.core.figures() for dp_rank, rank in ranks.items()}
    for name, text, attribute in (
        ("running", "Requests that hold a run slot.", "running"),
        ("waiting", "Requests ingested that do not run yet.", "waiting"),
        ("waiting_tokens", "Prompt tokens not yet computed or fetched.", "waiting_tokens"),
        ("kv_tokens", "KV tokens held by live requests.", "kv_tokens"),
    ):
        values = {dp_rank: float(getattr(load, attribute)) for dp_rank, load in loads.items()}
        yield labelled("gauge", f"pdbus_node_{name}", text, "dp_rank", values)
    steps = {dp_rank: float(load.step) for dp_rank, load in loads.items()}
    yield labelled("counter", "pdbus_node_steps_total", "Forward steps completed.", "dp_rank", steps)
    yield gauge("pdbus_node_streams", "Token streams kept.", len(host.streams))

    events: Counter[str] = Counter()
    for rank in ranks.values():
        core = rank.core
        events.update(core.counts)
        for values_s, into in (
            (core.first_token_s, figures.first_token_s),
            (core.fetch_s, figures.fetch_s),
            (core.step_s, figures.step_s),
        ):
            while values_s:
                into.observe(values_s.popleft())
    damaged = events.pop("kv_block_damaged", 0)
    yield counter("pdbus_node_kv_checksum_errors_total", "KV blocks that arrived damaged.", damaged)
    odd = {what: float(events.pop(what)) for what in ("dispatch_gap", "dispatch_repeated") if what in events}
    yield labelled("counter", "pdbus_node_dispatch_anomalies_total", "Dispatches lost or repeated.", "what", odd)
    rooms: Counter[str] = Counter()
    for rank in ranks.values():
        rooms.update(rank.publisher.counts)
    yield labelled("counter", "pdbus_node_rooms_total", "What was published of rooms, by what.", "what", rooms)
    located = host.resolver.counts
    yield labelled("counter", "pdbus_node_rooms_located_total", "Rooms looked for, and how it went.", "what", located)
    ended = {code: float(count) for code, count in events.items()}
    yield labelled("counter", "pdbus_node_legs_ended_total", "Legs that ended, by code.", "code", ended)

    yield counter("pdbus_node_kv_sent_bytes_total", "KV bytes sent.", host.kv.sent_bytes)
    yield counter("pdbus_node_kv_received_bytes_total", "KV bytes received.", host.kv.received_bytes)
    fetch_s = figures.fetch_s.frozen()
    yield histogram("pdbus_node_kv_fetch_seconds", "From the first pull of blocks to the last.", fetch_s)
    yield histogram("pdbus_node_step_seconds", "Duration of a forward step.", figures.step_s.frozen())
    yield histogram(
        "pdbus_node_first_token_seconds", "From ingest to the first token, at the node.", figures.first_token_s.frozen()
    )
    total = sum(load.prompt_tokens_total for load in loads.values())
    cached = sum(load.cached_tokens_total for load in loads.values())
    yield counter("pdbus_node_prompt_tokens_total", "Prompt tokens ingested.", total)
    yield counter("pdbus_node_cached_tokens_total", "Of those, served from the prefix cache.", cached)
    yield counter(
        "pdbus_node_unsent_publications_total", "Publications dropped at a full queue.", host.unsent_publications
    )
    unsent = {
        "controller": float(sum(each.unsent for rank in ranks.values() for each in rank.connections)),
        "kv_block": float(host.kv.unsent_blocks),
        "tokens": float(host.streams.resent_total),
    }
    text = "Messages that the queue to a peer did not take; they are sent or asked for again."
    yield labelled("counter", "pdbus_node_unsent_messages_total", text, "what", unsent)
    dropped = host.streams.pending_dropped_total
    yield counter("pdbus_node_attaches_dropped_total", "Attaches forgotten before their request came.", dropped)
    yield Metric(
        "pdbus_node_rejected_messages_total",
        "Messages turned down, by socket and reason.",
        "counter",
        tuple(
            Sample(float(count), dict(zip(("socket", "reason"), key.split(":", 1), strict=True)))
            for key, count in (host.rejected + Counter({f"kv:{k}": n for k, n in host.kv.rejected.items()})).items()
        ),
    )
