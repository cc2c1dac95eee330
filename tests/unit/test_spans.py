"""Spans as OpenTelemetry's SDK has them, from those who only hand over records."""

from __future__ import annotations

import builtins
import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from bus.errors import ConfigError
from bus.runtime import spans as spans_module
from bus.runtime.spans import QUEUE_MAX, Spans, exporter, exporting, provider_of
from bus.tracecontext import Span, child_of, ids_of, is_sampled, parse
from bus.wire.messages import TraceContext

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARENT = TraceContext(HEADER, "a=1")
VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED",
             "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_PROTOCOL")  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collected() -> Iterator[tuple[Spans, InMemorySpanExporter]]:
    memory = InMemorySpanExporter()
    spans = Spans(provider_of(memory, "controller", {"name": "controller-0"}))
    yield spans, memory
    spans.close()


def span(trace: TraceContext, parent: TraceContext | None, **changes: Any) -> Span:
    fields: dict[str, Any] = {
        "name": "pdbus request", "kind": "SERVER", "trace": trace, "parent": parent, "began_s": 1000.0,
        "ended_s": 1001.5, "attributes": {"gen_ai.request.model": "m", "pdbus.attempt": 1},
        "events": ((1000.5, "dispatched", "p/0"),),
    }  # fmt: skip
    return Span(**fields | changes)


def test_a_span_has_the_ids_that_its_children_were_told(collected: tuple[Spans, InMemorySpanExporter]) -> None:
    spans, memory = collected
    own = child_of(PARENT, "r/1")
    spans.add(own, lambda trace: span(trace, PARENT))
    spans.add(child_of(own, "r/1/decode"), lambda trace: span(trace, own, name="pdbus decode", kind="CONSUMER"))
    spans.close()
    request, leg = memory.get_finished_spans()
    trace_id, span_id = ids_of(own)
    assert (request.context.trace_id, request.context.span_id) == (trace_id, span_id)
    assert request.parent is not None
    assert request.parent.span_id == ids_of(PARENT)[1]
    assert request.parent.is_remote
    assert request.parent.trace_state.to_header() == "a=1"
    assert leg.parent is not None
    assert (leg.context.trace_id, leg.parent.span_id) == (trace_id, span_id)
    assert (request.start_time, request.end_time) == (1000 * 10**9, 1001_500_000_000)
    assert request.attributes == {"gen_ai.request.model": "m", "pdbus.attempt": 1}
    assert [(event.name, event.timestamp) for event in request.events] == [("dispatched", 1000_500_000_000)]
    assert request.status.is_ok or request.status.is_unset
    assert request.resource.attributes["service.name"] == "pdbus-controller"
    assert request.resource.attributes["service.instance.id"] == "controller-0"


def test_what_failed_says_so_and_what_nobody_samples_is_not_exported(
    collected: tuple[Spans, InMemorySpanExporter],
) -> None:
    spans, memory = collected
    silent = parse(HEADER[:-2] + "00")
    assert silent is not None
    spans.add(silent, lambda trace: span(child_of(trace, "r"), trace))
    spans.add(PARENT, lambda trace: span(child_of(trace, "r"), trace, error="peer_lost: gone"))
    spans.close()
    (failed,) = memory.get_finished_spans()
    assert failed.status.description == "peer_lost: gone"
    assert not failed.status.is_ok


def test_a_record_that_makes_no_span_costs_that_span_alone(collected: tuple[Spans, InMemorySpanExporter]) -> None:
    spans, memory = collected
    with capture_logs() as logs:
        spans.add(None, lambda record: span(record, None))  # type: ignore[arg-type]
        spans.add(child_of(PARENT, "r"), lambda trace: span(trace, PARENT))
        spans.close()
    assert len(memory.get_finished_spans()) == 1
    assert [line["event"] for line in logs] == ["span.failed"]


def test_whoever_hands_over_waits_for_nobody_and_too_much_is_dropped_and_told(
    collected: tuple[Spans, InMemorySpanExporter],
) -> None:
    spans, memory = collected
    hold, held = threading.Event(), threading.Event()

    def slow(trace: TraceContext) -> Span:
        held.set()
        hold.wait(30)
        return span(trace, PARENT)

    spans.add(child_of(PARENT, "r"), slow)
    assert held.wait(30)
    for _ in range(QUEUE_MAX + 10):
        spans.add(child_of(PARENT, "r"), lambda trace: span(trace, PARENT))
    assert spans.dropped == 10
    hold.set()
    with capture_logs() as logs:
        spans.close()
    assert logs == [{"event": "spans.dropped", "count": 10, "log_level": "warning"}]
    assert memory.get_finished_spans()


def test_a_trace_that_begins_here_goes_by_the_sampler(
    monkeypatch: pytest.MonkeyPatch, collected: tuple[Spans, InMemorySpanExporter]
) -> None:
    spans, memory = collected
    root = spans.begin("r", "POST /v1/chat/completions")
    assert is_sampled(root)
    assert root != spans.begin("r", "POST /v1/chat/completions")
    spans.add(root, lambda trace: span(trace, None))
    spans.close()
    (made,) = memory.get_finished_spans()
    assert made.parent is None
    assert (made.context.trace_id, made.context.span_id) == ids_of(root)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with_sampler = Spans(provider_of(InMemorySpanExporter(), "edge", {}))
    assert not is_sampled(with_sampler.begin("r", "POST /generate"))
    with_sampler.close()


def test_it_is_off_unless_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exporter("", "node") is None
    with exporting("", "node") as none:
        assert none is None
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        monkeypatch.setenv(name, value)
        assert exporter("http://127.0.0.1:1", "node") is None
        monkeypatch.delenv(name)
    with exporting("http://127.0.0.1:1/", "node") as said:
        assert said is not None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with exporting("", "node") as named:
        assert named is not None


def test_without_the_sdk_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return usual(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        exporter("http://127.0.0.1:4318", "node")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    with capture_logs() as logs:
        assert exporter("", "node") is None, "a variable may be meant for others: the part starts"
    (off,) = [line for line in logs if line["event"] == "spans.off"]  # another test's exporter may still say something
    assert spans_module.OTEL_EXTRA in off["why"]


def test_a_collector_that_is_not_there_is_a_line_in_the_log_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    class Log:
        def warning(self, event: str, why: str) -> None:
            said.put((event, why))

    monkeypatch.setattr(spans_module, "log", Log())
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    sdk = logging.getLogger("opentelemetry")
    before = sdk.handlers, sdk.propagate
    try:
        spans = exporter("http://127.0.0.1:9", "node")
        assert spans is not None
        for _ in range(3):
            spans.add(child_of(PARENT, "r"), lambda trace: span(trace, PARENT))
        event, why = said.get(timeout=60)
        spans.close()
    finally:
        sdk.handlers, sdk.propagate = before
    assert event == "spans.unsent"
    assert "127.0.0.1" in why
    assert said.empty(), "once in a while"


def test_another_protocol_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with capture_logs() as logs:
        assert exporter("", "node") is None
    assert "http/protobuf" in logs[0]["why"]
