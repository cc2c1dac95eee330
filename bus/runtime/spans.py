"""Spans for an OpenTelemetry collector, made on a thread of their own after what they describe is over.

The serving thread only hands over a record and the function that turns it into a `Span`. Only this module imports
the SDK (extra `otel`), which reads the standard variables: OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER,
OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_* and so on.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from bus.errors import ConfigError
from bus.runtime.logs import adopt, get_logger
from bus.tracecontext import Span, ids_of, is_sampled, root_of
from bus.wire.messages import TraceContext

QUEUE_MAX = 8192  # records that wait for the thread; more are dropped, and counted
CLOSE_S = 2.0  # for the last ones to leave
LOG_S = 10.0  # between two log lines with the SDK's warnings
OTEL_EXTRA = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

log = get_logger("spans")
_R = TypeVar("_R")

otlp_endpoint_option = click.option(
    "--otlp-endpoint",
    default="",
    metavar="URL",
    help="Export spans of traced requests to this OTLP/HTTP collector  [default: $OTEL_EXPORTER_OTLP_ENDPOINT, if set]",
)


class Spans:
    """The exporter of one process's spans (the parts of a traced request's time). `provider` is the SDK's; all its work
    is done on this exporter's thread. `dropped` counts records that found the queue full."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._ids = provider.id_generator
        self._tracer = provider.get_tracer("pdbus")
        self._records: queue.SimpleQueue[tuple[Callable[[Any], Span], Any] | None] = queue.SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def begin(self, rid: str, name: str) -> TraceContext:
        """Return a new trace for a request that came without one; `rid` is the request's id, `name` its span's. The
        SDK's sampler decides whether it is recorded."""
        from opentelemetry.sdk.trace.sampling import Decision

        trace_id = secrets.randbits(128) or 1
        sampled = self._provider.sampler.should_sample(None, trace_id, name).decision is Decision.RECORD_AND_SAMPLE
        return root_of(trace_id, rid, sampled=sampled)

    def add(self, record: _R, span_of: Callable[[_R], Span]) -> None:
        """Hand over a record and the function that makes a Span of it, from any thread; this returns at once. Where
        QUEUE_MAX records wait, it is dropped."""
        if self._records.qsize() < QUEUE_MAX:
            self._records.put((span_of, record))
        else:
            self.dropped += 1

    def close(self) -> None:
        """Send what was handed over, within CLOSE_S, and stop. It blocks for so long at most."""
        self._records.put(None)
        self._thread.join(CLOSE_S)
        if self.dropped:
            log.warning("spans.dropped", count=self.dropped)

    def _run(self) -> None:
        while (item := self._records.get()) is not None:
            try:
                span_of, record = item
                self._export(span_of(record))
            except Exception:  # a span less; requests go on
                log.exception("span.failed")
        self._provider.force_flush(int(1000 * CLOSE_S))
        self._provider.shutdown()

    def _export(self, span: Span) -> None:
        from opentelemetry import trace as api

        if not is_sampled(span.trace):
            return
        context = api.set_span_in_context(api.INVALID_SPAN)
        if span.parent is not None:
            trace_id, span_id = ids_of(span.parent)
            state = api.TraceState.from_header([span.parent.tracestate] if span.parent.tracestate else [])
            flags = api.TraceFlags(api.TraceFlags.SAMPLED)
            remote = api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags, trace_state=state)
            context = api.set_span_in_context(api.NonRecordingSpan(remote))
        self._ids.trace_id, self._ids.span_id = ids_of(span.trace)
        made = self._tracer.start_span(
            span.name, context, api.SpanKind[span.kind], dict(span.attributes), start_time=_ns(span.began_s)
        )
        for at_s, what, detail in span.events:
            made.add_event(what, {"pdbus.detail": detail} if detail else None, _ns(at_s))
        if span.error:
            made.set_status(api.Status(api.StatusCode.ERROR, span.error))
        made.end(_ns(span.ended_s))


def provider_of(exporter: Any, part: str, resource: Mapping[str, str]) -> Any:
    """Return the SDK's provider, which sends spans in batches through `exporter`. `part` and `resource` (names and
    values, as the part's instance) describe this process in each span."""
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """The id generator: it gives the next span the ids that its children already have."""

        trace_id = span_id = 0

        def generate_span_id(self) -> int:
            return self.span_id

        def generate_trace_id(self) -> int:
            return self.trace_id

    ours = {SERVICE_NAME: f"pdbus-{part}", SERVICE_INSTANCE_ID: resource.get("name", ""), "pdbus.part": part}
    standard = Resource.create({}).attributes  # from the standard variables; where they are set, they win over ours
    named = {SERVICE_NAME: standard[SERVICE_NAME]} if "OTEL_SERVICE_NAME" in os.environ else {}
    extra = {f"pdbus.{name}": value for name, value in resource.items() if value}
    provider = TracerProvider(
        resource=Resource({**standard, **ours, **extra, **named}), id_generator=Ids(), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def exporter(endpoint: str, part: str, **resource: str) -> Spans | None:
    """Return the exporter of this process's spans to `endpoint`, or to the endpoint of the standard variables; None
    where neither is set.

    ConfigError when `endpoint` is given and the SDK is not installed. Where only a variable is set, which may be
    meant for other programs, the missing SDK is a line in the log.
    """
    env = os.environ
    named = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    if off or not (endpoint or named):
        return None
    why = ""
    if not endpoint and "grpc" in (
        env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
        env.get("OTEL_EXPORTER_OTLP_PROTOCOL"),
    ):
        why = "spans leave over HTTP alone: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        why = f"to export spans OpenTelemetry's SDK is needed: {OTEL_EXTRA}"
    if why and endpoint:
        raise ConfigError(why)
    if why:
        log.warning("spans.off", why=why)
        return None
    adopt("opentelemetry", lambda why: log.warning("spans.unsent", why=why[:300]), LOG_S)
    to = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces") if endpoint else OTLPSpanExporter()
    return Spans(provider_of(to, part, resource))


@contextmanager
def exporting(endpoint: str, part: str, **resource: str) -> Iterator[Spans | None]:
    """Give the result of `exporter` for a `with` block, and close it at the end."""
    spans = exporter(endpoint, part, **resource)
    try:
        yield spans
    finally:
        if spans is not None:
            spans.close()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
