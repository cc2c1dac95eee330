"""`pdbus calibrate`: measure the duration of an engine's steps in this process, and write a timing file in JSON. Owns
the command line and what is printed.

With `--check`, it then starts a cluster of two ranks and compares a live run with its replay.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bus.endpoints import default_bus, default_controller
from bus.errors import ConfigError
from bus.runtime import cli
from nodes import engines
from nodes.config import NodeConfig
from nodes.engines import EngineKind, EngineName
from nodes.own.engines.factory import default_engine
from nodes.own.engines.timing import TimingFile
from pdbus.calibrate.check import METHOD, Agreement, check
from pdbus.calibrate.engines import probe_of
from pdbus.calibrate.fit import Point, fit, relative_errors
from pdbus.calibrate.measure import measure
from pdbus.commands.common import ProgressLine, leave_on_signals
from pdbus.commands.lab import option
from pdbus.lab.config import LabConfig
from pdbus.launcher import ClusterSpec

START_S = 300.0
_UNITS = {"base_s": "a step", "per_prefill_token_s": "a prompt token", "per_decode_row_s": "a request that decodes",
          "per_context_token_s": "a token of its context", "batched_s": "a step of more than one token"}  # fmt: skip


@click.command()
@option("--engine", type=EngineName(), default=default_engine,
        show_default="torch, or numpy where torch is not installed",
        help="The engine to measure, in this process.")  # fmt: skip
@option("--model", default="smollm2", help="The model, as for nodes.")
@option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("timing.json"), help="The file to write."
)
@option("--longest", type=click.IntRange(64, 1_000_000), default=1024, help="Tokens of the longest prompt to measure.")
@option("--rounds", type=click.IntRange(1, 100), default=3, help="Each figure is the least of this many rounds.")
@option("--kv-tokens", type=int, default=0, help="KV capacity in tokens (0: the engine's default).")
@option("--max-running", type=click.IntRange(1), default=None, show_default="as the nodes'", help="Requests at once.")
@option("--chunk-tokens", type=click.IntRange(1), default=None, show_default="as the nodes'", help="Tokens of a step.")
@option("--sim-timing", default="h100-8b", metavar="NAME|FILE", help="For --engine sim: the timing to be found.")
@option("--check", "check_s", type=cli.Seconds(1.0), default=None, show_default=False, metavar="SECONDS",
        help="Then run a generated trace of that length on two ranks of the engine, and replay it.")  # fmt: skip
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENTS...]")
def calibrate(engine: str, model: str, out: Path, engine_args: tuple[str, ...], **options: Any) -> None:
    """Measure the duration of an engine's steps, and write the file that `pdbus replay --timing`, `pdbus plan --timing`
    and a node's --sim-timing read. Nothing else should run on the machine."""
    engines.check_arguments(engine, engine_args)
    leave_on_signals()
    _check_writable(out)
    kind = engines.kind_of(engine)
    config = _config(kind, engine_args, options | {"model": model})
    console = Console(highlight=False)
    with ProgressLine(at_once=True).showing() as progress:
        progress.show("loading the engine")
        with probe_of(kind, config) as (probe, step_tokens):
            points = measure(probe, step_tokens, options["longest"], options["rounds"], progress.show)
    found = _file(engine, model, points, first_at_decode=kind.first_at_decode)
    _write(out, found)
    console.print(_table(found))
    console.print(f"Half of {len(points)} measurements are within {found.typical_error:.1%} of it, all within "
                  f"{found.worst_error:.0%}. Wrote {out}; try: pdbus replay --timing {out}")  # fmt: skip
    if options["check_s"] is None:
        return
    with ProgressLine(at_once=True).showing() as progress:
        settings = LabConfig(
            ranks=1, decode_ranks=1, load=0.0, timing=found.timing, first_at_decode=found.first_at_decode,
            chunk_tokens=step_tokens, decode_kv_tokens=probe.facts.kv_capacity,
            prefill_running=probe.facts.max_running, decode_running=probe.facts.max_running,
        )  # fmt: skip
        longest = min(options["longest"], probe.facts.max_context // 2, probe.facts.kv_capacity // 8)
        spec = _spec(engine, model, engine_args, options)
        agreement = check(spec, settings, longest, options["check_s"], progress.show)
    found.kv_fetch_token_s = agreement.kv_fetch_token_s
    _write(out, found)
    console.print(_comparison(agreement))
    console.print(f"The replay is within {agreement.worst:.1%} of the live run.")


def _config(kind: EngineKind, engine_args: tuple[str, ...], options: dict[str, Any]) -> NodeConfig:
    return NodeConfig(
        role="unified", instance="calibrate", dp_size=1, dp_ranks=(0,), bus=default_bus(),
        controllers=(default_controller(),), data="tcp://127.0.0.1",
        engine=kind.settings(options, engine_args),
        max_running=options["max_running"] or kind.max_running,
        chunk_tokens=options["chunk_tokens"] or kind.chunk_tokens,
    )  # fmt: skip


def _spec(engine: str, model: str, engine_args: tuple[str, ...], options: dict[str, Any]) -> ClusterSpec:
    """Return a cluster of two ranks of the same engine."""
    own = {"--kv-tokens": options["kv_tokens"], "--max-running": options["max_running"],
           "--chunk-tokens": options["chunk_tokens"], "--sim-timing": options["sim_timing"]}  # fmt: skip
    given = [str(word) for flag, value in own.items() if value for word in (flag, value)]
    counts = engines.kind_of(engine).our_options
    return ClusterSpec(
        prefill=1, decode=1, prefill_method=METHOD, decode_method="total_requests", engine=engine, model=model,
        node_args=tuple(given) if counts else (), engine_args=engine_args, log_level="warning", start_timeout_s=START_S,
        controller_args=("--request-overcommit", "1000", "--hang-s", "60"),
    )  # fmt: skip


def _file(engine: str, model: str, points: list[Point], *, first_at_decode: bool) -> TimingFile:
    timing = fit(points)
    off = [abs(error) for error in relative_errors(points, timing)]
    return TimingFile(
        engine=engine, model=model, timing=timing, first_at_decode=first_at_decode, typical_error=median(off),
        worst_error=max(off), points=[asdict(point) for point in points],
    )  # fmt: skip


def _check_writable(out: Path) -> None:
    """Raise ConfigError if `out` cannot be written, before minutes of work."""
    if not out.parent.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"cannot write {out}")


def _write(out: Path, found: TimingFile) -> None:
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None


def _table(found: TimingFile) -> Table:
    table = Table(title=f"{found.engine}, {found.model}", title_justify="left")
    table.add_column("seconds for")
    table.add_column("", justify="right")
    for name, value in asdict(found.timing).items():
        table.add_row(_UNITS[name], f"{value:.3g}")
    return table


def _comparison(agreement: Agreement) -> Table:
    table = Table(title=f"{agreement.requests} requests on a prefill and a decode rank", title_justify="left")
    for heading in ("", "live", "replayed", "difference"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (live, replayed) in agreement.figures.items():
        table.add_row(name, f"{live * 1e3:.1f} ms", f"{replayed * 1e3:.1f} ms", f"{replayed / live - 1:+.1%}")
    table.add_row("hand-over of a prompt token", f"{agreement.kv_fetch_token_s * 1e6:.1f} µs", "", "")
    return table
