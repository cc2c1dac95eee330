"""The events that the parts (client, controller, ranks) recorded of one request, in order of time, and their drawing. A
leg is one rank's share of the request (prefill, decode, or unified: both); a retry is a new attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.runtime.cli import printable
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
STYLES = {"prefill": "cyan", "decode": "green", "unified": "green", "client": "magenta", "": "yellow"}
WHY = ("weighed", "acknowledged")  # events that say why a leg went to its rank
GAP = 2  # between columns
BAR_MIN = 16
WORDS_MIN = 22


@dataclass(frozen=True, slots=True)
class Hop:
    """`event` of `part`, `at_s` seconds after the first event of all, by the controller's clock. It took `took_s`
    seconds from the event that it followed from (None: there is none)."""

    part: str
    event: TraceEvent
    at_s: float
    took_s: float | None


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
            for event in reasons_of(answer)
        ],
        "clocks": [{"part": t.part, "offset_us": t.offset_us, "rtt_us": t.rtt_us} for t in answer.parts],
        "silent": list(answer.silent),
    }  # fmt: skip


def reasons_of(answer: TraceReply) -> list[TraceEvent]:
    """Return the events that say why legs went to their ranks, in order."""
    return [event for trace in answer.parts for event in trace.events if event.what in WHY]


def why(answer: TraceReply) -> RenderableType:
    """Return the drawing of the reasons: for each leg what its method compared, and what reports said later."""
    lines: list[Text] = []
    legs: dict[tuple[int, str], list[TraceEvent]] = {}
    for event in reasons_of(answer):
        legs.setdefault((event.attempt, event.leg or ""), []).append(event)
    for (attempt, leg), events in legs.items():
        lines.append(Text(f"why this {leg} rank, attempt {attempt}", style=STYLES[leg]))
        lines += [Text(f"  {printable(event.detail)}") for event in sorted(events, key=lambda each: each.at_us)]
    if not lines:
        lines = [Text("No reasons were kept: controllers keep those of one request in --explain.", style="dim")]
    return Group(Text(), *lines)


def waterfall(rid: str, answer: TraceReply, width: int) -> RenderableType:
    """Return the drawing at `width` columns, 80 or more: a line for each hop, whose bar covers the time that it took,
    then notes about clocks, parts that did not answer, and other requests with such an id."""
    hops = hops_of(answer)
    whole_s = max((hop.at_s for hop in hops), default=0.0)
    rows: list[tuple[Text, ...]] = []
    attempts = {hop.event.attempt for hop in hops if hop.event.attempt}
    for hop in hops:
        event = hop.event
        what = LABELS.get(event.what, event.what)
        text = Text(printable(what), style="bold red" if event.what in ("retried", "failed") else "")
        if len(attempts) > 1 and event.attempt:
            text.append(f" #{event.attempt}", style="bold")
        if event.what == "dispatched" and event.leg:
            text.append(f" to {printable(event.detail)}")
        elif event.detail:
            text.append(f", {printable(event.detail)}", style="" if text.style else "dim")
        took = "" if hop.took_s is None else seconds(hop.took_s)
        rows.append((Text(seconds(hop.at_s)), Text(took), Text(printable(hop.part), style=_style(hop)), text))
    used = [max((row[at].cell_len for row in rows), default=0) for at in range(3)]
    room = width - sum(used) - GAP * len(used) - 2 * GAP  # rich before 15 also pads after the bars
    words = min(max((row[3].cell_len for row in rows), default=0), max(WORDS_MIN, room - max(BAR_MIN, room // 3)))
    bar = max(1, room - words)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name, wide_as, side in zip(("at", "took", "part", "what"), (*used, words), ("right", "right", "left", "left"),
                                   strict=True):  # fmt: skip
        table.add_column(name, width=wide_as, justify=side, overflow="fold")  # type: ignore[arg-type]
    table.add_column(f"0 to {seconds(whole_s)}", width=bar, no_wrap=True)
    for hop, row in zip(hops, rows, strict=True):
        table.add_row(*row, Text(_bar(hop, whole_s, bar), style=_style(hop)))
    return Group(
        Text(_title(answer.rid or rid, hops, attempts, whole_s), style="bold"), Text(), table, Text(), *_notes(answer)
    )


def _style(hop: Hop) -> str:
    return STYLES["client" if hop.part == "client" else hop.event.leg or ""]


def _bar(hop: Hop, whole_s: float, width: int) -> str:
    scale = (width - 1) / whole_s if whole_s else 0.0
    end = round(hop.at_s * scale)
    begin = round((hop.at_s - max(0.0, hop.took_s or 0.0)) * scale)
    return " " * begin + ("█" * (end - begin) or "▏")


def _title(rid: str, hops: Sequence[Hop], attempts: set[int], whole_s: float) -> str:
    ends = [hop.event.what for hop in hops if hop.event.what in ("done", "failed")]
    how = {"done": "done", "failed": "failed"}.get(ends[-1] if ends else "", "still under way")
    tries = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    return f"{printable(rid)}: {how} after {seconds(whole_s)}{tries}"


def _notes(answer: TraceReply) -> list[Text]:
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
    return [Text(printable(line), style="dim") for line in lines]


def seconds(value: float) -> str:
    """Return a time, given in seconds, in words: to a tenth of a millisecond if it is short."""
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if value < 0.09995 else f"{value * 1000:.0f} ms"
    return f"{value:.3f} s" if value < 9.9995 else f"{value:.1f} s"
