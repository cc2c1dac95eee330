"""The counts of an HTTP edge, for its page `/metrics` (Prometheus)."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

from bus.runtime.metrics import Histogram, Metric, Sample, counter, gauge, histogram, labelled, registry

SECONDS = (  # for LLMs: half a millisecond to ten minutes
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
)  # fmt: skip


class Counts:
    """The counts of one edge; times are in seconds. Used on its loop's thread alone; `registry` reads them."""

    def __init__(self) -> None:
        self.ttft = Histogram(SECONDS)
        self.inter_token = Histogram(SECONDS)
        self.e2e = Histogram(SECONDS)
        self.in_flight = 0  # answers under way
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.requests: Counter[tuple[str, str]] = Counter()  # by endpoint and status
        self.errors: Counter[str] = Counter()  # by code
        self.registry = registry(self.snapshot)

    def token_gap(self, gap_s: float, tokens: int) -> None:
        """Count output tokens that came together, `gap_s` seconds after those before, as `tokens` gaps of equal
        length."""
        each = gap_s / tokens
        self.inter_token.buckets[bisect.bisect_left(SECONDS, each)] += tokens
        self.inter_token.total += gap_s

    def snapshot(self) -> Iterable[Metric]:
        """Yield all metrics with their present values."""
        answered = tuple(
            Sample(count, {"endpoint": endpoint, "status": status})
            for (endpoint, status), count in sorted(self.requests.items())
        )
        yield Metric("pdbus_edge_requests_total", "HTTP requests answered", "counter", answered)
        yield labelled("counter", "pdbus_edge_errors_total", "answers that failed", "code", self.errors)
        yield gauge("pdbus_edge_requests_in_flight", "answers in progress", self.in_flight)
        yield counter("pdbus_edge_prompt_tokens_total", "prompt tokens received", self.prompt_tokens)
        yield counter("pdbus_edge_generation_tokens_total", "output tokens sent", self.generation_tokens)
        yield counter("pdbus_edge_cached_tokens_total", "prompt tokens from a prefix cache", self.cached_tokens)
        yield histogram("pdbus_edge_time_to_first_token_seconds", "from request to first token", self.ttft.frozen())
        yield histogram("pdbus_edge_inter_token_latency_seconds", "between output tokens", self.inter_token.frozen())
        yield histogram("pdbus_edge_e2e_request_latency_seconds", "from request to last token", self.e2e.frozen())
