"""`pdbus demo`: the main job, shown on a real model."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from bus.runtime import logs
from pdbus.demo import run


@click.command()
@click.option("--model", type=click.Choice(["smollm2", "tiny"]), default="smollm2", show_default=True)
@click.option("--max-tokens", type=click.IntRange(1, 512), default=48, show_default=True, help="For each prompt.")
@click.option("--verify/--no-verify", default=True, help="Compare every answer with a single-process run.")
def demo(model: str, max_tokens: int, verify: bool) -> None:
    """Real prompts through two prefill and two decode ranks, streamed, then who ran where."""
    logs.configure("warning")
    width = None if sys.stdout.isatty() else 110
    console = Console(highlight=False, width=width)
    if not run(console, model=model, max_tokens=max_tokens, verify=verify):
        sys.exit(1)
