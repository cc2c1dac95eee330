"""What a rank remembers of a leg: its record in short, and the marks that `pdbus trace` shows of it. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from bus.tracecontext import Span, child_of
from bus.wire.codes import Code
from bus.wire.messages import MAX_PHRASE, FinishReason, FoundBy, Mark, Role, TraceContext
from nodes.link.leg import NO_ROOM, Leg


class LegStory(Struct, frozen=True, gc=False, array_like=True):
    """Times are the process's clock; `first_token_at` and `ended_at` 0: it did not come to that."""

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
    marks: tuple[tuple[float, str, str], ...]
    trace: TraceContext | None


def story_of(leg: Leg) -> LegStory:
    """So far, or with its end."""
    return LegStory(
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
        tuple(leg.marks),
        leg.trace,
    )


def span_of(story: LegStory, rank: str, model: str, wall_s: float) -> Span:
    """Of a traced leg that is over, at `rank`. `wall_s` as above."""
    assert story.trace is not None
    attributes: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.request.id": story.rid,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "pdbus.rid": story.rid,
        "pdbus.attempt": story.attempt,
        "pdbus.leg": story.role,
        "pdbus.rank": rank,
        "pdbus.code": story.code,
        "pdbus.cached_tokens": story.cached_tokens,
    }
    if story.room != NO_ROOM:
        attributes["pdbus.room"] = str(story.room)  # of 63 bits: some backends have no such integers
    if story.role != "prefill":
        attributes["gen_ai.usage.output_tokens"] = story.output_tokens
        attributes["gen_ai.response.finish_reasons"] = [story.finish]
    if story.first_token_at:
        attributes["gen_ai.latency.time_to_first_token"] = story.first_token_at - story.taken_at
    return Span(
        f"pdbus {story.role}",
        "CONSUMER",
        child_of(story.trace, f"{story.rid}/{story.attempt}/{story.role}"),
        story.trace,
        wall_s + story.taken_at,
        wall_s + story.ended_at,
        attributes,
        f"{story.code}: {story.why}" if story.code != "ok" else "",
        tuple([(mark.at_us / 1e6, mark.what, mark.detail) for mark in marks_of(story, wall_s)]),
    )


def marks_of(story: LegStory, wall_s: float) -> list[Mark]:
    """In order of time. `wall_s` makes seconds since 1970 of the process's clock."""
    moments = [(story.taken_at, "taken", ""), *story.marks]
    if story.first_token_at and story.role != "prefill":
        moments.append((story.first_token_at, "first_token", ""))
    if story.ended_at:
        count = f", {story.output_tokens} tokens" if story.role != "prefill" else ""
        how = f"{story.finish}{count}" if story.code == "ok" else f"{story.code}: {story.why}{count}"
        moments.append((story.ended_at, "ended", how if story.code != "ok" or count else "KV cache fetched"))
    moments.sort(key=lambda moment: moment[0])
    return [
        Mark(round((wall_s + at) * 1e6), what, story.attempt, story.role, detail[:MAX_PHRASE])
        for at, what, detail in moments
    ]
