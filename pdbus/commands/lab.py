"""The common part of `pdbus replay`, `plan` and `anchors`: options for the lab's settings, traces (recorded or
generated requests), runs with progress, and output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from bus.errors import ConfigError
from bus.runtime import cli
from nodes.own.engines.timing import TIMINGS, read_timing
from pdbus.explore.figures import Explored, Loads, ShownRun
from pdbus.explore.page import PageFile
from pdbus.lab.compare import Result, Run, compare
from pdbus.lab.config import LabConfig
from pdbus.lab.formats import read_trace
from pdbus.lab.generator import generate
from pdbus.lab.progress import Progress
from pdbus.lab.sessions import generate_sessions
from pdbus.lab.tables import by_method, columns_of, estimate_of, merit, written
from pdbus.lab.traces import Trace

Decorator = Callable[[Any], Any]

GENERATED_S = 600.0


def option(*names: str, **settings: Any) -> Decorator:
    """Return a click option that shows its default, unless `show_default` is given."""
    return click.option(*names, show_default=settings.pop("show_default", True), **settings)


def setting(name: str, text: str) -> Decorator:
    """Return an option for the LabConfig field `name`, with its default and type."""
    default = getattr(LabConfig(), name)
    kind = cli.Seconds() if name.endswith(("_s", "_s_per_token")) else type(default)
    return option("--" + name.replace("_", "-"), type=kind, default=default, help=text)


def timing_option(command: Any) -> Any:
    """Add the option `--timing` to a command."""
    text = f"The duration of a step: {', '.join(TIMINGS)}, or a file of pdbus calibrate."
    return option("--timing", default="h100-8b", metavar="NAME|FILE", help=text)(command)


def transfer_options(command: Any) -> Any:
    """Add the options of KV transfers to a command."""
    link = (
        "Seconds that a KV token takes on a rank's link, which its transfers share; 0: 2.6e-6, or what --timing has, "
    )
    options = (
        setting("link_s_per_token", link + "whatever else is under way."),
        option("--fetch-by-layer", is_flag=True, show_default=False,
               help="KV transfers begin with the computation of the prompt, not after it."),
        option("--decode-cache", is_flag=True, show_default=False,
               help="Decode ranks keep what they fetched and generated, and fetch only what they lack."),
    )  # fmt: skip
    for each in reversed(options):
        command = each(command)
    return command


def html_option(command: Any) -> Any:
    """Add the option `--html` to a command."""
    text = "Write a page to explore in a browser: decisions, loads over time, where methods differ."
    return option("--html", type=click.Path(path_type=Path), default=None, show_default=False, metavar="FILE",
                  help=text)(command)  # fmt: skip


class Tried:
    """Makes runs by `run`, and remembers what share of the requests kept their SLO at which load."""

    def __init__(self, run: Callable[[Sequence[Run]], list[Result]]) -> None:
        self._run = run
        self._points: dict[str, dict[float, list[float]]] = {}
        self._x = ""

    def __call__(self, runs: Sequence[Run]) -> list[Result]:
        results = self._run(runs)
        for run, result in zip(runs, results, strict=True):
            load = run.config.concurrency or run.config.rate or run.config.load
            self._x = "the number under way" if run.config.concurrency else "the starts in a second"
            of_line = self._points.setdefault(result.line, {})
            of_line.setdefault(load, []).append(result.summary.slo_attainment)
        return results

    def loads(self) -> Loads | None:
        """Return the means over the runs of a line and load; None where each line has one load."""
        if max(map(len, self._points.values())) < 2:
            return None
        lines = {
            line: [(load, sum(kept) / len(kept)) for load, kept in sorted(points.items())]
            for line, points in self._points.items()
        }
        return Loads(self._x, lines)


def write_page(file: PageFile, title: str, results: Sequence[Result], loads: Loads | None, console: Console) -> None:
    """Write the page of a replay: the best row first, each by its run that has facts."""
    rows = by_method(results)
    best = sorted(rows, key=lambda row: merit(rows[row]))
    runs = [ShownRun(row, each.facts) for row in best for each in rows[row] if each.facts is not None]
    columns = columns_of(results)
    cells = [[row, *(written(each, estimate_of(rows[row], each.field)) for each in columns)] for row in rows]
    seeds = dict.fromkeys(result.seed for result in results)
    notes = [f"The runs are those of seed {next(iter(seeds))}; the table has means over {len(seeds)} seeds."]
    save(
        file,
        Explored("replay", title, runs, [each.title for each in columns], cells, loads, notes[: len(seeds) - 1]),
        console,
    )


def save(file: PageFile, explored: Explored, console: Console) -> None:
    """Write a page, and say so."""
    size = file.write(explored)
    console.print(f"wrote {file.path}: {size / 1e6:.1f} MB", highlight=False, soft_wrap=True)


def timing_settings(name: str, scale: float) -> dict[str, Any]:
    """Return the LabConfig settings that `--timing` (`name`: a built-in timing, or a file) and `--timing-scale` give.
    Raises ConfigError for a file that cannot be read."""
    if name in TIMINGS:
        return {"timing": TIMINGS[name].scaled(scale)}
    found = read_timing(name)
    fetch = {} if found.kv_fetch_token_s is None else {"kv_fetch_token_s": found.kv_fetch_token_s}
    return {"timing": found.timing.scaled(scale), "first_at_decode": found.first_at_decode, **fetch}


def run_virtual(runs: Sequence[Run], jobs: int, console: Console) -> list[Result]:
    """Run `runs`, `jobs` at a time, and return their results in the same order. It blocks, with progress on `console`:
    one changing line on a terminal; elsewhere a line for each run that ends."""
    progress = Progress([str(run) for run in runs])
    longest = max(len(run.trace) for run in runs)
    at_once = min(jobs, len(runs))
    console.print(f"replaying up to {longest:,} requests a run: {len(runs)} runs, {at_once} at once", highlight=False)
    with console.status("starting") as status:

        def on_share(number: int, share: float) -> None:
            now = time.monotonic()
            progress.share(number, share, now)
            text = Text(progress.text(now))
            if console.is_terminal:
                text.truncate(console.width - 2, overflow="ellipsis")  # beside the spinner
                status.update(text)
            elif share == 1.0:
                console.print(f"{runs[number]} done;", text, highlight=False, soft_wrap=True)

        return compare(runs, jobs=jobs, on_share=on_share)


def traces_of(path: Path | None, duration_s: float | None, seeds: range, sessions: int = 0) -> list[Trace]:
    """Return one trace for each seed. With a file it is the same trace; the seed draws its jitter, and the starts of
    sessions without any, later. Without one it is generated: `sessions` of agents, or requests where that is 0.
    `duration_s` None: the whole file. Raises ConfigError for a `duration_s` out of range and for a file that cannot be
    read."""
    if duration_s is not None and not 1 <= duration_s <= 1e7:
        raise ConfigError(f"--duration-s must lie between 1 and 1e7, not {duration_s}")
    if path is None and sessions:
        return [generate_sessions(sessions, seed=seed) for seed in seeds]
    if path is None:
        return [generate(duration_s or GENERATED_S, seed=seed) for seed in seeds]
    if sessions:
        raise ConfigError(f"--sessions is for generated ones: {path} has its own")
    found = read_trace(path)
    return [found if duration_s is None or not found.timed else found.first(duration_s)] * len(seeds)


def table_console(width: int) -> Console:
    """Return a console for tables on stdout: as wide as the terminal or COLUMNS, else `width` characters."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=width)


def write_json(path: Path, data: Any) -> None:
    """Write `data` to a file for people and programs. ConfigError in one line if that fails."""
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
