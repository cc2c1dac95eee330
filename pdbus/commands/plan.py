"""`pdbus plan`: finds the best use of a number of ranks for a trace, in virtual time. Owns the command line and the
output; `pdbus.lab.plan` searches."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bus.runtime import cli
from controller.config import ControllerConfig
from pdbus.commands.lab import (
    GENERATED_S,
    html_option,
    option,
    run_virtual,
    save,
    setting,
    table_console,
    timing_option,
    timing_settings,
    traces_of,
    transfer_options,
    write_json,
)
from pdbus.explore.figures import Explored, Loads, ShownRun
from pdbus.explore.page import PageFile
from pdbus.lab.config import LabConfig
from pdbus.lab.plan import Found, Plan
from pdbus.lab.plan import plan as find
from pdbus.lab.plots import prepare, write_plan
from pdbus.lab.tables import COLUMNS, Column, number_or_none, written
from pdbus.lab.traces import Trace

_FROM_OPTIONS = ("cache_blocks", "decode_kv_tokens", "unified_kv_tokens", "chunk_tokens",
                 "link_s_per_token", "fetch_by_layer", "decode_cache", "report_delay_s",
                 "report_loss", "late_tokens", "overtake_tokens", "seed")  # fmt: skip
_SHOWN = ("slo_attainment", "ttft_mean_s", "ttft_p99_s", "ttft_p50_s", "tpot_mean_s", "tpot_p99_s", "cache_hit_rate")
EXPLORED = 5  # choices on the page of --html
WIDE = 160  # columns of the whole table


@click.command(
    epilog="It tries each split of the ranks first, then methods and orders at the best split, then the best choice at "
    "the neighbouring splits, and with decode admission where tokens are too slow; with --unified then a quarter, "
    "half, three quarters and all of the ranks as unified ones. Times are the trace's own."
)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@option("--ranks", type=click.IntRange(2, 512), default=16, help="All ranks together.")
@option("--unified", is_flag=True, show_default=False, help="Try unified ranks too, alone and beside the best split.")
@option("--slo-ttft", type=cli.Seconds(), default=2.0, metavar="SECONDS", help="Limit for the first token.")
@option(
    "--slo-tpot", type=cli.Seconds(), default=0.05, metavar="SECONDS", help="Limit for each further token, on average."
)
@option("--rate", type=click.FloatRange(0.001, 1000.0), default=1.0, help="Factor for the rate of requests.")
@timing_option
@option("--timing-scale", type=click.FloatRange(0.001, 1000.0), default=1.0, help="Factor for the duration of steps.")
@setting("cache_blocks", "KV memory of a prefill rank, in blocks of the trace; 0: 2,048,000 tokens.")
@setting("decode_kv_tokens", "KV memory of a decode rank.")
@setting("unified_kv_tokens", "KV memory of a unified rank.")
@setting("chunk_tokens", "Maximum of prompt tokens in a step.")
@transfer_options
@setting("report_delay_s", "Additional delay of load reports.")
@setting("report_loss", "Share of reports that never arrive.")
@setting("late_tokens", "Order slo: a rank with fewer queued tokens gets the next request.")
@setting("overtake_tokens", "Order slo: maximum of later work that is served before a request.")
@option("--duration-s", type=cli.Seconds(), default=None, show_default=False,
        help=f"Use the trace's first seconds; without TRACE: the length [default: all, {GENERATED_S:g}]")  # fmt: skip
@setting("seed", "Seed for all random draws.")
@option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=3,
    metavar="N",
    help="Runs of each choice, except in the first step.",
)
@option("--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), help="Runs at once.")
@option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=None, help="Write plan.png and plan.json there."
)
@html_option
@option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(trace: Path | None, **options: Any) -> None:
    """Find the best use of a number of ranks for TRACE (as in `pdbus replay`; without it, a generated trace): the split
    into prefill and decode ranks, the methods and the order with which most requests keep both SLOs."""
    config = LabConfig(
        **timing_settings(options["timing"], options["timing_scale"]),
        slo_ttft_s=options["slo_ttft"],
        slo_tpot_s=options["slo_tpot"],
        **{name: options[name] for name in _FROM_OPTIONS},
    )
    out: Path | None = options["out"]
    if out is not None:
        prepare(out)
    with ExitStack() as exits:
        page = exits.enter_context(PageFile(options["html"])) if options["html"] is not None else None
        _plan(trace, options, config, page)


def _plan(trace: Path | None, options: dict[str, Any], config: LabConfig, page: PageFile | None) -> None:
    """Search, and show what was found; the best choices in `page`."""
    out: Path | None = options["out"]
    seeds = range(config.seed, config.seed + options["seeds"])
    read = zip(seeds, traces_of(trace, options["duration_s"], seeds), strict=True)
    traces = [(each if each.timed else each.started(seed)).scaled(1 / options["rate"]) for seed, each in read]
    console = Console(stderr=True, quiet=options["as_json"])
    jobs, unified = options["jobs"], options["unified"]
    found = find(traces, options["ranks"], config, lambda runs: run_virtual(runs, jobs, console), unified=unified)
    names = ("ranks", "unified", "slo_ttft", "slo_tpot", "rate", "timing", "timing_scale", "seeds")
    asked = {name: options[name] for name in (*names, *_FROM_OPTIONS, "duration_s")}
    data = {"trace": str(trace) if trace else traces[0].name, "options": asked} | json_of(found)
    if options["as_json"]:
        click.echo(json.dumps(data))
    else:
        best = found.tried[0]
        shown = table_console(WIDE)
        shown.print(table_of(found, _SHOWN if shown.width >= WIDE else _SHOWN[:3]))
        click.echo(f"{best.choice} keeps {_cell('slo_attainment', best)} of the requests. To run it:")
        click.echo(f"  {command_of(best, config)}")
    title = f"{traces[0].name}, {len(traces[0]):,} requests, {options['ranks']} ranks"
    if page is not None:
        _explore(found, traces[0], config, page, title, jobs, console)
    if out is not None:
        write_plan(found, out / "plan.png", title)
        write_json(out / "plan.json", data)
        console.print(f"wrote {out / 'plan.png'}, {out / 'plan.json'}")


def _explore(
    found: Plan, trace: Trace, config: LabConfig, page: PageFile, title: str, jobs: int, console: Console
) -> None:
    """Run the best choices once more with the first seed, for what they decided, and write the page."""
    best = found.tried[:EXPLORED]
    runs = [replace(each.choice.run(trace, config), journaled=True) for each in best]
    shown = [
        ShownRun(str(each.choice), result.facts)
        for each, result in zip(best, run_virtual(runs, jobs, console), strict=True)
        if result.facts is not None
    ]
    columns = [_column(field) for field in _SHOWN]
    rows = [[str(each.choice), *(_cell(field, each) for field in _SHOWN)] for each in found.tried]
    notes = []
    if left := len(found.tried) - len(best):
        notes.append(f"{left} of the choices tried are in the table alone: the page shows the {EXPLORED} best.")
    notes.append(f"The runs are those of seed {config.seed}; the table has means over all seeds.")
    explored = Explored("plan", title, shown, [each.title for each in columns], rows, splits_of(found), notes)
    save(page, explored, console)


def splits_of(found: Plan) -> Loads:
    """Return the share of requests that keep both SLOs over the split, by methods and order."""
    lines: dict[str, dict[float, float]] = {}
    for each in (*found.splits, *found.tried):
        choice = each.choice
        if not choice.unified:
            name = str(choice).removeprefix(f"{choice.ranks}, ")
            lines.setdefault(name, {})[choice.prefill] = each.kept.mean
    ranks = found.tried[0].choice.prefill + found.tried[0].choice.decode + found.tried[0].choice.unified
    points = {name: sorted(each.items()) for name, each in lines.items()}
    return Loads(f"the number of prefill ranks, of {ranks} ranks", points)


def table_of(found: Plan, shown: Sequence[str]) -> Table:
    """Return a table with a row for each choice run with all seeds, the best first; `shown` are fields of `Summary`."""
    table = Table(box=SIMPLE_HEAD)
    unified = any(each.choice.unified for each in found.tried)
    ranks = "prefill\n+ decode" + "\n+ unified" * unified
    for heading in (ranks, "prefill\nmethod", "decode\nmethod", "queue\norder"):
        table.add_column(heading, no_wrap=True)
    for field in shown:
        table.add_column("\n".join(_column(field).heading), justify="right", no_wrap=True)
    for number, each in enumerate(found.tried):
        choice = each.choice
        order = choice.queue_order + (" + tpot" if choice.tpot_admission else "")
        numbers = [choice.prefill, choice.decode, *([choice.unified] if unified else [])]
        names = (
            " + ".join(map(str, numbers)),
            choice.prefill_method,
            choice.decode_method if choice.decode else "–",
            order,
        )
        table.add_row(*names, *(_cell(field, each) for field in shown), style=None if number else "bold")
    return table


def json_of(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON output: for each choice its settings, means over seeds, and half the width of their 95 %
    intervals (None with one seed)."""

    def row(each: Found) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for field in _SHOWN:
            mean = each.mean(field)
            figures[field] = number_or_none(mean.mean)
            figures[f"{field}_half_width"] = number_or_none(mean.half_width)
        return each.choice.settings() | figures

    return {"best": row(found.tried[0]), "tried": [*map(row, found.tried)], "splits": [*map(row, found.splits)]}


def command_of(found: Found, config: LabConfig) -> str:
    """Return the command line of a controller that runs this choice; options at their defaults are left out."""
    choice = found.choice
    order = f" --queue-order slo --ttft-slo-s {config.slo_ttft_s:g}" if choice.queue_order == "slo" else ""
    order += f" --tpot-slo-s {config.slo_tpot_s:g}" if choice.tpot_admission else ""
    for name in ("late_tokens", "overtake_tokens") if choice.queue_order == "slo" else ():
        if (value := getattr(config, name)) != getattr(ControllerConfig, name):
            order += f" --{name.replace('_', '-')} {value}"
    methods = f" --prefill-method {choice.prefill_method} --decode-method {choice.decode_method}" * bool(choice.decode)
    methods += f" --unified-method {choice.prefill_method}" if choice.unified else ""
    return f"python -m controller{methods}{order}"


def _column(field: str) -> Column:
    return next(column for column in COLUMNS if column.field == field)


def _cell(field: str, found: Found) -> str:
    return written(_column(field), found.mean(field))
