"""`python -m controller`: the controller as a process. It runs until SIGINT or SIGTERM,
prints READY once the broker is heard, and exits 2 on a bad setting, 3 where there is no broker. This module owns its
options and signals."""

from __future__ import annotations

from bus.runtime.interrupt import leave_at_once

if __name__ == "__main__":
    leave_at_once()  # before the imports, which take their time

import dataclasses
import time
from typing import Any

import click

from bus import defaults
from bus.endpoints import default_bus, default_controller, why_silent
from bus.errors import StartError
from bus.runtime import cli, logs, settings, spans
from bus.runtime.reload import on_signals
from controller.config import ControllerConfig
from controller.feeds import parse_engine
from controller.policies import POLICIES
from controller.requests.slos import parse_slo_class
from controller.shell import Controller, log

WAIT_LOG_S = 2.0
RELOADS = ("hang-s", "attempts", "queue-requests", "ttft-slo-s", "tpot-slo-s", "late-tokens", "shed", "trace-bytes",
           "explain", "log-level")  # fmt: skip
METHODS = ", ".join(["auto", *POLICIES])
GUIDANCE = (
    "Prefill is best by cache_aware where prompts share prefixes, else by total_tokens; decode by total_requests while "
    "KV memory is plenty and by total_tokens when it is scarce."
)


@settings.command(
    "controller",
    reloads=RELOADS,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    epilog=f"Methods: {METHODS}, the name of one that is installed, or module:Class of your own. {GUIDANCE}",
)
@click.option("--name", default="controller-0", help="This controller's name.")
@click.option("--bus", default=default_bus, show_default=default_bus(), metavar="BASE", help="Where the broker is.")
@click.option(
    "--controller",
    default=default_controller,
    show_default=default_controller(),
    metavar="BASE",
    help="Where to serve: ipc:///dir/controller or tcp://host:port (two ports).",
)
@click.option("--with-broker", is_flag=True, help="Run the broker in this process too.")
@click.option("--keys", default="", metavar="DIR", help="Directory of CURVE keys (pdbus keys new DIR); none: plain.")
@click.option("--prefill-method", default="auto", metavar="METHOD", help="load_balance_method of prefill ranks.")
@click.option("--decode-method", default="auto", metavar="METHOD", help="load_balance_method of decode ranks.")
@click.option("--unified-method", default="auto", metavar="METHOD", help="load_balance_method of unified ranks.")
@click.option("--instance", "instances", multiple=True, metavar="NAME", help="Serve only these instances (repeatable).")
@click.option(
    "--expect", multiple=True, metavar="ROLE[:MODEL]", help="Say so while no rank of it is ready (repeatable)."
)
@cli.setting(ControllerConfig, "--lease-s", type=cli.Seconds(), help="A rank silent for so long is lost.")
@cli.setting(
    ControllerConfig, "--hang-s", type=cli.Seconds(), help="A busy rank whose steps stand still for so long is hung."
)
@cli.setting(
    ControllerConfig,
    "--stale-s",
    type=cli.Seconds(),
    help="Believe a load report for so long; longer only of a rank that declares to report less often.",
)
@cli.setting(
    ControllerConfig, "--request-overcommit", type=float, help="Requests at a rank, as a multiple of its run slots."
)
@cli.setting(
    ControllerConfig, "--kv-overcommit", type=float, help="Tokens at a decode rank, as a multiple of its KV capacity."
)
@cli.setting(
    ControllerConfig,
    "--prefill-at",
    type=click.Choice(["auto", "prefill", "decode"]),
    help="Where prompts are computed if the decode rank has a --decode-cache: as its method says, or always there.",
)
@cli.setting(
    ControllerConfig, "--cache-weight", type=float, help="cache_aware: worth of a token to compute, in tokens queued."
)
@cli.setting(
    ControllerConfig,
    "--trace-bytes",
    type=click.IntRange(0),
    help="To remember requests that are over, for pdbus trace; 0: none.",
)
@cli.setting(
    ControllerConfig,
    "--explain",
    type=click.IntRange(0),
    help="Remember why ranks were chosen for one request in so many, for pdbus trace --why; 1: each, 0: none.",
)
@cli.setting(ControllerConfig, "--attempts", type=int, help="Dispatches of one submit at most.")
@cli.setting(
    ControllerConfig, "--queue-requests", type=int, help="Requests that wait centrally at most; more are refused."
)
@cli.setting(
    ControllerConfig,
    "--queue-order",
    type=click.Choice(["arrival", "slo"]),
    help="slo: what can still have its first token in time goes first, short prompts before long ones.",
)
@cli.setting(
    ControllerConfig, "--ttft-slo-s", type=cli.Seconds(), help="slo: time to first token of requests that name none."
)
@cli.setting(
    ControllerConfig,
    "--tpot-slo-s",
    type=cli.Seconds(0),
    help="slo: wanted seconds per further token; no decode rank gets a request that makes its steps longer. 0: none.",
)
@cli.slo_class_option
@cli.setting(
    ControllerConfig,
    "--late-tokens",
    type=int,
    help="slo: a rank with fewer prompt tokens queued gets the next request.",
)
@cli.setting(
    ControllerConfig,
    "--overtake-tokens",
    type=int,
    help="slo: tokens of prompts that come later and overtake a request at most.",
)
@cli.setting(
    ControllerConfig,
    "--shed",
    type=click.Choice(["never", "hopeless"]),
    help="slo: hopeless: refuse at once what cannot have its first token in time.",
)
@click.option(
    "--wait-s", type=cli.Seconds(), default=defaults.WAIT_S, help="How long to wait for the bus at the start."
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="KIND=ADDRESS,...",
    help="Follow an engine's KV events: sglang=tcp://host:5557,dp_size=8[,instance=NAME][,replay=PORT][,load=PORT].",
)
@cli.metrics_port_option
@cli.metrics_host_option
@cli.spin_us_option
@spans.otlp_endpoint_option
@cli.log_level_option
@cli.watch_parent_option
def main(
    wait_s: float,
    log_level: str,
    watch_parent: bool,
    engines: tuple[str, ...],
    slo_classes: tuple[str, ...],
    otlp_endpoint: str,
    **chosen: Any,
) -> None:
    """Pick ranks by load and dispatch requests to them."""
    logs.configure(log_level, part="controller")
    chosen |= {"engines": tuple(map(parse_engine, engines)), "slo_classes": tuple(map(parse_slo_class, slo_classes))}
    config = ControllerConfig(**chosen)
    with spans.exporting(otlp_endpoint, "controller", name=config.name) as exporter:
        controller = Controller(config, spans=exporter)
        controller.trace = log_level == "debug"
        _serve(controller, wait_s, watch_parent)


def _serve(controller: Controller, wait_s: float, watch_parent: bool) -> None:
    controller.open()
    try:
        stop = controller.loop.stop
        on_signals(controller.loop, lambda changed: _reconfigure(controller, changed), stop, lambda number: stop())
        if watch_parent:
            cli.leave_with_parent(controller.loop.stop)
        _await_bus(controller, wait_s)
        controller.loop.run()
    finally:
        controller.close()
    if controller.failure is not None:
        raise controller.failure


def _reconfigure(controller: Controller, changed: dict[str, Any]) -> None:
    """Apply changed settings; ConfigError for an invalid one, and then nothing changes."""
    fields = {name: value for name, value in changed.items() if name != "log_level"}
    controller.core.reconfigure(dataclasses.replace(controller.core.config, **fields))
    if "log_level" in changed:
        controller.core.log_requests(changed["log_level"] == "debug")


def _await_bus(controller: Controller, wait_s: float) -> None:
    """Print READY with the first beacon; until then log what is missing; StartError after `wait_s`."""
    bus = controller.config.bus
    began = last = time.monotonic()

    def check() -> None:
        nonlocal last
        now = time.monotonic()
        if controller.bus_seen.is_set():
            timer.cancel()
            cli.ready(part="controller", name=controller.config.name, controller=controller.config.controller,
                      bus=bus, epoch=controller.epoch)  # fmt: skip
        elif now - began > wait_s:
            controller.failure = StartError(
                f"no broker at {bus} after {wait_s:g} s: {why_silent(bus, controller.config.keys)} "
                "(start python -m bus, or use --with-broker)"
            )
            controller.loop.stop()
        elif now - last > WAIT_LOG_S:
            last = now
            log.info("bus.awaited", bus=bus, waited_s=round(now - began), wait_s=wait_s)

    timer = controller.loop.call_every(0.02, check)


if __name__ == "__main__":
    cli.run(main, "python -m controller")
