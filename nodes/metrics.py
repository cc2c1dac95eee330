"""What a node process shows to Prometheus, read off its counters once a second, off a request's way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bus.runtime.metrics import Metric, Sample, counter, gauge, histogram, labelled

if TYPE_CHECKING:
    from nodes.link.host import Node


def snapshot(node: Node) -> Iterator[Metric]:
    """Gauges have one sample a rank; counters are of the process. No request is ever a label."""
    ranks = node.ranks
    for name, text, attribute in (
        ("running", "Requests that hold a run slot.", "running"),
        ("waiting", "Requests ingested that do not run yet.", "waiting"),
        ("waiting_tokens", "Prompt tokens not yet computed or fetched.", "waiting_tokens"),
        ("kv_tokens", "KV tokens held by live requests.", "kv_tokens"),
    ):
        values = {str(number): float(getattr(rank.scheduler, attribute)) for number, rank in ranks.items()}
        yield labelled("gauge", f"pdbus_node_{name}", text, "dp_rank", values)
    steps = {str(number): float(rank.scheduler.step) for number, rank in ranks.items()}
    yield labelled("counter", "pdbus_node_steps_total", "Forward steps completed.", "dp_rank", steps)
    yield gauge("pdbus_node_streams", "Token streams kept.", len(node.streams))

    events: Counter[str] = Counter()
    for rank in ranks.values():
        events.update(rank.legs.counts)
        for values_s, into in ((rank.legs.first_token_s, node.first_token_s), (rank.legs.fetch_s, node.fetch_s)):
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
    located = node.resolver.counts
    yield labelled("counter", "pdbus_node_rooms_located_total", "Rooms looked for, and how it went.", "what", located)
    ended = {code: float(count) for code, count in events.items()}
    yield labelled("counter", "pdbus_node_legs_ended_total", "Legs that ended, by code.", "code", ended)

    yield counter("pdbus_node_kv_sent_bytes_total", "KV bytes sent.", node.kv.sent_bytes)
    yield counter("pdbus_node_kv_received_bytes_total", "KV bytes received.", node.kv.received_bytes)
    yield histogram("pdbus_node_kv_fetch_seconds", "From the first pull of blocks to the last.", node.fetch_s.frozen())
    yield histogram("pdbus_node_step_seconds", "Duration of a forward step.", node.step_s.frozen())
    yield histogram(
        "pdbus_node_first_token_seconds", "From ingest to the first token, at the node.", node.first_token_s.frozen()
    )
    total = sum(rank.scheduler.prompt_tokens_total for rank in ranks.values())
    cached = sum(rank.scheduler.cached_tokens_total for rank in ranks.values())
    yield counter("pdbus_node_prompt_tokens_total", "Prompt tokens ingested.", total)
    yield counter("pdbus_node_cached_tokens_total", "Of those, served from the prefix cache.", cached)
    yield counter(
        "pdbus_node_unsent_publications_total", "Publications dropped at a full queue.", node.unsent_publications
    )
    unsent = {
        "controller": float(sum(link.unsent for rank in ranks.values() for link in rank.links)),
        "kv_block": float(node.kv.unsent_blocks),
        "tokens": float(node.streams.resent_total),
    }
    text = "Messages that the queue to a peer did not take; they are sent or asked for again."
    yield labelled("counter", "pdbus_node_unsent_messages_total", text, "what", unsent)
    dropped = node.streams.pending_dropped_total
    yield counter("pdbus_node_attaches_dropped_total", "Attaches forgotten before their request came.", dropped)
    yield Metric(
        "pdbus_node_rejected_messages_total",
        "Messages turned down, by socket and reason.",
        "counter",
        tuple(
            Sample(float(count), dict(zip(("socket", "reason"), key.split(":", 1), strict=True)))
            for key, count in (node.rejected + Counter({f"kv:{k}": n for k, n in node.kv.rejected.items()})).items()
        ),
    )
