"""The counts of a front (vLLM's server in front of the bus), beside vLLM's own request metrics and on the same page."""

from __future__ import annotations

from prometheus_client import Counter

FAILED = Counter(
    "pdbus_front_failed_requests",
    "Requests that the bus failed, by code; overloaded_before: refused before they were submitted.",
    ["code"],
)
