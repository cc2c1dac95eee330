"""The events that the parts (client, controller, ranks) recorded of one request, in order of time. A leg is one rank's
share of the request (prefill, decode, or unified: both); a retry is a new attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bus.wire.messages import TraceEvent, TraceReply

LABELS = {  # the name of an event, and how it is shown
    "asked": "asked for",
    "received": "received",
    "queued": "queued",
    "dispatched": "dispatched",
    "retried": "leg failed, tried again",
    "taken": "taken in",
    "located": "prefill rank found",
    "began": "began",
    "held": "prompt computed",
    "handed": "KV cache ready",
    "fetched": "KV cache fetched",
    "attached": "client attached",
    "first_token": "first token",
    "output_reported": "first token reported",
    "ended": "leg over",
    "done": "done",
    "failed": "failed",
}
NO_REASONS = "No reasons were kept: controllers keep those of one request in --explain."
WHY = ("weighed", "acknowledged")  # events that say why a leg went to its rank


@dataclass(frozen=True, slots=True)
class Hop:
    """`event` of `part`, `at_s` seconds after the first event of all, by the controller's clock. It took `took_s`
    seconds from the event that it followed from (None: there is none)."""

    part: str
    event: TraceEvent
    at_s: float
    took_s: float | None

    @property
    def bad(self) -> bool:
        """True if it is a failure."""
        return self.event.what in ("retried", "failed")


class Reasons(NamedTuple):
    """The reasons why a leg went to its rank."""

    attempt: int
    leg: str
    sentences: tuple[str, ...]

    @property
    def title(self) -> str:
        """The leg that it is, as a heading."""
        return f"why this {self.leg} rank, attempt {self.attempt}"


def hops_of(answer: TraceReply) -> list[Hop]:
    """Return the events of all parts in order of time, on the controller's clock. Where a part's clock offset is
    unknown, its times are taken as they are; the client's are moved before the controller's receipt."""
    at_us: list[tuple[int, int, str, TraceEvent]] = []
    for order, trace in enumerate(answer.parts):
        events = [event for event in trace.events if event.what not in WHY]
        at_us += [(event.at_us - trace.offset_us, order, trace.part, event) for event in events]
    received = min((at for at, _, _, event in at_us if event.what == "received"), default=None)
    if received is not None:  # the client's clock is not known, but it sent before the controller received
        at_us = [(min(at, received) if part == "client" else at, n, part, event) for at, n, part, event in at_us]
    at_us.sort(key=lambda each: each[:2])
    hops: list[Hop] = []
    for at, _, part, event in at_us:
        at_s = (at - at_us[0][0]) / 1e6
        before = _before(part, event, hops)
        hops.append(Hop(part, event, at_s, at_s - before.at_s if before is not None else None))
    return hops


def _before(part: str, event: TraceEvent, hops: Sequence[Hop]) -> Hop | None:
    """Return the hop that `event` followed from: at a rank the mark before it of the same leg, or the leg's dispatch;
    else, where it tells of an output or an end, whatever came last; else the last mark that is no rank's."""
    of_leg = [hop for hop in hops if (hop.event.attempt, hop.event.leg) == (event.attempt, event.leg)]
    if event.leg is not None and event.what not in ("dispatched", "retried"):
        here = [hop for hop in of_leg if hop.part == part and hop.event.what != "attached"]
        mine = here or [hop for hop in of_leg if hop.event.what == "dispatched"]
        return mine[-1] if mine else None
    if event.what in ("output_reported", "done", "failed", "retried"):
        return hops[-1] if hops else None
    others = [hop for hop in hops if hop.event.leg is None or hop.event.what == "retried"]
    return others[-1] if others else None


def as_dict(rid: str, answer: TraceReply) -> dict[str, Any]:
    """Return the trace for JSON output. `at_us` is on the controller's clock in microseconds. `rid` is used where the
    answer has none."""
    hops = hops_of(answer)
    offsets = {part.part: part.offset_us for part in answer.parts}
    return {
        "rid": answer.rid or rid,
        "others": list(answer.others),
        "controller": answer.controller,
        "marks": [
            {
                "at_us": hop.event.at_us - offsets[hop.part], "at_s": round(hop.at_s, 6),
                "took_s": None if hop.took_s is None else round(hop.took_s, 6), "part": hop.part,
                "what": hop.event.what, "attempt": hop.event.attempt, "leg": hop.event.leg, "detail": hop.event.detail,
            }
            for hop in hops
        ],
        "why": [
            {"attempt": event.attempt, "leg": event.leg, "what": event.what, "detail": event.detail}
            for event in _why(answer)
        ],
        "clocks": [{"part": t.part, "offset_us": t.offset_us, "rtt_us": t.rtt_us} for t in answer.parts],
        "silent": list(answer.silent),
    }  # fmt: skip


def reasons_of(answer: TraceReply) -> list[Reasons]:
    """Return why the legs went to their ranks, a leg each, in order: what was compared, and what reports said later."""
    legs: dict[tuple[int, str], list[TraceEvent]] = {}
    for event in _why(answer):
        legs.setdefault((event.attempt, event.leg or ""), []).append(event)
    return [
        Reasons(*leg, tuple([event.detail for event in sorted(events, key=lambda each: each.at_us)]))
        for leg, events in legs.items()
    ]


def _why(answer: TraceReply) -> list[TraceEvent]:
    return [event for trace in answer.parts for event in trace.events if event.what in WHY]


def attempts_of(hops: Sequence[Hop]) -> int:
    """Return the number of attempts that the hops are of."""
    return len({hop.event.attempt for hop in hops if hop.event.attempt})


def words_of(hop: Hop, attempts: int) -> tuple[str, str, str]:
    """Return the hop in words: what happened, in which attempt where there are several, and the rest."""
    event = hop.event
    number = f" #{event.attempt}" if attempts > 1 and event.attempt else ""
    to_rank = event.what == "dispatched" and event.leg
    rest = f" to {event.detail}" if to_rank else f", {event.detail}" if event.detail else ""
    return LABELS.get(event.what, event.what), number, rest


def title_of(rid: str, answer: TraceReply, hops: Sequence[Hop]) -> str:
    """Return what became of the request (`rid`, where the answer says none), as a line."""
    ends = [hop.event.what for hop in hops if hop.event.what in ("done", "failed")]
    how = {"done": "done", "failed": "failed"}.get(ends[-1] if ends else "", "still under way")
    attempts = attempts_of(hops)
    tries = f", {attempts} attempts" if attempts > 1 else ""
    return f"{answer.rid or rid}: {how} after {seconds(max((hop.at_s for hop in hops), default=0.0))}{tries}"


def notes_of(answer: TraceReply) -> list[str]:
    """Return notes: clock offsets, parts that did not answer, and other rids that begin so."""
    clocks = [
        f"{part.part} {part.offset_us / 1000:+.1f} ms (±{part.rtt_us / 2000:.1f})"
        for part in answer.parts
        if part.rtt_us > 0
    ]
    unknown = [part.part for part in answer.parts if part.rtt_us < 0]
    lines = []
    if clocks:
        lines.append(f"clocks beyond {answer.controller}'s, taken off above: {', '.join(clocks)}")
    if unknown:
        lines.append(f"clock not known: {', '.join(unknown)}")
    if answer.others:
        lines.append(f"others that begin so: {', '.join(answer.others)}")
    if answer.silent:
        lines.append(f"did not answer, so what it knows is missing: {', '.join(answer.silent)}")
    return lines


def unknown(rid: str, answer: TraceReply) -> str:
    """Return that no part knows the request, as a sentence."""
    last = "the last request" if answer.kept == 1 else f"the last {answer.kept} requests"
    kept = f"{answer.controller} remembers {last}, of {answer.kept_s:.0f} s"
    if not answer.kept:
        kept = f"{answer.controller} remembers none (it has just started, or --trace-bytes is 0)"
    silent = f"; no answer from {', '.join(answer.silent)}" if answer.silent else ""
    return f"no part knows a request {rid!r}: {kept}{silent}"


def seconds(value: float) -> str:
    """Return a time, given in seconds, in words: to a tenth of a millisecond if it is short."""
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if value < 0.09995 else f"{value * 1000:.0f} ms"
    return f"{value:.3f} s" if value < 9.9995 else f"{value:.1f} s"
