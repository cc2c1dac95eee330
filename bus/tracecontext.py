"""W3C Trace Context: reading its headers, and the contexts and ids of our own spans. Pure.

A span's id is computed from its parent's id and from what the span describes. So cores need no random numbers, and a
request that is submitted or dispatched again unchanged keeps its spans.
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
    """A span; times are in seconds since 1970. `error` is the reason of a failure, else empty."""

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
    """Return the context in the two headers; None where they are invalid. Of a later version, the known part is
    used."""
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    flags = f"{int(flags, 16) & 1:02x}"
    return TraceContext(f"00-{trace_id}-{span_id}-{flags}", tracestate if len(tracestate) <= STATE_MAX else "")


def root_of(trace_id: int, seed: str, *, sampled: bool) -> TraceContext:
    """Return the context of a new trace, whose first span is that of `seed` (a text, usually the rid). `sampled`: it is
    to be recorded."""
    return TraceContext(f"00-{trace_id:032x}-{_span_id('', seed)}-{int(sampled):02x}")


def child_of(parent: TraceContext, seed: str) -> TraceContext:
    """Return the context of the span of `seed` (for example a rid, an attempt and a leg) under `parent`."""
    version, trace_id, span_id, flags = parent.traceparent.split("-")
    handed = f"{version}-{trace_id}-{_span_id(span_id, seed)}-{flags}"
    return TraceContext(handed, parent.tracestate)


def ids_of(context: TraceContext) -> tuple[int, int]:
    """Return the trace id (128 bits) and the span id (64 bits) of a context, as ints."""
    _, trace_id, span_id, _ = context.traceparent.split("-")
    return int(trace_id, 16), int(span_id, 16)


def trace_id_of(context: TraceContext) -> str:
    """Return the trace id in the form that logs use: 32 hexadecimal digits."""
    return context.traceparent.split("-")[1]


def is_sampled(context: TraceContext) -> bool:
    """Return true if the sender that began the trace wants it recorded."""
    return bool(int(context.traceparent[-2:], 16) & 1)


def _span_id(parent: str, seed: str) -> str:
    digest = blake2b(f"{parent} {seed}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return digest if int(digest, 16) else "0" * 15 + "1"
