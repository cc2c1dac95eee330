"""The drawing of one request's life in a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.runtime.cli import printable
from bus.wire.messages import TraceEvent, TraceReply
from pdbus.trace.hops import LABELS, Hop, hops_of, reasons_of, seconds

STYLES = {"prefill": "cyan", "decode": "green", "unified": "green", "client": "magenta", "": "yellow"}
GAP = 2  # between columns
BAR_MIN = 16
WORDS_MIN = 22


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
