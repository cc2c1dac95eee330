"""Traces at the edge: the W3C trace context of a request's headers, the one for the cluster, and the edge's own span
(its part of the trace, for an OpenTelemetry collector)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from bus.runtime.spans import Spans
from bus.tracecontext import Span, child_of, parse
from bus.wire.messages import TraceContext
from pdbus.client import Options

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/generate": "text_completion"}


class Answered(Struct, gc=False):
    """The record of a traced request, from which its span is made. Times are in seconds on the edge's clock; `parent`
    None: the trace begins here."""

    rid: str
    path: str
    model: str
    began_at: float
    parent: TraceContext | None
    trace: TraceContext
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: tuple[str, ...] = ()
    status: int = 0
    ended_at: float = 0.0


def follow(
    headers: Mapping[bytes, bytes], rid: str, path: str, model: str, began_at: float, spans: Spans | None
) -> tuple[Options, Answered | None]:
    """Return the trace options for the client library (empty: the request is not traced), and the record of the edge's
    span; None without an exporter (`spans`), when the headers' trace context is passed on unchanged."""
    given = headers.get(b"traceparent")
    state = headers.get(b"tracestate", b"").decode("latin-1")
    parent = parse(given.decode("latin-1"), state) if given is not None else None
    trace = parent
    if spans is not None:
        trace = child_of(parent, rid) if parent is not None else spans.begin(rid, f"POST {path}")
    if trace is None:
        return {}, None
    options: Options = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    record = Answered(rid, path, model, began_at, parent, trace)
    return options, record if spans is not None else None


def span_of(answered: Answered, wall_s: float) -> Span:
    """Return the span of an answered request. `wall_s` is added to the edge's clock to get seconds since 1970."""
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": answered.path,
        "http.response.status_code": answered.status,
        "gen_ai.operation.name": OPERATIONS[answered.path],
        "gen_ai.request.model": answered.model,
        "gen_ai.request.id": answered.rid,
        "gen_ai.usage.input_tokens": answered.prompt_tokens,
        "gen_ai.usage.output_tokens": answered.output_tokens,
        "gen_ai.response.finish_reasons": list(answered.finish),
        "pdbus.rid": answered.rid,
    }
    return Span(
        f"POST {answered.path}",
        "SERVER",
        answered.trace,
        answered.parent,
        wall_s + answered.began_at,
        wall_s + answered.ended_at,
        attributes,
        f"status {answered.status}" if answered.status >= 500 else "",
    )
