"""`pdbus replay`: what each balancing method would do on a trace. Owns the command line; the lab does the work."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bus.errors import ConfigError
from bus.runtime import cli
from pdbus.commands.lab import GENERATED_S, option, run_virtual, setting, timing_option, timing_settings, traces_of
from pdbus.lab.choosers import METHODS, check_method
from pdbus.lab.compare import Result, Run, result_of, row_of
from pdbus.lab.config import LabConfig
from pdbus.lab.live import comparable, run_live
from pdbus.lab.plots import prepare, write_plots
from pdbus.lab.simulate import simulate
from pdbus.lab.tables import COLUMNS, json_of, markdown_of, table_of
from pdbus.lab.traces import Trace

DEFAULT_METHODS = "follow_bootstrap_room,round_robin,total_tokens,cache_aware,oracle"
WIDTH = 160  # of a table that does not go to a terminal
_FROM_OPTIONS = (
    "ranks", "decode_ranks", "load", "cache_blocks", "decode_kv_tokens", "decode_method", "chunk_tokens",
    "prefill_running", "decode_running", "hop_s", "report_interval_s", "report_delay_s", "report_loss", "controllers",
    "shared_counters", "sent_interval_s", "cache_weight", "late_tokens", "overtake_tokens", "slo_ttft_s", "slo_tpot_s",
    "seed",
)  # fmt: skip


class _Command(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Methods"):
            formatter.write_dl([(name, kind.about) for name, kind in METHODS.items()])
        with formatter.section("Columns"):
            formatter.write_dl([(" ".join(c.heading).replace("- ", ""), c.about) for c in COLUMNS if c.about])


@click.command(cls=_Command)
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@option("--methods", default=DEFAULT_METHODS, metavar="A,B,...",
         help="What to compare: `all` of these, or your own as module:Class or file.py:Class.")  # fmt: skip
@setting("ranks", "Prefill ranks.")
@setting("decode_ranks", "Decode ranks; 0: look at prefill alone.")
@setting("load", "Share of what the prefill ranks can do without cache hits; 0: the trace's own times.")
@setting("cache_blocks", "KV memory of a prefill rank, in blocks of the trace (512 tokens).")
@setting("decode_kv_tokens", "KV memory of a decode rank.")
@setting("decode_method", "How decode ranks are chosen.")
@setting("chunk_tokens", "Tokens a step at most.")
@setting("prefill_running", "Prompts a prefill rank works on at once.")
@setting("decode_running", "Requests a decode rank runs at once.")
@timing_option
@option("--timing-scale", type=click.FloatRange(0.001, 1000.0), default=1.0,
         help="All steps take this many times as long (live: less disturbed by what else runs).")  # fmt: skip
@setting("hop_s", "One message, one way.")
@setting("report_interval_s", "A load report at least this often (and after each prefill step).")
@setting("report_delay_s", "Reports arrive this much later than other messages.")
@setting("report_loss", "Share of reports that never arrive.")
@setting("controllers", "Controllers that share the requests.")
@option("--shared-counters/--no-shared-counters", default=True, help="Controllers publish what they sent.")
@setting("sent_interval_s", "At most this often.")
@setting("cache_weight", "cache_aware: worth of a token to compute against a token queued.")
@setting("late_tokens", "late_tokens and late_cache: a rank with less than this queued gets the next request.")
@option("--queue-order", type=click.Choice(["arrival", "slo", "both"]), default="arrival",
         help="Of the controller's queue; slo: bind late, and what can keep --slo-ttft-s first.")  # fmt: skip
@setting("overtake_tokens", "slo: work that came later and is served before a request, at most.")
@setting("slo_ttft_s", "A request keeps the SLO when its first token came by then ...")
@setting("slo_tpot_s", "... and each further one within this, on average.")
@option("--duration-s", type=cli.Seconds(), default=None, show_default=False,
         help=f"The trace's first seconds; with no TRACE: its length [default: all, {GENERATED_S:g}]")  # fmt: skip
@setting("seed", "For all that is drawn at random: jitter, lost reports, a made-up trace.")
@option("--seeds", type=click.IntRange(1, 1000), metavar="N", default=1,
         help="Runs of each method, from --seed on: means, with 95 % confidence intervals.")  # fmt: skip
@option("--live", is_flag=True, show_default=False,
         help="Run it in real time on sim nodes of this machine, and once more in virtual time beside it.")  # fmt: skip
@option("--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), help="Runs at once.")
@option("--out", type=click.Path(path_type=Path, file_okay=False), default=None,
         help="Write methods.png, ttft.png, load.png and replay.json there.")  # fmt: skip
@option("--markdown", is_flag=True, help="Print the table for a document.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def replay(trace: Path | None, **options: Any) -> None:
    """Replay TRACE (Mooncake JSON lines or Azure CSV; none: a made-up one) under several balancing methods.

    In virtual time, over the same load table, policies and batching that run live.
    """
    timing = timing_settings(options["timing"], options["timing_scale"])
    config = LabConfig(**timing, **{name: options[name] for name in _FROM_OPTIONS})
    order = options["queue_order"]
    orders = [replace(config, queue_order=name) for name in (("arrival", "slo") if order == "both" else (order,))]
    methods = _methods(options["methods"])
    if options["live"] and options["seeds"] > 1:
        raise ConfigError("--live takes as long as its trace and runs one seed: leave out --seeds")
    if options["out"] is not None:
        prepare(options["out"])
    seeds = range(config.seed, config.seed + options["seeds"])
    traces = traces_of(trace, options["duration_s"], seeds)
    console = Console(stderr=True, quiet=options["as_json"])
    if options["live"]:
        results = _live(traces[0], methods, orders, console)
    else:
        runs = [
            Run(requests, method, replace(ordered, seed=seed))
            for method in methods
            for ordered in orders
            for seed, requests in zip(seeds, traces, strict=True)
        ]
        results = run_virtual(runs, options["jobs"], console)
    title = _title(traces, config)
    asked = {
        name: options[name]
        for name in ("methods", "queue_order", "seeds", "duration_s", "timing", "timing_scale", "live")
    }
    found = json_of(results, str(trace) if trace else traces[0].name, len(traces[0]), config, asked)
    if options["as_json"]:
        click.echo(json.dumps(found))
    elif options["markdown"]:
        click.echo(markdown_of(results))
    else:
        terminal = Console()
        width = terminal.width if terminal.is_terminal or "COLUMNS" in os.environ else WIDTH
        Console(width=width).print(table_of(results, title, width))
    if options["out"] is not None:
        paths = write_plots(results, options["out"], title)
        table = options["out"] / "replay.json"
        table.write_text(json.dumps(found, indent=1) + "\n")
        console.print("wrote " + ", ".join(map(str, [*paths, table])))


def _live(requests: Trace, methods: list[str], orders: list[LabConfig], console: Console) -> list[Result]:
    """Each method twice: `NAME` in real time, `NAME (virtual)` by the same settings."""
    results = []
    with console.status("starting") as status:
        for method, config in product(methods, orders):
            name = row_of(method, config)
            results.append(result_of(run_live(requests, method, config, status.update), config))
            status.update(f"{name} once more in virtual time")
            twin = comparable(config)
            results.append(result_of(simulate(requests, method, twin), twin, f"{name} (virtual)"))
            live, virtual = results[-2].summary.ttft_mean_s, results[-1].summary.ttft_mean_s
            console.print(f"{name}: mean TTFT {live:.3f} s live, {virtual:.3f} s virtual ({live / virtual - 1:+.1%})")
    return results


def _methods(text: str) -> list[str]:
    names = list(METHODS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--methods names no method")
    return [check_method(name) for name in dict.fromkeys(names)]


def _title(traces: list[Trace], config: LabConfig) -> str:
    first, last = traces[0], traces[-1]
    name = first.name if first.name == last.name else f"{first.name} to {last.name}"
    counts = sorted({len(trace) for trace in traces})
    requests = f"{counts[0]:,} requests" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} requests"
    seeds = f", {len(traces)} seeds" if len(traces) > 1 else ""
    load = f"{config.load:.0%} load" if config.load else "its own rate"
    reports = f"reports {config.report_delay_s * 1e3:g} ms late, {config.report_loss:.0%} lost"
    several = f", {config.controllers} controllers" if config.controllers > 1 else ""
    return (
        f"{name}, {requests}, {config.ranks} prefill + {config.decode_ranks} decode ranks, {load}, {reports}{several}"
        f"{seeds}"
    )
