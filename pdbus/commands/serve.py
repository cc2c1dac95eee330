"""`pdbus serve`: the HTTP edge. Owns its options and its output."""

from __future__ import annotations

import os
import signal
from typing import Any

import click
from click.core import ParameterSource

from bus.errors import ConfigError
from bus.runtime import cli, logs, settings, spans
from pdbus.commands.common import ProgressLine, check_http_installed, controller_option, keys_option, tokenizers_option
from pdbus.edge.config import EdgeConfig
from pdbus.text.find import places_of

# The options that only the light edge has, and what does the same in vLLM's own server.
LIGHT = {
    "viewer_keys": "pdbus top --http",
    "api_keys": "--api-key",
    "tls_cert": "--ssl-certfile and --ssl-keyfile",
    "tls_key": "--ssl-certfile and --ssl-keyfile",
    "tokenizers": "--tokenizer",
    "sampling_defaults": "--generation-config",
    "chat_max_tokens": "--override-generation-config",
    "cors_origins": "--allowed-origins",
    "max_requests": "--max-num-queued-reqs",
    "max_body_bytes": "a proxy in front",
    "max_time_s": "a proxy in front",
    "otlp_endpoint": "--otlp-traces-endpoint",
}


@settings.command(
    "serve",
    reloads=("drain-s", "max-requests", "max-body-bytes", "max-time-s", "log-level"),
    epilog="Arguments after -- are those of `vllm serve`, with --front vllm. Any number of edges may run side by side. "
    "/docs lists the endpoints; /health and /ready are for probes, "
    "/metrics for Prometheus. SIGTERM lets requests finish.",
)
@cli.setting(EdgeConfig(), "--http", metavar="[HOST:]PORT", help="The address to listen on.")
@click.option(
    "--front",
    type=click.Choice(["light", "vllm"]),
    default="light",
    show_default=True,
    help="vllm: vLLM's own API server, with tools, /v1/responses and /v1/messages (docs/edge.md).",
)
@click.option(
    "--model", default="", metavar="PATH", help="vllm: the ranks' model, for its tokenizer and configuration alone."
)
@controller_option
@keys_option
@click.option(
    "--key-name",
    default="",
    metavar="NAME",
    help="The name of its own key in --keys, a client's  [default: edge, or the only one]",
)
@click.option(
    "--viewer-keys",
    default="",
    metavar="DIR",
    help="A directory with a viewer's key of its own, for /fleet  [default: that of --keys, if it has one]",
)
@click.option("--api-keys", default="", metavar="FILE", help="Bearer keys, their names and quotas (docs/edge.md).")
@click.option("--tls-cert", default="", metavar="FILE", help="PEM file; with --tls-key: HTTPS.")
@click.option("--tls-key", default="", metavar="FILE")
@tokenizers_option
@click.option(
    "--sampling-defaults",
    type=click.Choice(["model", "openai"]),
    default="model",
    show_default=True,
    help="Defaults of sampling parameters: from the model's generation_config.json, or OpenAI's.",
)
@click.option(
    "--chat-max-tokens",
    type=click.IntRange(0),
    default=0,
    help="For chats without a maximum  [default: what fits, or the model's own]",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin call it from a browser; repeat for each, or give *.",
)
@cli.setting(EdgeConfig(), "--wait-s", type=cli.Seconds(0.1), help="How long to wait for the controller at the start.")
@cli.setting(EdgeConfig(), "--drain-s", type=cli.Seconds(), help="How long requests may take to finish at the end.")
@cli.setting(
    EdgeConfig(), "--max-requests", type=click.IntRange(1), help="Maximum of answers in progress; more get 429."
)
@cli.setting(
    EdgeConfig(), "--max-body-bytes", type=click.IntRange(1), help="Maximum length of a request; longer ones get 413."
)
@cli.setting(
    EdgeConfig(), "--max-time-s", type=cli.Seconds(0.1), help="Maximum time of a request, whatever its deadline is."
)
@spans.otlp_endpoint_option
@cli.log_level_option
@cli.watch_parent_option
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENTS...]")
def serve(
    front: str, model: str, tokenizers: tuple[str, ...], otlp_endpoint: str, log_level: str, watch_parent: bool,
    vllm_args: tuple[str, ...], **chosen: Any,
) -> None:  # fmt: skip
    """Serve OpenAI's HTTP API in front of a running cluster."""
    if front != "light":
        _refuse_light_options()
        _serve_vllm(EdgeConfig(**chosen), model, vllm_args, log_level, watch_parent)
        return
    if model or vllm_args:
        given = "--model" if model else vllm_args[0]
        raise ConfigError(f"{given}: it is for --front vllm (docs/edge.md says which front is for whom)")
    check_http_installed("pdbus serve")
    from pdbus.edge.server import serve as run

    logs.configure(log_level, part="edge")
    config = EdgeConfig(tokenizers=places_of(tokenizers), **chosen)
    if watch_parent:
        cli.leave_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with spans.exporting(otlp_endpoint, "edge") as exporter:
        run(config, lambda url: cli.ready(endpoint=url), ProgressLine(at_once=True).show, exporter)


def _refuse_light_options() -> None:
    context = click.get_current_context()
    for name, instead in LIGHT.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = next(each for each in context.command.params if each.name == name)
            flag = max(option.opts, key=len)
            raise ConfigError(f"{flag} is the light edge's; for --front vllm there is {instead}")


def _serve_vllm(config: EdgeConfig, model: str, arguments: tuple[str, ...], log_level: str, watch_parent: bool) -> None:
    from pdbus.vllm_front import server

    server.check_installed()
    if not model:
        raise ConfigError("--front vllm needs --model PATH: the folder of the ranks' model, or its name")
    logs.configure(log_level, part="edge")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    if watch_parent:
        cli.leave_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    progress = ProgressLine(at_once=True)
    server.serve(config, model, arguments, lambda url: cli.ready(endpoint=url), progress.show)
