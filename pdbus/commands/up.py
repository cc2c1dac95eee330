"""`pdbus up`: starts a whole cluster and keeps it running. Owns its options, defaults and output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from bus.endpoints import default_bus, default_controller
from bus.errors import ConfigError
from bus.runtime import cli, settings
from bus.runtime.logs import LEVELS
from bus.runtime.output import outlive_readers
from bus.wire.messages import Role
from controller.config import ControllerConfig
from controller.policies import resolve
from nodes.engines import EngineName, kind_of
from nodes.own.engines.factory import default_engine
from pdbus.commands.common import ProgressLine, curl_line, leave_on_signals, tokenizers_option
from pdbus.launcher import Cluster, ClusterSpec, RestartPolicy, Supervisor
from pdbus.ray.plan import RAY, STRATEGIES, Layout, parse_resources
from pdbus.text.find import places_of

if TYPE_CHECKING:
    from pdbus.ray.cluster import RayCluster

DRAIN_S = 70.0  # the nodes' own --drain-s (60 s) and their goodbyes
_AS_GIVEN = (
    "unified", "ranks_per_process", "model", "transport", "keys", "start_timeout_s", "log_dir", "log_level", "http",
    "tokenizers", "metrics_port",
)  # fmt: skip
TCP_BUS, TCP_CONTROLLER = "tcp://127.0.0.1:5550", "tcp://127.0.0.1:5560"


def _method_option(role: str, default: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{role}-method", metavar="METHOD", default=default, show_default=True, help=f"How to pick {role} ranks."
    )


def _resources_option(role: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{role}-resources",
        metavar="NAME=AMOUNT,...",
        default="CPU=1",
        show_default=True,
        help=f"ray: the resources of each {role} rank, as in CPU=4,GPU=1.",
    )


@settings.command(
    "up",
    epilog="Arguments after -- are for every node, as in: pdbus up -- --kv-tokens 4096 --max-running 8. With --engine "
    "vllm they are for vLLM, and those before a second -- are for the nodes. A part that dies is started again, after "
    "a wait that grows. The command ends with exit code 3 when a part has used up its restarts, or when the last "
    "node, controller, broker or edge has left.",
)
@click.option("--prefill", type=click.IntRange(0), default=None, help="Prefill ranks  [default: 2]")
@click.option("--decode", type=click.IntRange(0), default=None, help="Decode ranks  [default: 2]")
@click.option(
    "--unified", type=click.IntRange(0), default=0, help="Ranks that do prefill and decode, instead of the two."
)
@click.option(
    "--ranks-per-process", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share a node process."
)
@click.option(
    "--model",
    default="",
    help="smollm2, tiny or sim; with --engine vllm any of vLLM.  [default: sim with --engine sim, else smollm2]",
)
@click.option(
    "--engine",
    type=EngineName(),
    default=None,
    help="[default: sim for sim, else torch, or numpy where torch is not installed]",
)
@click.option(
    "--gpus",
    default="",
    metavar="A,B,...",
    help="One for each node, prefill first; 0+1,2+3 gives two to each  [default: all]",
)
@_method_option("prefill", "cache_aware")
@_method_option("decode", "total_requests")
@_method_option("unified", "cache_aware")
@click.option(
    "--decode-cache",
    is_flag=True,
    help="Decode ranks keep KV caches, and may compute prompts; --decode-method least_cost unless given.",
)
@click.option(
    "--queue-order",
    type=click.Choice(["arrival", "slo"]),
    default="arrival",
    show_default=True,
    help="slo: requests that can still have their first token in time go first, short prompts before long ones.",
)
@cli.setting(ControllerConfig, "--ttft-slo-s", type=cli.Seconds(), help="slo: for requests that state no SLO.")
@cli.setting(
    ControllerConfig, "--tpot-slo-s", type=cli.Seconds(0), help="slo: the same for each further token; 0: no limit."
)
@cli.slo_class_option
@click.option("--transport", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True)
@click.option("--bus", default="", metavar="BASE", help="The broker's address  [default: the usual one]")
@click.option("--controller", default="", metavar="BASE", help="The controller's address  [default: the usual one]")
@click.option("--keys", default="", metavar="DIR", help="Directory of CURVE keys (pdbus keys new DIR); none: plain.")
@click.option("--start-timeout-s", type=cli.Seconds(1), default=300.0, show_default=True)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Restarts of a part within 60 s of its service; one more failure stops the whole cluster.",
)
@click.option(
    "--log-level", type=click.Choice(LEVELS), default="warning", show_default=True, help="Log level of the parts."
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    default="",
    metavar="DIR",
    help="Append each part's log to a file here, and keep it  [default: removed with the cluster]",
)
@click.option("--http", default="", metavar="[HOST:]PORT", help="Serve OpenAI's HTTP API there  [default: no]")
@click.option(
    "--front",
    type=click.Choice(["light", "vllm"]),
    default=None,
    help="What serves it: our light edge, or vLLM's own server  [default: vllm with --engine vllm, else light]",
)
@click.option(
    "--front-args",
    default="",
    metavar="'ARGUMENT ...'",
    help="vllm: arguments of its server, as in: --front-args '--enable-auto-tool-choice --tool-call-parser hermes'",
)
@tokenizers_option
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    metavar="BASE",
    help="Serve the parts' metrics on this port and the next ones, one for each part (0: none).",
)
@click.option("--ray", is_flag=True, help="Place the parts on the nodes of a Ray cluster, not on this machine.")
@click.option(
    "--ray-address",
    default="auto",
    metavar="ADDRESS",
    help="ray: the address of the Ray cluster  [default: $RAY_ADDRESS, else this machine]",
)
@click.option(
    "--ray-strategy",
    type=click.Choice(STRATEGIES),
    default="SPREAD",
    show_default=True,
    help="ray: how an instance's ranks are placed over the Ray nodes.",
)
@_resources_option("prefill")
@_resources_option("decode")
@_resources_option("unified")
@click.argument("node_args", nargs=-1, type=click.UNPROCESSED)
def up(**options: Any) -> None:
    """Start a broker, a controller and nodes, and keep them running; Ctrl-C drains and ends them all.

    For decode, total_requests is best while there is enough KV memory, otherwise total_tokens. The method auto does
    what engines do: follow_bootstrap_room for prefill, round_robin elsewhere.
    """
    spec = _spec_of(options)
    if spec.http and spec.front != "light":
        _check_front(spec, options["ray"])
    policy = RestartPolicy(limit=options["restarts"], start_timeout_s=spec.start_timeout_s)
    leave_on_signals()
    outlive_readers()
    progress = ProgressLine()
    cluster: Cluster | RayCluster
    if options["ray"]:
        resources: dict[Role, str] = {role: options[f"{role}_resources"] for role in get_args(Role)}
        cluster = _over_ray(spec, policy, options["ray_address"], options["ray_strategy"], resources, progress)
    else:
        cluster = Cluster(spec, progress=progress.show, restarts=policy, notify=_print_line)
    try:
        with progress.showing():
            cluster.start()
        _show(cluster)
        if isinstance(cluster, Cluster):
            Supervisor(cluster, policy, _print_line).run()
        cluster.run()
    except KeyboardInterrupt:
        leave_on_signals(cluster.interrupt)
        if cluster.children:
            _print_line("draining; Ctrl-C again ends it at once")
        raise
    finally:
        with progress.showing():
            cluster.stop()


def _spec_of(options: dict[str, Any]) -> ClusterSpec:
    """Return the cluster that the options ask for. Raises ConfigError for options that do not go together."""
    if options["front"] and not options["http"]:
        raise ConfigError(f"--front {options['front']} says what serves --http: give that too")
    split_default = 0 if options["unified"] else 2
    node_args, engine_args = _arguments(options["engine"], options["node_args"])
    decode_method = options["decode_method"]
    if options["decode_cache"] and _is_default("decode_method"):
        decode_method = "least_cost"
    if not options["ray"]:
        places_of(options["tokenizers"])  # checked before anything starts; with Ray they are on the edge's machine
    engine = options["engine"] or ("sim" if options["model"] == "sim" else default_engine())
    ray, ipc = options["ray"], options["transport"] == "ipc"
    if options["decode_cache"] and not kind_of(engine).decode_cache:
        raise ConfigError(f"--decode-cache is not for the engine {engine}, whose decode ranks keep no KV caches")
    its_own = options["http"] and not ray and not options["tokenizers"]  # the engine's own front may serve
    return ClusterSpec(
        prefill=split_default if options["prefill"] is None else options["prefill"],
        decode=split_default if options["decode"] is None else options["decode"],
        prefill_method=resolve(options["prefill_method"], "prefill"),
        decode_method=resolve(decode_method, "decode"),
        decode_args=("--decode-cache",) if options["decode_cache"] else (),
        unified_method=resolve(options["unified_method"], "unified"),
        engine=engine,
        gpus=tuple(each.replace("+", ",") for each in options["gpus"].split(",")) if options["gpus"] else (),
        bus=options["bus"] or ("" if ray else default_bus() if ipc else TCP_BUS),
        controller=options["controller"] or ("" if ray else default_controller() if ipc else TCP_CONTROLLER),
        stop_grace_s=DRAIN_S,
        front=options["front"] or (kind_of(engine).front if its_own else "light"),
        front_args=_words("--front-args", options["front_args"]),
        node_args=node_args,
        engine_args=engine_args,
        config=settings.config_file(),
        controller_args=(
            *("--queue-order", options["queue_order"]),
            *("--ttft-slo-s", str(options["ttft_slo_s"])),
            *("--tpot-slo-s", str(options["tpot_slo_s"])),
            *(word for each in options["slo_classes"] for word in ("--slo-class", each)),
        ),
        **{name: options[name] for name in _AS_GIVEN},
    )


def _is_default(name: str) -> bool:
    """Return true if no user gave the option called `name`, on the command line or elsewhere."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.DEFAULT


def _over_ray(
    spec: ClusterSpec,
    policy: RestartPolicy,
    address: str,
    strategy: str,
    resources: dict[Role, str],
    progress: ProgressLine,
) -> RayCluster:
    """Return the cluster over Ray. Raises ConfigError for settings that do not work with Ray, or without a Ray
    cluster."""
    if spec.gpus:
        raise ConfigError("--gpus: with --ray, Ray gives out GPUs: --prefill-resources GPU=1 and so on")
    each = {role: parse_resources(f"--{role}-resources", text) for role, text in resources.items()}
    if find_spec("ray") is None:
        raise ConfigError(f"--ray needs the Python package 'ray'; run: pip install {RAY}")
    from pdbus.ray.actors import connect
    from pdbus.ray.cluster import RayCluster

    connect(address)
    cluster = RayCluster(spec, Layout(strategy, each), policy, _print_line, progress.show)
    leave_on_signals(cluster.interrupt)  # after Ray has set a handler of its own
    return cluster


def _arguments(engine: str | None, given: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments of the nodes, and those of their engine."""
    if engine is None or not kind_of(engine).takes_arguments:
        return given, ()
    if "--" not in given:
        return (), given
    at = given.index("--")
    return given[:at], given[at + 1 :]


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _check_front(spec: ClusterSpec, ray: bool) -> None:
    from pdbus.vllm_front.server import check_installed

    if ray:
        raise ConfigError(
            "--front vllm: with --ray there is the light edge; start `pdbus serve --front vllm` beside it"
        )
    if spec.model in ("sim", "tiny"):
        raise ConfigError(f"--front vllm needs a model that vLLM knows, which {spec.model} is not")
    check_installed()


def _print_line(line: str) -> None:
    print(f"pdbus up: {line}", file=sys.stderr, flush=True)


def _show(cluster: Cluster | RayCluster) -> None:
    table = Table(title="READY", title_justify="left")
    metrics = ("metrics",) if cluster.spec.metrics_port else ()
    for column in ("part", "pid", "address", *metrics):
        table.add_column(column, overflow="fold")
    for name, child in cluster.children.items():
        facts = child.facts
        address = facts.get("endpoint") or (cluster.bus if child.spec.kind == "broker" else cluster.controllers[name])
        table.add_row(
            name, str(child.pid), cli.printable(address), *(str(child.spec.metrics_port or "-") for _ in metrics)
        )
    Console(highlight=False).print(table)
    cli.ready(bus=cluster.bus, controller=cluster.controller)
    usual = "" if cluster.controller == default_controller() else f" --controller {cluster.controller}"
    keep = "" if cluster.spec.log_dir else " while it runs; to keep them: --log-dir DIR"
    where = "" if isinstance(cluster, Cluster) else ", on each machine"
    click.echo(f"Logs: {cluster.log_dir}/*.log{where}{keep}")
    click.echo(f"Try, from another terminal:  pdbus generate{usual} 'What is a load balancer?'   (Ctrl-C ends it all)")
    if edge := cluster.children.get("edge"):
        url = edge.facts["endpoint"]
        click.echo(f"or:  {curl_line(url, cluster.spec.served_model)}")
        if cluster.spec.front != "light":
            click.echo(f"This is vLLM's own server (the API: {url}/docs); the light edge instead: --front light")
        else:
            click.echo(f"or talk to it at {url}/ (the API: {url}/docs, the fleet: {url}/fleet)")
