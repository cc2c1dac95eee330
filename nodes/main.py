"""`python -m nodes.prefill|decode|unified`: options, engine, node, exit code. This module owns the command line
alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from bus.endpoints import default_bus, default_controller, runtime_dir
from bus.errors import ConfigError
from bus.runtime import cli, logs, settings, spans
from bus.runtime.loop import Loop
from bus.wire.messages import Role
from nodes import engines
from nodes.config import NodeConfig, parse_ranks
from nodes.engines import EngineKind, EngineName, Progress
from nodes.link.config import Limits
from nodes.node import RELOADS, Node, on_signals
from nodes.own.engines.factory import default_engine
from nodes.own.engines.sim import SIM_VOCAB_SIZE
from nodes.own.engines.timing import TIMINGS

_WORK = {
    "prefill": "Compute prompts; decode ranks fetch the KV cache.",
    "decode": "Fetch prompts' KV caches from prefill ranks, decode, and stream tokens to clients.",
    "unified": "Compute prompts and decode on the same rank (no PD split).",
}
_OWN = frozenset({"kv_tokens", "block_tokens", "max_context", "max_running", "chunk_tokens"})

log = logs.get_logger("node")


def command(role: Role) -> click.Command:
    """Return the click command of a node with one role. The command runs the node until it has drained."""

    def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
        return click.option(*names, **{"show_default": True} | attributes)

    optional_s = cli.Seconds()
    decode_only = option("--decode-cache", is_flag=True,
                         help="Keep KV caches: fetch only what is missing, and compute prompts where the controller "
                         "says so.") if role == "decode" else lambda main: main  # fmt: skip

    @settings.command(
        "node", role, reloads=RELOADS, help=_WORK[role], context_settings={"help_option_names": ["-h", "--help"]}
    )
    @option("--bus", default=default_bus, show_default=default_bus(), metavar="BASE",
            help="The broker: ipc:///dir/bus or tcp://host:port.")  # fmt: skip
    @option("--controller", multiple=True, show_default=default_controller(), metavar="BASE",
            help="A controller; repeat it for several.")  # fmt: skip
    @option("--instance", default=f"{role}-0", help="The group of ranks that this one belongs to.")
    @option("--dp-size", type=int, default=1, help="Ranks of the instance.")
    @option("--dp-rank", multiple=True, default=("0",), help="The ranks of this process: 3, or 0-7; repeatable.")
    @option("--engine", type=EngineName(), default=default_engine,
            show_default="torch, or numpy where torch is not installed",
            help="What computes; sim only takes the time.")  # fmt: skip
    @option("--model", default="smollm2",
            help="smollm2 or tiny; with --engine sim any name; with --engine vllm what vLLM takes.")  # fmt: skip
    @option("--data", default=lambda: f"ipc://{runtime_dir()}", show_default=f"ipc://{runtime_dir()}", metavar="WHERE",
            help="Where peers and clients reach this node: ipc:///directory, tcp://host, tcp://host:port.")  # fmt: skip
    @option("--kv-tokens", type=int, default=0, help="KV capacity in tokens (0: the engine's default).")
    @option("--block-tokens", type=int, default=16, help="Tokens in a KV block; equal on all nodes of a model.")
    @option("--max-context", type=int, default=0, help="Prompt and output together (0: the model's).")
    @option("--max-running", type=int, default=None, help="Requests computed at once  [default: sim 256, torch 16]")
    @option("--chunk-tokens", type=int, default=None, help="Tokens a step at most  [default: sim 2048, torch 256]")
    @decode_only
    @cli.setting(Limits(), "--max-waiting", type=click.IntRange(1), help="More waiting requests are refused.")
    @cli.setting(NodeConfig, "--report-interval-s", type=cli.Seconds(), help="A load report at least this often.")
    @cli.setting(NodeConfig, "--room-ttl-s", type=cli.Seconds(), help="The broker's: rooms are refreshed in time.")
    @cli.setting(Limits(), "--hold-s", type=cli.Seconds(0.1), help="A KV cache that is not pulled is kept this long.")
    @cli.setting(
        NodeConfig, "--wait-s", type=cli.Seconds(), help="Give up when bus and controllers are not there by then."
    )
    @cli.setting(
        NodeConfig, "--drain-s", type=cli.Seconds(), help="When leaving, finish what runs for at most this long."
    )
    @cli.setting(Limits(), "--trace-bytes", type=click.IntRange(0),
                 help="To remember legs that are over, for pdbus trace; of each rank.")  # fmt: skip
    @option("--keys", default="", metavar="DIR", help="Directory of CURVE keys (pdbus keys new DIR); none: plain.")
    @option("--sim-timing", default="h100-8b", metavar="NAME|FILE",
            help=f"How long a sim step takes: {', '.join(TIMINGS)}, or as pdbus calibrate found.")  # fmt: skip
    @option("--sim-base-s", type=optional_s, default=None, help="Each sim step.")
    @option("--sim-prefill-s-per-token", type=optional_s, default=None, help="Each prompt token of a sim step.")
    @option("--sim-decode-s", type=optional_s, default=None, help="Each decoding request of a sim step.")
    @option("--sim-context-s-per-token", type=optional_s, default=None, help="Each KV token a sim step attends to.")
    @option("--sim-batched-s", type=optional_s, default=None, help="A sim step that feeds more than one token.")
    @option("--sim-vocab-size", type=int, default=SIM_VOCAB_SIZE, help="Vocabulary of the sim model.")
    @option("--sim-kv-bytes-per-token", type=int, default=0, help="Size of the sim KV cache (0: 4 bytes).")
    @option("--fault-fail-token", type=int, default=None, help="For tests: a step fed this token fails.")
    @option("--fault-hang-token", type=int, default=None, help="For tests: a step fed this token never ends.")
    @option("--fault-crash-token", type=int, default=None, help="For tests: a step fed this token kills the process.")
    @cli.metrics_port_option
    @cli.metrics_host_option
    @spans.otlp_endpoint_option
    @cli.log_level_option
    @cli.watch_parent_option
    @click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENTS...]")
    def main(engine_args: tuple[str, ...], **options: Any) -> None:
        logs.configure(options["log_level"], part="node", instance=options["instance"])
        with spans.exporting(options["otlp_endpoint"], "node", name=options["instance"]) as exporter:
            _serve(role, engine_args, options, exporter)

    return main


def _serve(role: Role, engine_args: tuple[str, ...], options: dict[str, Any], exporter: spans.Spans | None) -> None:
    name = options["engine"]
    _check_options(name)
    engines.check_arguments(name, engine_args)
    config = config_from(role, options, engine_args)
    serve(config, engines.kind_of(name), watch_parent=options["watch_parent"], exporter=exporter)


def _check_options(engine: str) -> None:
    """ConfigError for options that `engine` does not use, and for a model that it lacks."""
    kind = engines.kind_of(engine)
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if kind.needs_model and "model" not in given:
        raise ConfigError(f"--engine {engine} needs a model: --model PATH")
    if "decode_cache" in given and not kind.decode_cache:
        raise ConfigError(f"--decode-cache is not for the engine {engine}, whose decode ranks keep no KV caches")
    for name in sorted(given):
        if not kind.our_options and (name in _OWN or name.startswith(("sim_", "fault_"))):
            raise ConfigError(f"--{name.replace('_', '-')} is for our own engines; those of {engine} follow a --")


def config_from(role: Role, options: dict[str, Any], engine_args: Sequence[str] = ()) -> NodeConfig:
    """Return the checked config of the parsed options (by the names of click); `engine_args` are the arguments after
    `--`. ConfigError, in one line, for an invalid one."""
    kind = engines.kind_of(options["engine"])
    return NodeConfig(
        role=role,
        instance=options["instance"],
        dp_size=options["dp_size"],
        dp_ranks=parse_ranks(options["dp_rank"]),
        bus=options["bus"],
        controllers=options["controller"] or (default_controller(),),
        data=options["data"],
        engine=kind.settings(options, engine_args),
        max_running=kind.max_running if options["max_running"] is None else options["max_running"],
        chunk_tokens=kind.chunk_tokens if options["chunk_tokens"] is None else options["chunk_tokens"],
        report_interval_s=options["report_interval_s"],
        room_ttl_s=options["room_ttl_s"],
        wait_s=options["wait_s"],
        drain_s=options["drain_s"],
        limits=Limits(max_waiting=options["max_waiting"], hold_s=options["hold_s"], trace_bytes=options["trace_bytes"]),
        metrics_port=options["metrics_port"],
        metrics_host=options["metrics_host"],
        keys=options["keys"],
        decode_cache=options.get("decode_cache", False),
    )


def serve(
    config: NodeConfig, kind: EngineKind, *, watch_parent: bool = False, exporter: spans.Spans | None = None
) -> None:
    """Load the engine, connect, and run until drained; it blocks, on the main thread. ConfigError or StartError when
    that cannot begin, and what `Node.run` raises. With `watch_parent` the node drains and leaves when stdin closes."""
    loop = Loop()
    nodes: list[Node] = []
    if watch_parent:
        cli.leave_with_parent(lambda: nodes[0].leave() if nodes else os.kill(os.getpid(), signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # while it loads
    with kind.opened(config, loop, _progress()) as opened:
        on_signals(loop, lambda: node)  # one that comes while sockets open waits for the loop
        runners = dict(zip(config.dp_ranks, opened.runners, strict=True))
        with Node(config, loop, runners, opened.figures, exporter) as node:
            nodes.append(node)
            node.run(_print_ready)


def _progress() -> Progress:
    """Return a function that logs progress once a second."""
    began = logged_at = time.monotonic()

    def progress(what: str, fraction: float) -> None:
        nonlocal logged_at
        now = time.monotonic()
        if now - logged_at >= 1.0:
            logged_at = now
            log.info("model.loading", doing=what, percent=round(100 * fraction), seconds=round(now - began, 1))

    return progress


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _print_ready(node: Node) -> None:
    config = node.config
    cli.ready(
        part="node",
        role=config.role,
        instance=config.instance,
        dp_ranks=",".join(map(str, config.dp_ranks)),
        endpoint=node.host.endpoint,
        epochs=",".join(str(rank.epoch) for rank in node.host.ranks.values()),
    )
