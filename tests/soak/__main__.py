"""`make soak`: keep breaking processes under load, and count what is lost, doubled or wrong."""

from __future__ import annotations

import json
import sys
import time

import click
from rich.console import Console
from rich.table import Table

from bus.runtime import cli, logs
from soak.run import SoakConfig, Verdict, run


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--at-least", type=click.IntRange(0), default=0, help="Go on until so many requests have completed.")
@click.option("--engine", type=click.Choice(["sim", "torch"]), default="sim", show_default=True)
@click.option("--model", default="", help="[default: sim for sim, else tiny]")
@click.option("--kill-every-s", type=cli.Seconds(), default=3.0, show_default=True, help="A fault about this often.")
@click.option("--seed", type=int, default=None, help="Of prompts, lengths and faults  [default: drawn, and printed]")
@click.option("--prefill", type=click.IntRange(0), default=2, show_default=True, help="Prefill ranks.")
@click.option("--decode", type=click.IntRange(0), default=2, show_default=True, help="Decode ranks.")
@click.option("--unified", type=click.IntRange(0), default=2, show_default=True, help="Unified ranks.")
@click.option("--concurrency", type=int, default=32, show_default=True, help="Requests that live at any time.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Output tokens of a request at most.")
@click.option("--prompt-tokens", type=int, default=256, show_default=True, help="Prompt tokens of a request at most.")
@click.option("--attackers", is_flag=True, help="Attack every port of the cluster meanwhile, from this machine.")
@click.option("--keys", is_flag=True, help="Give every part, client and attacker a key of its own, made for this.")
@click.option("--conversations", is_flag=True, help="Turns of conversations, on decode ranks that keep KV caches.")
def soak(
    minutes: float,
    at_least: int,
    engine: str,
    model: str,
    kill_every_s: float,
    seed: int | None,
    prefill: int,
    decode: int,
    unified: int,
    concurrency: int,
    max_tokens: int,
    prompt_tokens: int,
    attackers: bool,
    keys: bool,
    conversations: bool,
) -> None:
    """Kill, stop, drain and restart random processes under load; compare every output with the right one.

    The last line is a JSON object. Exit code 1 when a request was lost, doubled or wrong, a process left by itself, or
    under attack took more than 1 GiB.
    """
    config = SoakConfig(
        minutes=minutes,
        at_least=at_least,
        engine=engine,
        model=model,
        kill_every_s=kill_every_s,
        seed=int(time.time()) if seed is None else seed,
        prefill=prefill,
        decode=decode,
        unified=unified,
        concurrency=concurrency,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        attackers=attackers,
        keys=keys,
        conversations=conversations,
    )
    verdict = run(config, _say)
    _show(verdict)
    print(json.dumps(verdict.as_json()), flush=True)
    if not verdict.clean:
        sys.exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(verdict: Verdict) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(title="soak", title_justify="left", show_header=False)
    facts = verdict.as_json()
    failed = ", ".join(f"{code} {count}" for code, count in facts["failed"].items()) or "none"
    for name, value in facts.items():
        table.add_row(name, failed if name == "failed" else str(value))
    console.print(table)
    by_kind = ", ".join(f"{what} {count}" for what, count in sorted(verdict.faults.items()))
    console.print(f"faults: {by_kind or 'none'}")
    if verdict.attacks:
        console.print(f"attacks: {', '.join(f'{what} {count}' for what, count in sorted(verdict.attacks.items()))}")
    for line in (*verdict.ledger.complaints, *verdict.troubles, *(f"{rid} never ended" for rid in verdict.lost[:20])):
        console.print(line, markup=False)


if __name__ == "__main__":
    logs.configure("warning", part="soak")
    cli.run(soak, "soak")
