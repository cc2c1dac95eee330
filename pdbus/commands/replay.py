"""`pdbus replay`: compares balancing methods on a trace. Owns the command line; the lab does the work."""

from __future__ import annotations

import json
import math
import os
import shlex
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bus.errors import ConfigError
from bus.runtime import cli
from controller.trips import TRIPS
from nodes.engines import EngineName
from pdbus.commands.lab import (
    GENERATED_S,
    Tried,
    html_option,
    option,
    run_virtual,
    setting,
    table_console,
    timing_option,
    timing_settings,
    traces_of,
    transfer_options,
    write_json,
    write_page,
)
from pdbus.explore.page import PageFile
from pdbus.lab.choosers import METHODS, check_method
from pdbus.lab.compare import Result, Run, result_of, row_of
from pdbus.lab.config import LabConfig
from pdbus.lab.keep import keep
from pdbus.lab.live import LiveEngine, run_live, virtual_twin
from pdbus.lab.metrics import estimate
from pdbus.lab.plots import prepare, write_plots
from pdbus.lab.simulate import simulate
from pdbus.lab.tables import COLUMNS, by_method, json_of, markdown_of, table_of
from pdbus.lab.tape import Tape
from pdbus.lab.traces import Trace
from pdbus.timeline.output import TimelineFile

DEFAULT_METHODS = "follow_bootstrap_room,round_robin,total_tokens,cache_aware,oracle"
WIDTH = 160  # of a table outside a terminal
USUAL = LabConfig()
_FROM_OPTIONS = (
    "unified_ranks", "unified_share", "load", "rate", "warm_up_s", "cache_blocks", "decode_kv_tokens",
    "unified_kv_tokens", "decode_method", "chunk_tokens", "link_s_per_token", "fetch_by_layer", "decode_cache",
    "decode_prefills",
    "prefill_running", "decode_running", "unified_running", "hop_s", "report_interval_s", "report_delay_s",
    "report_loss", "controllers", "shared_counters", "sent_interval_s", "cache_weight", "late_tokens",
    "tpot_admission", "overtake_tokens", "slo_ttft_s", "slo_tpot_s", "seed",
)  # fmt: skip
_ASKED = (
    "methods", "keep", "queue_order", "seeds", "duration_s", "requests", "sessions", "concurrency", "shrink", "timing",
    "timing_scale", "live", "engine", "model", "engine_args",
)  # fmt: skip


class _Command(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Methods"):
            formatter.write_dl([(name, kind.about) for name, kind in METHODS.items()])
        with formatter.section("Columns"):
            formatter.write_dl([(" ".join(c.heading).replace("- ", ""), c.about) for c in COLUMNS if c.about])


@click.command(cls=_Command)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@option("--methods", default=DEFAULT_METHODS, metavar="A,B,...",
         help="Methods to compare: `all` of these, or your own as module:Class or file.py:Class.")  # fmt: skip
@option("--ranks", type=click.IntRange(0), default=None, show_default=f"{USUAL.ranks}; 0 with --unified-ranks",
         help="Prefill ranks.")  # fmt: skip
@option("--decode-ranks", type=click.IntRange(0), default=None, help="Decode ranks; 0: simulate prefill alone.",
         show_default=f"{USUAL.decode_ranks}; 0 with --unified-ranks")  # fmt: skip
@setting("unified_ranks", "Ranks that do prefill and decode, instead of the two or beside them.")
@setting("unified_share", "Share of the sessions that unified ranks run beside the others; 0: the share of ranks that "
         "they are.")  # fmt: skip
@setting("load", "Load as a share of what the prefill and unified ranks can compute without cache hits; 0: the trace's "
         "own times.")  # fmt: skip
@setting("rate", "Sessions (requests, where there are none) that start in a second, instead of --load; 0: by --load.")
@option("--concurrency", metavar="N,N,...", default="", show_default=False,
         help="Sessions (or requests) under way, instead of --load: the next starts when one has ended. Several: a row "
         "each.")  # fmt: skip
@option("--keep", type=click.FloatRange(0, 1, min_open=True), metavar="SHARE", default=None, show_default=False,
         help="Search the highest rate that keeps this share of the requests within their SLO, for each method and "
         "seed; from --rate on, or half load.")  # fmt: skip
@setting("warm_up_s", "Leave the requests of the first seconds out of the figures.")
@option("--requests", type=click.IntRange(1, 10_000_000), default=None, show_default=False,
         help="Count only so many requests, from the warm-up on.")  # fmt: skip
@setting("cache_blocks", "KV memory of a prefill rank, in blocks of the trace; 0: 2,048,000 tokens.")
@setting("decode_kv_tokens", "KV memory of a decode rank.")
@setting("unified_kv_tokens", "KV memory of a unified rank.")
@setting("decode_method", "Method for decode ranks.")
@setting("chunk_tokens", "Maximum of prompt tokens in a step.")
@transfer_options
@option("--decode-prefills", is_flag=True, show_default=False,
         help="Decode ranks can compute prompts in their batch, and do where the --decode-method says so.")  # fmt: skip
@option("--trip", type=click.Choice(TRIPS), default=None, show_default="as the --decode-method says",
         help="The one way of all pairs: the prompt is computed at_decode; or at prefill, and decode fetches what it "
         "lacks (delta) or all (whole), or prefill has read_back before what decode has.")  # fmt: skip
@setting("prefill_running", "Prompts that a prefill rank runs at once.")
@setting("decode_running", "Requests that a decode rank runs at once.")
@setting("unified_running", "Requests that a unified rank runs at once.")
@timing_option
@option("--timing-scale", type=click.FloatRange(0.001, 1000.0), default=1.0,
         help="Factor for the duration of steps (live: larger ones are disturbed less by other programs).")  # fmt: skip
@setting("hop_s", "Delay of one message.")
@setting("report_interval_s", "Maximum time between load reports (there is one after each prefill step too).")
@setting("report_delay_s", "Additional delay of load reports.")
@setting("report_loss", "Share of reports that never arrive.")
@setting("controllers", "Controllers that share the requests.")
@option("--shared-counters/--no-shared-counters", default=True, help="Controllers publish their counters.")
@setting("sent_interval_s", "Minimum time between two publications of counters.")
@setting("cache_weight", "cache_aware: weight of a token to compute against a queued token.")
@setting("late_tokens", "late_tokens and late_cache: a rank with fewer queued tokens gets the next request.")
@option("--queue-order", type=click.Choice(["arrival", "slo", "both"]), default="arrival",
         help="Order of the controller's queue; slo: bind late, those that can keep --slo-ttft-s first.")  # fmt: skip
@option("--tpot-admission", is_flag=True, show_default=False,
         help="slo: requests wait while every decode rank's steps would exceed --slo-tpot-s.")  # fmt: skip
@setting("overtake_tokens", "slo: maximum of later work that is served before a request.")
@setting("slo_ttft_s", "Limit for a request's first token ...")
@setting("slo_tpot_s", "... and for each further token, on average; both together are its SLO.")
@option("--duration-s", type=cli.Seconds(), default=None, show_default=False,
         help=f"Use the trace's first seconds; with --concurrency or sessions without starts: count so many seconds of "
         f"the run; without TRACE: the length [default: all, {GENERATED_S:g}]")  # fmt: skip
@option("--sessions", type=click.IntRange(2, 100_000), default=None, show_default=False,
         help="Without TRACE: generate so many sessions of coding agents, shaped as AIPerf's.")  # fmt: skip
@setting("seed", "Seed for all random draws: jitter, lost reports, starts of sessions, a generated trace.")
@option("--seeds", type=click.IntRange(1, 1000), metavar="N", default=1,
         help="Runs of each method, from --seed on: means, with 95 % confidence intervals.")  # fmt: skip
@option("--live", is_flag=True, show_default=False,
         help="Run in real time on nodes of this machine, and again in virtual time for comparison.")  # fmt: skip
@option("--engine", type=EngineName("torch", "numpy"), default="sim", help="With --live: the engine.")
@option(
    "--model", default=None, show_default=False, metavar="NAME", help="The model of a live vLLM [default: smollm2]."
)
@option("--engine-args", default="", show_default=False, metavar="ARGS", help="vLLM's own arguments, in quotes.")
@option("--shrink", type=click.IntRange(1, 512), default=1, metavar="TIMES",
         help="Divide the lengths of prompts, outputs and blocks by this (for small engines).")  # fmt: skip
@option("--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), help="Runs at once.")
@option("--out", type=click.Path(path_type=Path, file_okay=False), default=None,
         help="Write the plots (of throughput too for several --concurrency) and replay.json there.")  # fmt: skip
@option("--timeline", type=click.Path(path_type=Path), default=None, show_default=False, metavar="FILE",
         help="Write what each rank did, of one method and seed, to open in Perfetto (.json or .json.gz).")  # fmt: skip
@option("--timeline-s", type=cli.Seconds(0.001, 600), default=10.0, help="How long a part of the run it shows ...")
@option("--timeline-from-s", type=cli.Seconds(0), default=None, show_default="the warm-up's end",
         help="... and from when on.")  # fmt: skip
@html_option
@option("--markdown", is_flag=True, help="Print the table for a document.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def replay(trace: Path | None, **options: Any) -> None:
    """Replay TRACE (a file or folder; without it, a generated trace) with several balancing methods.

    It runs in virtual time, with the load table, policies and batching that also run live.
    """
    timing = timing_settings(options["timing"], options["timing_scale"])
    config = LabConfig(
        **timing, **_split(options), end_requests=options["requests"] or 0, trip=options["trip"] or "",
        **{name: options[name] for name in _FROM_OPTIONS},
    )  # fmt: skip
    order = options["queue_order"]
    orders = [
        replace(config, queue_order=name, concurrency=number)
        for name in (("arrival", "slo") if order == "both" else (order,))
        for number in _concurrency(options["concurrency"])
    ]
    methods = _methods(options["methods"])
    if options["keep"] and (options["concurrency"] or options["live"]):
        raise ConfigError("--keep searches a rate in virtual time: leave out --concurrency and --live")
    engine = _engine(options)
    if options["timeline"] is not None and (len(methods) * len(orders) * options["seeds"] > 1 or options["live"]
                                            or options["keep"]):  # fmt: skip
        raise ConfigError("--timeline shows one run: name one of --methods, one seed, no --live and no --keep")
    if options["html"] is not None and options["live"]:
        raise ConfigError("--html shows runs in virtual time: leave out --live")
    if options["out"] is not None:
        prepare(options["out"])
    with ExitStack() as exits:
        file = exits.enter_context(TimelineFile(options["timeline"])) if options["timeline"] is not None else None
        page = exits.enter_context(PageFile(options["html"])) if options["html"] is not None else None
        _replay(trace, options, config, orders, methods, engine, file, page)


def _replay(
    trace: Path | None, options: dict[str, Any], config: LabConfig, orders: list[LabConfig], methods: list[str],
    engine: LiveEngine, file: TimelineFile | None, page: PageFile | None,
) -> None:  # fmt: skip
    """Make the runs that the options ask for, and show them; one of them is recorded in `file`, those of the first seed
    in `page`."""
    seeds = range(config.seed, config.seed + options["seeds"])
    duration_s = options["duration_s"]
    cut_s = None if options["concurrency"] and trace else duration_s  # else the run is cut, not the trace
    read = traces_of(trace, cut_s, seeds, options["sessions"] or 0)
    traces = [found.shrunk(options["shrink"]) for found in read]
    if duration_s is not None and (options["concurrency"] or not traces[0].timed):
        orders = [replace(each, end_s=config.warm_up_s + duration_s) for each in orders]
    console = Console(stderr=True, quiet=options["as_json"])
    if options["live"]:
        results = _live(traces, methods, orders, engine, console)
    else:
        from_s = config.warm_up_s if options["timeline_from_s"] is None else options["timeline_from_s"]
        tape = Tape(from_s, options["timeline_s"]) if file is not None else None
        runs = [
            Run(requests, method, replace(ordered, seed=seed), tape, page is not None and seed == seeds[0])
            for method in methods
            for ordered in orders
            for seed, requests in zip(seeds, traces, strict=True)
        ]
        share = options["keep"]
        run = partial(run_virtual, jobs=options["jobs"], console=console)
        tried = Tried(run)
        results = keep(runs, share, tried) if share else tried(runs)
        if file is not None and tape is not None:
            tape.timeline.title = f"virtual time, {runs[0]}: {_title(traces, orders, results)}"
            counts = file.write(tape.done())
            console.print(f"wrote {file.path}: {counts}", highlight=False, soft_wrap=True)
        if page is not None:
            write_page(page, _title(traces, orders, results), results, tried.loads(), console)
    asked = {name: options[name] for name in _ASKED}
    found = json_of(results, str(trace) if trace else traces[0].name, len(traces[0]), config, asked)
    _show(results, _title(traces, orders, results), found, options, console)


def _show(results: list[Result], title: str, found: dict[str, Any], options: dict[str, Any], console: Console) -> None:
    """Print the results in the form that the options name, and write the files that they name."""
    if options["as_json"]:
        click.echo(json.dumps(found))
    elif options["markdown"]:
        click.echo(markdown_of(results))
    else:
        shown = table_console(WIDTH)
        shown.print(table_of(results, title, shown.width))
    if options["out"] is not None:
        paths = write_plots(results, options["out"], title)
        table = options["out"] / "replay.json"
        write_json(table, found)
        console.print("wrote " + ", ".join(map(str, [*paths, table])))


def _split(options: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of prefill and decode ranks: without either option the defaults, or 0 beside unified ones."""
    defaults = {"ranks": USUAL.ranks, "decode_ranks": USUAL.decode_ranks}
    given = {name: options[name] for name in defaults if options[name] is not None}
    return (dict.fromkeys(defaults, 0) if options["unified_ranks"] else defaults) | given


def _engine(options: dict[str, Any]) -> LiveEngine:
    if options["engine"] == "sim":
        if options["model"] is not None or options["engine_args"]:
            raise ConfigError("--model and --engine-args are for --engine vllm and the like, not for sim")
        return LiveEngine()
    if not options["live"]:
        raise ConfigError(f"--engine {options['engine']} is for --live: virtual time has no engine")
    try:
        return LiveEngine(options["engine"], options["model"] or "smollm2", tuple(shlex.split(options["engine_args"])))
    except ValueError as error:
        raise ConfigError(f"--engine-args: {error}") from None


def _live(
    traces: list[Trace], methods: list[str], orders: list[LabConfig], engine: LiveEngine, console: Console
) -> list[Result]:
    """Run each method and order with each seed twice: `NAME` in real time, `NAME (virtual)` with the same settings. The
    orders alternate in running first, so that other work of the machine affects both."""
    results = []
    with console.status("starting") as status:
        for number, requests in enumerate(traces):
            for method in methods:
                for order in orders[:: -1 if number % 2 else 1]:
                    config = replace(order, seed=order.seed + number)
                    name = row_of(method, config)
                    live = result_of(run_live(requests, method, config, engine, status.update), config)
                    status.update(f"{name} once more in virtual time")
                    twin = virtual_twin(config, engine)
                    virtual = result_of(simulate(requests, method, twin), twin, " (virtual)")
                    results += [live, virtual]
                    console.print(_beside(live, virtual), highlight=False, soft_wrap=True)
    for method in methods:
        if len(orders) > 1 and len(traces) > 1:
            console.print(f"{method}: {_gain(results, method, orders)}", highlight=False, soft_wrap=True)
    rows = [f"{row_of(method, order)}{kind}" for method in methods for order in orders for kind in ("", " (virtual)")]
    return sorted(results, key=lambda result: rows.index(result.method))


def _beside(live: Result, virtual: Result) -> str:
    real, model = live.summary, virtual.summary
    return (
        f"{live.method} seed {live.seed}: mean TTFT {real.ttft_mean_s:.3f} s live, {model.ttft_mean_s:.3f} s virtual "
        f"({real.ttft_mean_s / model.ttft_mean_s - 1:+.1%}); SLO kept {real.slo_attainment:.1%} live, "
        f"{model.slo_attainment:.1%} virtual; load average of this machine {os.getloadavg()[0]:.0f}"
    )


def _gain(results: list[Result], method: str, orders: list[LabConfig]) -> str:
    """Return how many more requests keep their SLO with the second order, over pairs of runs with the same requests."""
    runs = by_method(results)
    first, second = (row_of(method, order) for order in orders)

    def points(kind: str) -> str:
        pairs = zip(runs[first + kind], runs[second + kind], strict=True)
        found = estimate([100 * (b.summary.slo_attainment - a.summary.slo_attainment) for a, b in pairs])
        return f"{found.mean:+.1f} ±{found.half_width:.1f} %"

    return (
        f"SLO kept by order {orders[1].queue_order}: {points('')} of the requests live, {points(' (virtual)')} virtual"
    )


def _concurrency(text: str) -> list[int]:
    """Return the numbers of sessions under way to try; 0 alone for starts at their times."""
    try:
        numbers = [int(each) for each in text.split(",")] if text else [0]
    except ValueError:
        raise ConfigError(f"--concurrency is a number, or some with commas between them, not {text!r}") from None
    if text and not 1 <= min(numbers) <= max(numbers) <= 1_000_000:
        raise ConfigError(f"--concurrency must lie between 1 and 1,000,000, not {text}")
    return list(dict.fromkeys(numbers))


def _methods(text: str) -> list[str]:
    names = list(METHODS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--methods names no method")
    return [check_method(name) for name in dict.fromkeys(names)]


def _title(traces: list[Trace], orders: list[LabConfig], results: list[Result]) -> str:
    config = orders[0]
    first, last = traces[0], traces[-1]
    name = first.name if first.name == last.name else f"{first.name} to {last.name}"
    counts = sorted({len(trace) for trace in traces})
    requests = f"{counts[0]:,} requests" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} requests"
    seeds = f", {len(traces)} seeds" if len(traces) > 1 else ""
    load = f"{config.load:.0%} load" if config.load else "its own rate"
    if config.rate:
        load = f"{config.rate:g} starts/s"
    if not math.isnan(results[0].summary.kept_rate_per_s):
        load = "each at its highest rate"
    if config.concurrency:
        under_way = dict.fromkeys(f"{order.concurrency:,}" for order in orders)
        load = f"{', '.join(under_way)} {'sessions' if first.closed else 'requests'} under way"
    counted = sorted({result.summary.requests for result in results})
    if counted[0] < counts[-1]:
        requests += f" (counted: {' to '.join(dict.fromkeys(f'{each:,}' for each in (counted[0], counted[-1])))}"
        requests += f", after {config.warm_up_s:g} s)" if config.warm_up_s else ")"
    reports = f"reports {config.report_delay_s * 1e3:g} ms late, {config.report_loss:.0%} lost"
    several = f", {config.controllers} controllers" if config.controllers > 1 else ""
    return f"{name}, {requests}, {_ranks(config)} ranks, {load}, {reports}{several}{seeds}"


def _ranks(config: LabConfig) -> str:
    numbers = {"prefill": config.ranks, "decode": config.decode_ranks, "unified": config.unified_ranks}
    shown = [f"{number} {role}" for role, number in numbers.items() if number or (role == "decode" and config.ranks)]
    return " + ".join(shown)
