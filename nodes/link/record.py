"""The record that a rank keeps of a leg (the share of a request that it ran), and the events that `pdbus trace` shows
of it. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from bus.tracecontext import Span, child_of
from bus.wire.codes import Code
from bus.wire.messages import MAX_PHRASE, FinishReason, FoundBy, Role, TraceContext, TraceEvent
from nodes.link.leg import NO_ROOM, Leg


class LegRecord(Struct, frozen=True, gc=False, array_like=True):
    """The record of a leg. Times are in seconds on the process's clock; `first_token_at` and `ended_at` are 0
    until there is a first token or an end. `events` are (time, what, detail)."""

    rid: str
    attempt: int
    role: Role
    room: int
    taken_at: float
    first_token_at: float
    ended_at: float
    code: Code
    why: str
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    found_by: FoundBy
    events: tuple[tuple[float, str, str], ...]
    trace: TraceContext | None


def record_of(leg: Leg) -> LegRecord:
    """Return the record of a leg that runs or is over."""
    return LegRecord(
        leg.rid,
        leg.attempt,
        leg.role,
        leg.room,
        leg.ingested_at,
        leg.ingested_at + leg.first_token_s if leg.started else 0.0,
        leg.ended_at,
        leg.code,
        leg.message,
        leg.finish,
        leg.prompt_tokens,
        leg.cached_at_prefill if leg.role == "decode" else leg.cached_tokens,
        len(leg.output),
        leg.found_by,
        tuple(leg.trace_events),
        leg.trace,
    )


def span_of(record: LegRecord, rank: str, model: str, wall_s: float) -> Span:
    """Return the OpenTelemetry span of a traced leg that is over. `rank` is its name, as in `decode-0/1`; `wall_s` is
    added to the process's clock to get seconds since 1970."""
    assert record.trace is not None
    attributes: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.request.id": record.rid,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "pdbus.rid": record.rid,
        "pdbus.attempt": record.attempt,
        "pdbus.leg": record.role,
        "pdbus.rank": rank,
        "pdbus.code": record.code,
        "pdbus.cached_tokens": record.cached_tokens,
    }
    if record.room != NO_ROOM:
        attributes["pdbus.room"] = str(record.room)  # of 63 bits: some backends have no such integers
    if record.role != "prefill":
        attributes["gen_ai.usage.output_tokens"] = record.output_tokens
        attributes["gen_ai.response.finish_reasons"] = [record.finish]
    if record.first_token_at:
        attributes["gen_ai.latency.time_to_first_token"] = record.first_token_at - record.taken_at
    return Span(
        f"pdbus {record.role}",
        "CONSUMER",
        child_of(record.trace, f"{record.rid}/{record.attempt}/{record.role}"),
        record.trace,
        wall_s + record.taken_at,
        wall_s + record.ended_at,
        attributes,
        f"{record.code}: {record.why}" if record.code != "ok" else "",
        tuple([(event.at_us / 1e6, event.what, event.detail) for event in trace_events_of(record, wall_s)]),
    )


def trace_events_of(record: LegRecord, wall_s: float) -> list[TraceEvent]:
    """Return the events of a leg, over or not, in order of time, for `pdbus trace`. `wall_s` is added to the process's
    clock to get seconds since 1970."""
    events = [(record.taken_at, "taken", ""), *record.events]
    if record.first_token_at and record.role != "prefill":
        events.append((record.first_token_at, "first_token", ""))
    if record.ended_at:
        count = f", {record.output_tokens} tokens" if record.role != "prefill" else ""
        how = f"{record.finish}{count}" if record.code == "ok" else f"{record.code}: {record.why}{count}"
        events.append((record.ended_at, "ended", how if record.code != "ok" or count else "KV cache fetched"))
    events.sort(key=lambda moment: moment[0])
    return [
        TraceEvent(round((wall_s + at) * 1e6), what, record.attempt, record.role, detail[:MAX_PHRASE])
        for at, what, detail in events
    ]
