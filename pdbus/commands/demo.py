"""`pdbus demo`: real prompts through a small cluster with a real model; `pdbus.demo` does the work. Exit code 1: a
request failed or an answer differs."""

from __future__ import annotations

import os
import sys

import click
from rich.console import Console

from bus.errors import ConfigError
from bus.runtime import logs
from nodes.engines import EngineName, kind_of
from nodes.own.engines.factory import default_engine
from pdbus.demo import run


@click.command()
@click.option("--model", type=click.Choice(["smollm2", "tiny"]), default="smollm2", show_default=True)
@click.option(
    "--engine", type=EngineName("sim"), default=default_engine,
    show_default="torch, or numpy where torch is not installed",
    help="The engine; with vllm one prefill and one decode engine, on a CPU or a GPU.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1, 512), default=48, show_default=True, help="For each prompt.")
@click.option("--verify/--no-verify", default=True, help="Compare every answer with a single-process run.")
def demo(model: str, engine: str, max_tokens: int, verify: bool) -> None:
    """Run real prompts through two prefill and two decode ranks; show the answers and the ranks of each."""
    shown = kind_of(engine).demo
    if shown is None or model not in shown.models:
        models = " or ".join(shown.models) if shown is not None else "none"
        raise ConfigError(f"--engine {engine} runs the demo with --model {models}")
    logs.configure("warning")
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110
    console = Console(highlight=False, width=width)
    if not run(console, model=model, engine=engine, max_tokens=max_tokens, verify=verify):
        sys.exit(1)
