"""W3C Trace Context: what a header says, the context that a span of ours hands on, and what a span tells. Pure.

A span's id follows from its parent's and from what it is a span of: so cores need no random numbers, and a request that
is submitted or dispatched again as it was keeps its spans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal

from msgspec import Struct

from bus.wire.messages import TraceContext

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
STATE_MAX = 512  # characters; a longer tracestate is dropped, as the recommendation allows


class Span(Struct, frozen=True, gc=False):
    """Times in seconds since 1970. `error`: why it went wrong; empty: it didn't."""

    name: str
    kind: Literal["SERVER", "CLIENT", "CONSUMER", "INTERNAL"]
    trace: TraceContext  # its own
    parent: TraceContext | None
    began_s: float
    ended_s: float
    attributes: Mapping[str, Any]
    error: str = ""
    events: tuple[tuple[float, str, str], ...] = ()  # when, what, detail


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """What the two headers say; None where that is nothing. Of a later version what is known of it counts."""
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    flags = f"{int(flags, 16) & 1:02x}"
    return TraceContext(f"00-{trace_id}-{span_id}-{flags}", tracestate if len(tracestate) <= STATE_MAX else "")


def root_of(trace_id: int, seed: str, *, sampled: bool) -> TraceContext:
    """Of a new trace, whose first span is that of `seed`."""
    return TraceContext(f"00-{trace_id:032x}-{_span_id('', seed)}-{int(sampled):02x}")


def child_of(parent: TraceContext, seed: str) -> TraceContext:
    """What the span of `seed` (a rid, an attempt and a leg, say) hands on as its own."""
    version, trace_id, span_id, flags = parent.traceparent.split("-")
    handed = f"{version}-{trace_id}-{_span_id(span_id, seed)}-{flags}"
    return TraceContext(handed, parent.tracestate)


def ids_of(context: TraceContext) -> tuple[int, int]:
    """Trace and span id."""
    _, trace_id, span_id, _ = context.traceparent.split("-")
    return int(trace_id, 16), int(span_id, 16)


def trace_id_of(context: TraceContext) -> str:
    """As logs have it."""
    return context.traceparent.split("-")[1]


def is_sampled(context: TraceContext) -> bool:
    """Whether whoever began the trace wants it recorded."""
    return bool(int(context.traceparent[-2:], 16) & 1)


def _span_id(parent: str, seed: str) -> str:
    digest = blake2b(f"{parent} {seed}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return digest if int(digest, 16) else "0" * 15 + "1"
