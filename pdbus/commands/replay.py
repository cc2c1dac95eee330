"""`pdbus replay`: what each balancing method would do on a trace. Owns the command line; the lab does the work."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bus.errors import ConfigError
from bus.runtime import cli
from nodes.own.engines.timing import TIMINGS, timing_named
from pdbus.lab.choosers import METHODS, check_method
from pdbus.lab.compare import Result, compare, result_of
from pdbus.lab.config import LabConfig
from pdbus.lab.generator import generate
from pdbus.lab.live import comparable, run_live
from pdbus.lab.plots import write_plots
from pdbus.lab.simulate import simulate
from pdbus.lab.tables import json_of, markdown_of, table_of
from pdbus.lab.traces import Trace, read_trace

Decorator = Callable[[Any], Any]

DEFAULT_METHODS = "follow_bootstrap_room,round_robin,total_tokens,cache_aware,oracle"
GENERATED_S = 600.0
WIDTH = 132  # of a table that does not go to a terminal
_FROM_OPTIONS = (
    "ranks", "decode_ranks", "load", "cache_blocks", "decode_kv_tokens", "decode_method", "chunk_tokens",
    "prefill_running", "decode_running", "hop_s", "report_interval_s", "report_delay_s", "report_loss", "controllers",
    "shared_counters", "sent_interval_s", "cache_weight", "late_tokens", "slo_ttft_s", "slo_tpot_s", "seed",
)  # fmt: skip


def _option(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, show_default=settings.pop("show_default", True), **settings)


def _setting(name: str, text: str) -> Decorator:
    """An option for the LabConfig field of that name, with its default and type."""
    default = getattr(LabConfig(), name)
    kind = cli.Seconds() if name.endswith("_s") else type(default)
    return _option("--" + name.replace("_", "-"), type=kind, default=default, help=text)


@click.command(epilog="Methods: " + "; ".join(f"{name} ({kind.about})" for name, kind in METHODS.items()) + ".")
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@_option("--methods", default=DEFAULT_METHODS, metavar="A,B,...",
         help="What to compare: `all` of these, or your own as module:Class or file.py:Class.")  # fmt: skip
@_setting("ranks", "Prefill ranks.")
@_setting("decode_ranks", "Decode ranks; 0: look at prefill alone.")
@_setting("load", "Share of what the prefill ranks can do without cache hits; 0: the trace's own times.")
@_setting("cache_blocks", "KV memory of a prefill rank, in blocks of the trace (512 tokens).")
@_setting("decode_kv_tokens", "KV memory of a decode rank.")
@_setting("decode_method", "How decode ranks are chosen.")
@_setting("chunk_tokens", "Tokens a step at most.")
@_setting("prefill_running", "Prompts a prefill rank works on at once.")
@_setting("decode_running", "Requests a decode rank runs at once.")
@_option("--timing", type=click.Choice(list(TIMINGS)), default="h100-8b", help="How long a step takes.")
@_option("--timing-scale", type=click.FloatRange(0.001, 1000.0), default=1.0,
         help="All steps take this many times as long (live: less disturbed by what else runs).")  # fmt: skip
@_setting("hop_s", "One message, one way.")
@_setting("report_interval_s", "A load report at least this often (and after each prefill step).")
@_setting("report_delay_s", "Reports arrive this much later than other messages.")
@_setting("report_loss", "Share of reports that never arrive.")
@_setting("controllers", "Controllers that share the requests.")
@_option("--shared-counters/--no-shared-counters", default=True, help="Controllers publish what they sent.")
@_setting("sent_interval_s", "At most this often.")
@_setting("cache_weight", "cache_aware: worth of a token to compute against a token queued.")
@_setting("late_tokens", "late_tokens and late_cache: a rank with less than this queued gets the next request.")
@_setting("slo_ttft_s", "A request keeps the SLO when its first token came by then ...")
@_setting("slo_tpot_s", "... and each further one within this, on average.")
@_option("--duration-s", type=cli.Seconds(), default=None, show_default=False,
         help=f"The trace's first seconds; with no TRACE: its length [default: all, {GENERATED_S:g}]")  # fmt: skip
@_setting("seed", "For all that is drawn at random.")
@_option("--live", is_flag=True, show_default=False,
         help="Run it in real time on sim nodes of this machine, and once more in virtual time beside it.")  # fmt: skip
@_option("--jobs", type=click.IntRange(1, 64), default=min(4, os.cpu_count() or 1), help="Methods replayed at once.")
@_option("--out", type=click.Path(path_type=Path, file_okay=False), default=None, help="Write plots and JSON there.")
@_option("--markdown", is_flag=True, help="Print the table for a document.")
@_option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def replay(trace: Path | None, **options: Any) -> None:
    """Replay TRACE (Mooncake JSON lines or Azure CSV; none: a made-up one) under several balancing methods.

    In virtual time, over the same load table, policies and batching that run live.
    """
    timing = timing_named(options["timing"]).scaled(options["timing_scale"])
    config = LabConfig(timing=timing, **{name: options[name] for name in _FROM_OPTIONS})
    methods = _methods(options["methods"])
    requests = _trace(trace, options["duration_s"], config.seed)
    label = str(trace) if trace else requests.name
    console = Console(stderr=True, quiet=options["as_json"])
    if options["live"]:
        results = _live(requests, methods, config, console)
    else:
        results = _virtual(requests, methods, config, options["jobs"], console)
    title = _title(requests, config)
    found = json_of(results, label, len(requests), config)
    if options["as_json"]:
        click.echo(json.dumps(found))
    elif options["markdown"]:
        click.echo(markdown_of(results))
    else:
        terminal = Console()
        Console(width=None if terminal.is_terminal else WIDTH).print(table_of(results, title))
    if options["out"] is not None:
        paths = write_plots(results, options["out"], title)
        table = options["out"] / "replay.json"
        table.write_text(json.dumps(found, indent=1) + "\n")
        console.print("wrote " + ", ".join(map(str, [*paths, table])))


def _virtual(requests: Trace, methods: list[str], config: LabConfig, jobs: int, console: Console) -> list[Result]:
    began = time.monotonic()
    with console.status(f"replaying {len(requests):,} requests under {len(methods)} methods") as status:
        left = list(methods)

        def done(method: str) -> None:
            left.remove(method)
            console.print(f"{method} done after {time.monotonic() - began:.0f} s")
            status.update(f"still replaying {', '.join(left)}")

        return compare(requests, methods, config, jobs=jobs, on_done=done)


def _live(requests: Trace, methods: list[str], config: LabConfig, console: Console) -> list[Result]:
    """Each method twice: `NAME` in real time, `NAME (virtual)` by the same settings."""
    results = []
    with console.status("starting") as status:
        for method in methods:
            results.append(result_of(run_live(requests, method, config, status.update), config))
            status.update(f"{method} once more in virtual time")
            twin = comparable(config)
            results.append(result_of(simulate(requests, method, twin), twin, f"{method} (virtual)"))
            live, virtual = results[-2].summary.ttft_mean_s, results[-1].summary.ttft_mean_s
            console.print(f"{method}: mean TTFT {live:.3f} s live, {virtual:.3f} s virtual ({live / virtual - 1:+.1%})")
    return results


def _methods(text: str) -> list[str]:
    names = list(METHODS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--methods names no method")
    return [check_method(name) for name in dict.fromkeys(names)]


def _trace(path: Path | None, duration_s: float | None, seed: int) -> Trace:
    if duration_s is not None and not 1 <= duration_s <= 1e7:
        raise ConfigError(f"--duration-s must lie between 1 and 1e7, not {duration_s}")
    if path is None:
        return generate(duration_s or GENERATED_S, seed=seed)
    found = read_trace(path)
    return found if duration_s is None else found.first(duration_s)


def _title(trace: Trace, config: LabConfig) -> str:
    load = f"{config.load:.0%} load" if config.load else "its own rate"
    reports = f"reports {config.report_delay_s * 1e3:g} ms late, {config.report_loss:.0%} lost"
    several = f", {config.controllers} controllers" if config.controllers > 1 else ""
    return (
        f"{trace.name}, {len(trace):,} requests, {config.ranks} prefill + {config.decode_ranks} decode ranks, {load}, "
        f"{reports}{several}"
    )
