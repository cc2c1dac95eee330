"""`pdbus anchors`: figures that others published, with ours beside each. Owns the command line and the output;
`pdbus.lab.anchors` has the figures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bus.errors import ConfigError
from pdbus.commands.lab import option, run_virtual, table_console, write_json
from pdbus.lab.anchors import Row, Side, Traces, anchors, cpu_s, measure
from pdbus.lab.plots import prepare, write_anchors
from pdbus.lab.tables import Column, written
from pdbus.lab.traces import Trace

NAMES = tuple(dict.fromkeys(each.name for each in anchors()))
WIDTH = 160  # of a table outside a terminal
RATIO = Column("", ("", ""), "", 2)


@click.command(
    "anchors",
    epilog="Each figure is a ratio, ours of two runs in virtual time (mean of the seeds, with its 95 % interval). It "
    "agrees where it is from half to one and a half times as strong, by its logarithm; it is open where its interval "
    "crosses an end of that band.",
)
@option("--only", "names", multiple=True, type=click.Choice(NAMES), show_default=False,
        help="The source whose figures are wanted; several may be named.")  # fmt: skip
@option("--weka", type=click.Path(path_type=Path), default=None, show_default=False,
        help="WEKA's sessions, more than 32: a file or a folder.")  # fmt: skip
@option("--conversation", type=click.Path(path_type=Path, dir_okay=False), default=None, show_default=False,
        help="Mooncake's conversation trace.")  # fmt: skip
@option("--seed", type=click.IntRange(0), default=1, help="Seed for all random draws.")
@option("--seeds", type=click.IntRange(1, 100), default=3, metavar="N", help="Runs of each side, from --seed on.")
@option("--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), help="Runs at once.")
@option("--out", type=click.Path(path_type=Path, file_okay=False), default=None, show_default=False,
        help="Write anchors.png and anchors.json there.")  # fmt: skip
@option("--markdown", is_flag=True, help="Print the table for a document.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(names: Sequence[str], **options: Any) -> None:
    """Print figures that others published with ours beside each: ratios, of generated sessions and of files that you
    name. It takes some minutes."""
    out: Path | None = options["out"]
    if out is not None:
        prepare(out)
    wanted = [each for each in anchors() if not names or each.name in names]
    needed = {each.over.trace for each in wanted if each.over is not None}
    given = {name: options[name] for name in ("weka", "conversation") if options[name] is not None}
    if unused := [name for name in given if name not in needed]:
        raise ConfigError(f"--{unused[0]} is for {_user_of(unused[0])}, which --only leaves out")
    console = Console(stderr=True)
    traces = Traces(given)
    seeds = range(options["seed"], options["seed"] + options["seeds"])

    def clock(side: Side, trace: Trace) -> float:
        console.print(f"replaying {len(trace):,} requests, to measure the time", highlight=False)
        return cpu_s(side, trace)

    began = time.monotonic()
    rows = measure(wanted, traces, seeds, lambda runs: run_virtual(runs, options["jobs"], console), clock)
    console.print(f"{len(rows)} figures in {time.monotonic() - began:.0f} s", highlight=False)
    data = {"version": version("pdbus"), "seeds": [*seeds], "anchors": [row.figures for row in rows]}
    if options["as_json"]:
        click.echo(json.dumps(data))
    elif options["markdown"]:
        click.echo(markdown_of(rows))
    else:
        table_console(WIDTH).print(table_of(rows, len(seeds)))
    if out is not None:
        write_anchors(rows, out / "anchors.png", f"{len(seeds)} seeds, from {seeds[0]} on")
        write_json(out / "anchors.json", data)
        console.print(f"wrote {out / 'anchors.png'}, {out / 'anchors.json'}")


def table_of(rows: Sequence[Row], seeds: int) -> Group:
    """Return the table for a terminal, with what is to be said of single figures, and the sources, below it."""
    table = Table(box=SIMPLE_HEAD)
    for heading, side in (("", "left"), ("figure", "left"), ("theirs", "right"), ("ours", "right"), ("band", "right")):
        table.add_column(heading, justify=side, no_wrap=heading != "figure")  # type: ignore[arg-type]
    table.add_column("agrees", no_wrap=True)
    before = ""
    for row in rows:
        name = row.anchor.name
        table.add_row(name if name != before else "", *_cells(row), style="yellow" if row.agrees == "no" else None)
        before = name
    interval = f"ours: mean of {seeds} seeds ±95 % confidence interval (Student's t)"
    notes = [f"{name}: {text}" for name, text in (*_notes(rows), *_sources(rows))]
    return Group(table, Text("\n".join([interval, *notes]), style="dim"))


def markdown_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, with the same below it as a list."""
    lines = ["| | figure | theirs | ours | band | agrees |", "| --- | --- | ---: | ---: | ---: | --- |"]
    lines += [f"| {row.anchor.name} | {' | '.join(_cells(row))} |" for row in rows]
    lines += ["", *(f"- {name}: {text}." for name, text in (*_notes(rows), *_sources(rows)))]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row but the first: the figure's name, theirs, ours, the band, and whether they agree."""
    anchor, band = row.anchor, row.anchor.band
    theirs = " to ".join(f"{each:.2f}" for each in anchor.theirs) or "none"
    ours = "–" if row.ours is None else written(RATIO, row.ours)
    within = "–"
    if band is not None:
        within = f"≤ {band[1]:.2f}" if anchor.times else f"{band[0]:.2f} to {band[1]:.2f}"
    return anchor.case, theirs, ours, within, row.agrees


def _notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what is to be said of single figures, once each, with the name of their source."""
    return list(dict.fromkeys((row.anchor.name, row.note) for row in rows if row.note))


def _sources(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.anchor.name, row.anchor.source) for row in rows))


def _user_of(trace: str) -> str:
    return next(each.name for each in anchors() if each.over is not None and each.over.trace == trace)
