"""The record of a request for its history: the events that `pdbus trace` shows, and a span. Pure."""

from __future__ import annotations

from math import inf
from typing import Any, TypeAlias

from msgspec import Struct

from bus.tracecontext import Span
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_PHRASE,
    MAX_TRACE_EVENTS,
    Attempt,
    Legs,
    MemberKey,
    Model,
    Rid,
    Role,
    Session,
    TraceContext,
    TraceEvent,
)
from controller.requests.request import EventTuple, Request

LegRecord: TypeAlias = tuple[Role, MemberKey, float, float, int]  # its rank, dispatched, first output, output tokens


class RequestRecord(Struct, frozen=True, gc=False, array_like=True):
    """The record of one submit, kept after its end. Times are in seconds of the core's clock; inf: it has not
    happened."""

    rid: Rid
    attempt: Attempt  # the last
    room: int | None
    leg: Legs
    model: Model
    prompt_tokens: int
    asked_us: int
    came_at: float
    ended_at: float
    code: Code
    why: str
    past: tuple[EventTuple, ...]  # waits in the queue, and what was dispatched in earlier attempts
    legs: tuple[LegRecord, ...]  # of the last attempt
    parent: TraceContext | None
    trace: TraceContext | None
    session: Session

    @property
    def events(self) -> tuple[EventTuple, ...]:
        """The waits of the request, and the dispatches of each attempt, as `TraceEvent`s have them."""
        sent = [(began, "dispatched", self.attempt, role, "{}/{}".format(*key)) for role, key, began, _, _ in self.legs]
        return (*self.past, *sent)


def record_of(request: Request, ended_at: float = inf, code: Code = "ok", why: str = "") -> RequestRecord:
    """Return the record of a request, so far or with its end."""
    submit = request.submit
    legs: tuple[LegRecord, ...] = ()
    for leg in request.legs:
        tokens = 0 if leg.ended is None else leg.ended.output_tokens
        legs += ((leg.role, leg.rank.key, leg.began, leg.first_at, tokens),)
    return RequestRecord(
        submit.rid,
        request.attempt,
        submit.bootstrap_room,
        submit.leg,
        request.model,
        submit.prompt_tokens,
        submit.asked_us,
        request.came_at,
        ended_at,
        code,
        why,
        request.past,
        legs,
        submit.trace,
        request.trace,
        submit.session,
    )


def trace_events_of(record: RequestRecord, wall_s: float) -> tuple[TraceEvent, ...]:
    """Return all events of the record in order of time, at most MAX_TRACE_EVENTS of the newest. `wall_s` plus the
    core's clock is seconds since 1970."""
    last = record.attempt
    first = min((first_at for role, _, _, first_at, _ in record.legs if role != "prefill"), default=inf)
    end = "failed" if record.code != "ok" else "done"
    detail = f"{record.code}: {record.why}" if record.code != "ok" else ""
    events: list[EventTuple] = [
        (
            record.came_at,
            "received",
            record.past[0][2] if record.past else last,
            None,
            f"{record.prompt_tokens} tokens" + (f", session {record.session}" if record.session else ""),
        ),
        *record.events,
        (first, "output_reported", last, None, ""),
        (record.ended_at, end, last, None, detail),
    ]
    events.sort(key=lambda moment: moment[0])
    return tuple(
        TraceEvent(round((wall_s + at) * 1e6), what, attempt, leg, detail[:MAX_PHRASE])
        for at, what, attempt, leg, detail in events[-MAX_TRACE_EVENTS:]
        if at != inf
    )


def span_of(record: RequestRecord, wall_s: float) -> Span:
    """Return the span (OpenTelemetry's record) of a traced request that has ended. `wall_s` plus the core's clock is
    seconds since 1970."""
    assert record.trace is not None
    events = trace_events_of(record, 0.0)
    attributes: dict[str, Any] = {
        "gen_ai.request.model": record.model,
        "gen_ai.request.id": record.rid,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "pdbus.rid": record.rid,
        "pdbus.attempt": record.attempt,
        "pdbus.leg": record.leg,
        "pdbus.code": record.code,
    }
    if record.session:
        attributes["gen_ai.conversation.id"] = record.session
    if record.room is not None:
        attributes["pdbus.room"] = str(record.room)  # of 63 bits: some backends have no such integers
    for role, key, _, first_at, tokens in record.legs:
        attributes[f"pdbus.{role}.rank"] = f"{key[0]}/{key[1]}"
        if role != "prefill":
            attributes["gen_ai.usage.output_tokens"] = tokens
            if first_at != inf and record.came_at != inf:
                attributes["gen_ai.latency.time_to_first_token"] = first_at - record.came_at
    queued = [at for at, what, *_ in record.past if what == "queued"]
    if queued and record.legs:
        attributes["gen_ai.latency.time_in_queue"] = max(0.0, record.legs[0][2] - queued[0])
    return Span(
        "pdbus request",
        "SERVER",
        record.trace,
        record.parent,
        wall_s + min(record.came_at, *(began for _, _, began, _, _ in record.legs), record.ended_at),
        wall_s + record.ended_at,
        attributes,
        f"{record.code}: {record.why}" if record.code != "ok" else "",
        tuple([(wall_s + event.at_us / 1e6, event.what, event.detail) for event in events]),
    )


def ranks_of(record: RequestRecord) -> set[str]:
    """Return the ranks that got legs of the request, as `instance/dp_rank`."""
    return {detail for _, what, _, _, detail in record.events if what == "dispatched"}
