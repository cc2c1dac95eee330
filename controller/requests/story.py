"""What became of a request, as it is told: the marks that `pdbus trace` shows, and a span. Pure."""

from __future__ import annotations

from math import inf
from typing import Any, TypeAlias

from msgspec import Struct

from bus.tracecontext import Span
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_MARKS,
    MAX_PHRASE,
    Attempt,
    Legs,
    Mark,
    MemberKey,
    Model,
    Rid,
    Role,
    TraceContext,
)
from controller.requests.request import Request

LegStory: TypeAlias = tuple[Role, MemberKey, float, float, int]  # its rank, dispatched, first output, output tokens
Moment: TypeAlias = tuple[float, str, Attempt, Role | None, str]  # as `Mark`


class Story(Struct, frozen=True, gc=False, array_like=True):
    """Of one submit. Times are the core's; inf: it did not come to that."""

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
    past: tuple[Moment, ...]  # waits in the queue, and what was dispatched in earlier attempts
    legs: tuple[LegStory, ...]  # of the last attempt
    parent: TraceContext | None
    trace: TraceContext | None

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Its waits, and what was dispatched in which attempt."""
        sent = [(began, "dispatched", self.attempt, role, "{}/{}".format(*key)) for role, key, began, _, _ in self.legs]
        return (*self.past, *sent)


def story_of(request: Request, ended_at: float = inf, code: Code = "ok", why: str = "") -> Story:
    """So far, or with its end."""
    submit = request.submit
    legs: tuple[LegStory, ...] = ()
    for leg in request.legs:
        tokens = 0 if leg.ended is None else leg.ended.output_tokens
        legs += ((leg.role, leg.rank.key, leg.began, leg.first_at, tokens),)
    return Story(
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
    )


def marks_of(story: Story, wall_s: float) -> tuple[Mark, ...]:
    """In order of time. `wall_s` makes seconds since 1970 of the core's."""
    last = story.attempt
    first = min((first_at for role, _, _, first_at, _ in story.legs if role != "prefill"), default=inf)
    end = "failed" if story.code != "ok" else "done"
    told = f"{story.code}: {story.why}" if story.code != "ok" else ""
    moments: list[Moment] = [
        (story.came_at, "received", story.past[0][2] if story.past else last, None, f"{story.prompt_tokens} tokens"),
        *story.moments,
        (first, "output_reported", last, None, ""),
        (story.ended_at, end, last, None, told),
    ]
    moments.sort(key=lambda moment: moment[0])
    return tuple(
        Mark(round((wall_s + at) * 1e6), what, attempt, leg, detail[:MAX_PHRASE])
        for at, what, attempt, leg, detail in moments[-MAX_MARKS:]
        if at != inf
    )


def span_of(story: Story, wall_s: float) -> Span:
    """Of a traced request that is over. `wall_s` as above."""
    assert story.trace is not None
    marks = marks_of(story, 0.0)
    attributes: dict[str, Any] = {
        "gen_ai.request.model": story.model,
        "gen_ai.request.id": story.rid,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "pdbus.rid": story.rid,
        "pdbus.attempt": story.attempt,
        "pdbus.leg": story.leg,
        "pdbus.code": story.code,
    }
    if story.room is not None:
        attributes["pdbus.room"] = str(story.room)  # of 63 bits: some backends have no such integers
    for role, key, _, first_at, tokens in story.legs:
        attributes[f"pdbus.{role}.rank"] = f"{key[0]}/{key[1]}"
        if role != "prefill":
            attributes["gen_ai.usage.output_tokens"] = tokens
            if first_at != inf and story.came_at != inf:
                attributes["gen_ai.latency.time_to_first_token"] = first_at - story.came_at
    queued = [at for at, what, *_ in story.past if what == "queued"]
    if queued and story.legs:
        attributes["gen_ai.latency.time_in_queue"] = max(0.0, story.legs[0][2] - queued[0])
    return Span(
        "pdbus request",
        "SERVER",
        story.trace,
        story.parent,
        wall_s + min(story.came_at, *(began for _, _, began, _, _ in story.legs), story.ended_at),
        wall_s + story.ended_at,
        attributes,
        f"{story.code}: {story.why}" if story.code != "ok" else "",
        tuple([(wall_s + mark.at_us / 1e6, mark.what, mark.detail) for mark in marks]),
    )


def ranks_of(story: Story) -> set[str]:
    """Where legs of it were sent, as `instance/dp_rank`."""
    return {detail for _, what, _, _, detail in story.moments if what == "dispatched"}
