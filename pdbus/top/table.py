"""The table of ranks of `pdbus top`, with as many columns as fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from pdbus.fleet.figures import DEAD, RankFigures
from pdbus.fleet.formatting import age, name_of, number, quantile_of, share
from pdbus.top.view import View, key_of
from pdbus.top.widgets import CHOSEN, DIM, HEAD, PLAIN, bar, colour_of


@dataclass(frozen=True)
class Column:
    """A column of the table. `show` returns the cell for a rank and a width; `meaning` is for the help page; `left`
    aligns it left. On a narrow screen the column with the least `worth` is left out first; on a wide one it `grows` by
    up to so many characters."""

    name: str
    width: int
    show: Callable[[RankFigures, int], Text | str]
    meaning: str
    worth: int = 9
    left: bool = False
    grows: int = 0


def _state(each: RankFigures, width: int) -> Text:
    if each.conditions:
        return Text(each.conditions[0].what, style="yellow")
    return Text(each.rank.state, style=colour_of(each.rank.state))


def _age(each: RankFigures, width: int) -> Text:
    age_s = each.rank.report_age_s
    return Text("never" if age_s < 0 else age(age_s), style=PLAIN if 0 <= age_s < 5 else "yellow")


def _load(each: RankFigures, width: int) -> Text:
    load = each.rank.load
    words = f"{load.running}+{load.waiting}" if load is not None else "-"
    return bar(each.slots, width - 6) + Text(f"{words:>6}")


def _kv(each: RankFigures, width: int) -> Text:
    return bar(each.kv, width - 5) + Text(f"{share(each.kv):>5}")


def _queued(each: RankFigures, width: int) -> str:
    return number(each.rank.load.waiting_tokens if each.rank.load is not None else None)


def _bad(count: int) -> Text:
    return Text(number(count), style="red" if count else DIM)


COLUMNS = (
    Column("state", 8, _state, "silent, lost, hung: no service; slow, full, link, cold: bad service", left=True),
    Column("for", 5, lambda each, _: age(each.rank.state_age_s), "how long in this state", 5),
    Column("age", 5, _age, "age of its last load report", 4),
    Column("load", 12, _load, "estimated requests of its run slots; running+waiting reported",
           left=True, grows=12),
    Column("kv", 9, _kv, "KV memory in use", left=True, grows=12),
    Column("queued", 6, _queued, "prompt tokens not yet computed or fetched", 3),
    Column("flight", 6, lambda each, _: number(each.rank.in_flight_requests), "requests sent, not acknowledged yet", 6),
    Column("req/s", 5, lambda each, _: number(each.requests_s), "requests ended a second"),
    Column("tok/s", 5, lambda each, _: number(each.tokens_s), "prefill: prompt tokens computed; others: output", 8),
    Column("ttft", 5, lambda each, _: quantile_of(each.ttft, 0.5), "time to first token, median; prefill: its part", 2),
    Column("ttft99", 6, lambda each, _: quantile_of(each.ttft, 0.99), "time to first token that 99 % stay below", 8),
    Column("tpot", 5, lambda each, _: quantile_of(each.tpot, 0.5), "time per output token after the first, median", 1),
    Column("tpot99", 6, lambda each, _: quantile_of(each.tpot, 0.99), "time per output token that 99 % stay below", 7),
    Column("hits", 4, lambda each, _: share(each.hits), "prompt tokens from its prefix cache", 6),
    Column("busy", 4, lambda each, _: share(each.busy), "prefill: share of time that its engine computed", 0),
    Column("bad", 4, lambda each, _: _bad(each.rank.failed_total), "legs that failed, in total"),
    Column("rst", 3, lambda each, _: _bad(each.rank.restarts), "how often it was restarted"),
)  # fmt: skip


def fitting(width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit into `width` characters, and the width of each; the bars get the remaining space."""
    columns = list(COLUMNS)
    while (over := sum(column.width + 1 for column in columns) - width) > 0:
        columns.remove(min(columns, key=lambda column: column.worth))
        if not columns:
            return []
    growing = sum(1 for column in columns if column.grows) or 1
    return [(column, column.width + min(column.grows, -over // growing)) for column in columns]


def table_of(ranks: Sequence[RankFigures], view: View, width: int, height: int) -> list[Text]:
    """Return at most `height` lines of `width` characters: a header, and a line for each rank in the given order. If
    not all fit, these are the ranks around the chosen one, and a last line counts the others."""
    name_width = min(max((len(name_of(each.rank)) for each in ranks), default=4), max(12, width // 4))
    columns = fitting(width - 1 - name_width)
    shown, hidden = _around(ranks, view, height - 1)
    lines = [_header(view, columns, name_width, width)]
    lines += [_row(each, columns, name_width, width, chosen=key_of(each) == view.chosen) for each in shown]
    return lines if not hidden else [*lines, Text.assemble((f" and {hidden} more ranks (up, down)", DIM))]


def _around(ranks: Sequence[RankFigures], view: View, room: int) -> tuple[Sequence[RankFigures], int]:
    if len(ranks) <= room:
        return ranks, 0
    room = max(1, room - 1)
    at = next((at for at, each in enumerate(ranks) if key_of(each) == view.chosen), 0)
    first = max(0, min(at - room // 2, len(ranks) - room))
    return ranks[first : first + room], len(ranks) - room


def _header(view: View, columns: list[tuple[Column, int]], name_width: int, width: int) -> Text:
    mark = "▲" if view.reverse else "▼"

    def word(name: str) -> str:
        return mark + name if name == view.sort else name

    line = " " + word("rank").ljust(name_width)
    for column, wide in columns:
        name = word(column.name)
        line = line.rstrip() if len(line) > 1 and len(name) > wide and line.endswith("  ") else line
        line += " " + (name.ljust(wide) if column.left else name.rjust(wide))
    return Text.assemble((line.ljust(width), HEAD))


def _row(each: RankFigures, columns: list[tuple[Column, int]], name_width: int, width: int, *, chosen: bool) -> Text:
    name = name_of(each.rank)
    name = name if len(name) <= name_width else "…" + name[1 - name_width :]
    line = Text.assemble(
        "▸" if chosen else " ", (name.ljust(name_width), "bold red" if each.rank.state in DEAD else "bold")
    )
    for column, wide in columns:
        shown = column.show(each, wide)
        cell = Text.assemble(shown if isinstance(shown, Text) else (shown, DIM if shown in ("-", "0") else PLAIN))
        gap = " " * max(0, wide - cell.cell_len)
        line.append(" " if column.left else " " + gap)
        line.append_text(cell)
        line.append(gap if column.left else "")
    if each.rank.state in DEAD:
        line.stylize(DIM)  # figures of its last report, whose age is among them
    if chosen:
        line.append(" " * max(0, width - line.cell_len))
        line.stylize_before(CHOSEN)
    return line
