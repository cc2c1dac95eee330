"""Rows as text: the table that people read, and the JSON object that programs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row

HEADINGS = ("case", "metric", "value", "spread", "floor", "ratio", "aim", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row, under HEADINGS."""
    met = {True: "met", False: "missed", None: ""}[row.met]
    return (
        row.case,
        row.metric,
        f"{number(row.value)} {row.unit}",
        f"±{100 * row.spread:.0f}%" if row.spread is not None else "",
        f"{number(row.floor)} {row.unit}" if row.floor is not None else "",
        f"{row.ratio:.2f}×" if row.ratio is not None else "",
        row.aim.text(row.unit) if row.aim else "",
        met,
    )


def number(value: float) -> str:
    """Return a number with three significant digits and a comma between thousands."""
    if abs(value) >= 999.5:
        return f"{round(value, 3 - len(str(round(abs(value))))):,.0f}"
    return f"{value:.3g}"


def show(console: Console, title: str, rows: Iterable[Row]) -> None:
    """Print the rows as a table; missed aims are yellow."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("case", "metric", "aim", "") else "right")
    for row in rows:
        style = "yellow" if row.met is False else None
        table.add_row(*cells(row), style=style)
    console.print(table)


def markdown(results: Iterable[tuple[str, str, Sequence[Row]]]) -> str:
    """Return a section with a table for each (name, title, rows)."""
    lines: list[str] = []
    for name, title, rows in results:
        lines += [f"## {name}", "", title, "", "| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def as_json(results: Sequence[tuple[str, str, Sequence[Row]]]) -> str:
    """Return `{"name": ..., "rows": [...]}` as JSON; of several benchmarks, the name is `all` and each case begins with
    its own."""
    if len(results) == 1:
        name, _, rows = results[0]
        return json.dumps({"name": name, "rows": [row.as_json() for row in rows]}, ensure_ascii=False)
    every = [{**row.as_json(), "case": f"{name}: {row.case}"} for name, _, rows in results for row in rows]
    return json.dumps({"name": "all", "rows": every}, ensure_ascii=False)
