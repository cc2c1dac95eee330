"""`pdbus up`: a whole cluster with one command. Owns its options, its progress and what it says of dying parts."""

from __future__ import annotations

import sys
import threading
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from bus import cli
from bus.endpoints import default_bus, default_controller
from bus.errors import StartError
from bus.logs import LEVELS
from controller.policies import resolve
from pdbus.commands.common import Teller, leave_on_signals
from pdbus.launcher import Cluster, ClusterSpec

POLL_S = 0.25
TCP_BUS, TCP_CONTROLLER = "tcp://127.0.0.1:5550", "tcp://127.0.0.1:5560"


@click.command(
    epilog="What follows -- is given to every node, as in: pdbus up -- --kv-tokens 4096 --max-running 8. A part that "
    "dies is reported and the others go on; the command ends with exit code 3 when no node or no controller is left."
)
@click.option("--prefill", type=click.IntRange(0), default=None, help="Prefill ranks  [default: 2]")
@click.option("--decode", type=click.IntRange(0), default=None, help="Decode ranks  [default: 2]")
@click.option("--unified", type=click.IntRange(0), default=0, help="Ranks that do both, instead.")
@click.option("--ranks-per-process", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share one.")
@click.option("--model", default="smollm2", show_default=True, help="smollm2, tiny or sim.")
@click.option("--engine", type=click.Choice(["torch", "sim"]), default=None, help="[default: sim for sim, else torch]")
@click.option(
    "--prefill-method", metavar="METHOD", default="auto", show_default=True, help="How to pick prefill ranks."
)
@click.option("--decode-method", metavar="METHOD", default="auto", show_default=True, help="How to pick decode ranks.")
@click.option(
    "--unified-method", metavar="METHOD", default="auto", show_default=True, help="How to pick unified ranks."
)
@click.option("--transport", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True)
@click.option("--bus", default="", metavar="BASE", help="Where the broker serves  [default: the usual place]")
@click.option("--controller", default="", metavar="BASE", help="Where the controller serves  [likewise]")
@click.option("--keys", default="", metavar="DIR", help="CURVE keys for tcp (pdbus keys new DIR).")
@click.option("--start-timeout-s", type=click.FloatRange(1), default=300.0, show_default=True)
@click.option("--log-level", type=click.Choice(LEVELS), default="warning", show_default=True, help="Of the parts.")
@click.argument("node_args", nargs=-1, type=click.UNPROCESSED)
def up(
    prefill: int | None,
    decode: int | None,
    unified: int,
    ranks_per_process: int,
    model: str,
    engine: str | None,
    prefill_method: str,
    decode_method: str,
    unified_method: str,
    transport: Literal["ipc", "tcp"],
    bus: str,
    controller: str,
    keys: str,
    start_timeout_s: float,
    log_level: str,
    node_args: tuple[str, ...],
) -> None:
    """Start a broker, a controller and nodes; Ctrl-C ends them all.

    Prefill is best by total_tokens; decode by total_requests while KV memory is plenty, else by total_tokens.
    """
    split_default = 0 if unified else 2
    spec = ClusterSpec(
        prefill=split_default if prefill is None else prefill,
        decode=split_default if decode is None else decode,
        unified=unified,
        ranks_per_process=ranks_per_process,
        prefill_method=resolve(prefill_method, "prefill"),
        decode_method=resolve(decode_method, "decode"),
        unified_method=resolve(unified_method, "unified"),
        engine=engine or ("sim" if model == "sim" else "torch"),
        model=model,
        transport=transport,
        bus=bus or (default_bus() if transport == "ipc" else TCP_BUS),
        controller=controller or (default_controller() if transport == "ipc" else TCP_CONTROLLER),
        keys=keys,
        start_timeout_s=start_timeout_s,
        log_level=log_level,
        node_args=node_args,
    )
    leave_on_signals()
    teller = Teller()
    cluster = Cluster(spec, progress=teller.say)
    try:
        with teller.telling():
            cluster.start()
        _show(cluster)
        _watch(cluster)
    except KeyboardInterrupt:
        pass
    finally:
        with teller.telling():
            teller.say("taking the cluster down ...")
            cluster.stop()


def _show(cluster: Cluster) -> None:
    table = Table(title="READY", title_justify="left")
    for column in ("part", "pid", "address"):
        table.add_column(column, overflow="fold")
    for name, child in cluster.children.items():
        facts = child.facts
        address = facts.get("endpoint") or (cluster.bus if child.spec.kind == "broker" else cluster.controllers[name])
        table.add_row(name, str(child.pid), address)
    Console(highlight=False).print(table)
    cli.ready(bus=cluster.bus, controller=cluster.controller)
    usual = "" if cluster.controller == default_controller() else f" --controller {cluster.controller}"
    click.echo(f"Logs, while it runs: {cluster.directory}/*.log")
    click.echo(f"Try, from another terminal:  pdbus generate{usual} 'What is a load balancer?'   (Ctrl-C ends it all)")


def _watch(cluster: Cluster) -> None:
    """Until Ctrl-C or SIGTERM; StartError when nothing useful is left."""
    never = threading.Event()
    reported: set[str] = set()
    while not never.wait(POLL_S):
        for name in cluster.poll():
            if name not in reported:
                reported.add(name)
                child = cluster.children[name]
                news = f"{child.failure()}; the rest goes on" if child.returncode else f"{name} has left"
                print(f"pdbus up: {news}", file=sys.stderr, flush=True)
        for kind in ("node", "controller"):
            if all(name in reported for name, child in cluster.children.items() if child.spec.kind == kind):
                raise StartError(f"no {kind} is left")
