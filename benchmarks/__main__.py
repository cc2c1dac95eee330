"""`python -m benchmarks`: run the benchmarks, show them, and leave a table and a plot in a folder. A missing package,
or a system other than Linux, is a ConfigError (exit code 2).

This module measures nothing itself.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from bus.errors import ConfigError
from bus.runtime import cli, logs

NEEDED_BY = {
    "rooms": ("aiohttp", "requests"),
    "edge": ("aiohttp", "uvicorn", "httptools", "uvloop"),
    "sglang": ("sglang",),
}
PEERS = ("sglang", "vllm", "compiled")
WIDTH = 160  # of tables that no terminal shows
ENGINES = ("vllm", "front", "peers", "sglang")  # need Pythons of their own
USUAL = ("dispatch", "latency", "pick", "report", "rooms", "idle", "scale", "controllers", "e2e", "client", "edge")
NAMES = (*USUAL, "lab", "failover", "fleet", "questions", *ENGINES)


@click.command("bench")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=click.Choice(NAMES))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write bench.md, bench.json and bench.png to this folder.",
)
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True, help="A figure is their median.")
@click.option(
    "--peer", "pythons", multiple=True, metavar="NAME=PYTHON",
    help="peers: a Python that has sglang, vllm, or our compiled cores (compiled).",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Fewer and shorter runs: to see that it works, not how fast.")
def bench(
    names: Sequence[str], as_json: bool, out: Path | None, runs: int, pythons: Sequence[str], quick: bool
) -> None:
    """Measure beside bare ZeroMQ, in the same run: all of the first lines and controllers, or the NAMEd ones.

    \b
    dispatch  controller CPU a request and requests/s   latency  submit to arrival at the node
    pick      one pick with its raise                   report   one load report
    rooms     finding a room: latency, batches, expiry  idle     CPU without requests
    scale     8 to 512 ranks                            e2e      submit to first and last token
    client    CPU of the client library                 edge     HTTP beside other routers on the PATH
    vllm      what is added to vLLM, where installed    sglang   the plugin, where SGLang is installed
    front     vLLM's server over the bus, beside itself over its own engine core
    peers     SGLang's and vLLM's dispatchers beside ours
    controllers  several of them over the same ranks; 4,096 ranks and one broker
    lab       requests that the policy lab replays in a second
    fleet     pdbus top --http with five browsers, 512 and 4,096 ranks
    questions  how long a question about requests holds a controller up
    failover  from kill -9 of a node until what ran there runs elsewhere (--runs 10: ten kills)
    """
    names = names or USUAL
    needed = [*(package for name in names for package in NEEDED_BY.get(name, ())), *(("matplotlib",) if out else ())]
    missing = [name for name in dict.fromkeys(needed) if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"benchmarks need {', '.join(missing)}: pip install {' '.join(missing)}")
    if sys.platform != "linux":
        raise ConfigError("the benchmarks read the CPU times of processes, which they can on Linux alone")
    from benchmarks import BENCHMARKS, plot, table
    from benchmarks.harness import Row, Scope

    interpreters = _interpreters(pythons)
    screen = Console(stderr=True)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {out}: {error.strerror}") from None
    results: list[tuple[str, str, list[Row]]] = []
    for benchmark in (BENCHMARKS[name] for name in names):
        began = time.monotonic()
        with screen.status(benchmark.name) as status:

            def show(text: str, name: str = benchmark.name) -> None:
                status.update(f"{name}: {text}")
                if not screen.is_terminal:
                    screen.print(f"{name}: {text}", markup=False, highlight=False)

            def note(text: str) -> None:
                screen.print(text, markup=False, highlight=False, soft_wrap=True)

            rows = benchmark.run(Scope(1 if quick else runs, quick, show, note, interpreters))
        results.append((benchmark.name, benchmark.title, rows))
        screen.print(f"{benchmark.name}: {len(rows)} figures in {time.monotonic() - began:.0f} s", highlight=False)
        if not as_json:
            console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
            table.show(console, f"{benchmark.name}: {benchmark.title}", rows)
        if out is not None:  # after each, so that what is measured is kept whatever comes
            (out / "bench.md").write_text(table.markdown(results))
            (out / "bench.json").write_text(table.as_json(results) + "\n")
            plot.save(results, out / "bench.png")
    if as_json:
        click.echo(table.as_json(results))
    if out is not None:
        screen.print(f"wrote {', '.join(sorted(path.name for path in out.glob('bench.*')))} to {out}", highlight=False)


def _interpreters(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, _, python = pair.partition("=")
        if name not in PEERS or not (at := shutil.which(python)):
            raise ConfigError(f"--peer {pair}: name one of {', '.join(PEERS)} and a Python that can be run")
        found[name] = at
    return found


if __name__ == "__main__":
    logs.configure("warning", part="benchmarks")
    cli.run(bench, "benchmarks")
