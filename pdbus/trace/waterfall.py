"""The drawing of one request's life in a terminal. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bus.runtime.cli import printable
from bus.wire.messages import TraceReply
from pdbus.trace.hops import NO_REASONS, Hop, attempts_of, hops_of, notes_of, reasons_of, seconds, title_of, words_of

STYLES = {"prefill": "cyan", "decode": "green", "unified": "green", "client": "magenta", "": "yellow"}
GAP = 2  # between columns
BAR_MIN = 16
WORDS_MIN = 22


def why(answer: TraceReply) -> RenderableType:
    """Return the drawing of the reasons: for each leg what its method compared, and what reports said later."""
    lines = [Text(NO_REASONS, style="dim")] if not (found := reasons_of(answer)) else []
    for reasons in found:
        lines.append(Text(reasons.title, style=STYLES[reasons.leg]))
        lines += [Text(f"  {printable(sentence)}") for sentence in reasons.sentences]
    return Group(Text(), *lines)


def waterfall(rid: str, answer: TraceReply, width: int) -> RenderableType:
    """Return the drawing at `width` columns, 80 or more: a line for each hop, whose bar covers the time that it took,
    then notes about clocks, parts that did not answer, and other requests with such an id."""
    hops = hops_of(answer)
    whole_s = max((hop.at_s for hop in hops), default=0.0)
    rows: list[tuple[Text, ...]] = []
    attempts = attempts_of(hops)
    for hop in hops:
        what, number, rest = words_of(hop, attempts)
        text = Text(printable(what), style="bold red" if hop.bad else "")
        text.append(number, style="bold")
        text.append(printable(rest), style="" if hop.bad or hop.event.what == "dispatched" else "dim")
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
    return Group(Text(printable(title_of(rid, answer, hops)), style="bold"), Text(), table, Text(), *_notes(answer))


def _style(hop: Hop) -> str:
    return STYLES["client" if hop.part == "client" else hop.event.leg or ""]


def _bar(hop: Hop, whole_s: float, width: int) -> str:
    scale = (width - 1) / whole_s if whole_s else 0.0
    end = round(hop.at_s * scale)
    begin = round((hop.at_s - max(0.0, hop.took_s or 0.0)) * scale)
    return " " * begin + ("█" * (end - begin) or "▏")


def _notes(answer: TraceReply) -> list[Text]:
    return [Text(printable(note), style="dim") for note in notes_of(answer)]
