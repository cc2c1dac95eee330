"""The demo: real prompts go through two prefill and two decode ranks of a real model (for some engines, one of each).

Broker and controller run embedded in this process, the ranks as processes of their own. Every answer is then computed
again in this process alone, and must be equal, token for token. This module prints; broker, controller and ranks are
the ones that users run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bus.errors import RequestFailed
from bus.runtime import cli
from bus.wire.messages import Params, RankStatus
from nodes.engines import kind_of
from pdbus.client import AsyncClient, Result
from pdbus.commands.common import ProgressLine, curl_line
from pdbus.launcher import Cluster, ClusterSpec

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Name three fruits that are red, and say which one you would put into a pie.",
    "Give me one tip for learning a new language, as if I were a very busy person with ten minutes a day.",
    "What does a load balancer do? Answer for a child who is seven and likes trains and long queues for ice cream.",
)
SETTLE_S = 5.0
HTTP_PORT = 8000


@dataclass(slots=True)
class Answer:
    """One prompt and its answer so far. `result` is None and `error` empty until it ends; `equal`: the answer computed
    again is the same; None: not compared."""

    prompt: str
    prompt_ids: list[int] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    result: Result | None = None
    error: str = ""
    equal: bool | None = None


def run(console: Console, *, model: str, engine: str = "torch", max_tokens: int, verify: bool) -> bool:
    """Start the demo's cluster, send the prompts, print to `console`, and stop the cluster; the call returns when all
    of that is done. `max_tokens` is for each prompt. Return true if every request completed (and, with `verify`, equals
    the single-process answer). Raises StartError or ConfigError if the cluster does not start."""
    kind = kind_of(engine)
    demo = kind.demo
    assert demo is not None, "the command has checked it"
    ranks = demo.ranks
    spec = ClusterSpec(
        prefill=ranks,
        decode=ranks,
        model=model,
        engine=engine,
        prefill_method="total_tokens",
        decode_method="total_requests",
        embedded=True,
        start_timeout_s=demo.start_timeout_s,
        engine_args=demo.arguments,
        env=dict(demo.env),
    )
    answers = [Answer(prompt) for prompt in PROMPTS]
    progress = ProgressLine()
    with progress.showing():
        kind.prepare(model, lambda what, fraction: progress.show(f"{what}: {fraction:.0%}"))  # once for all ranks
        began = time.monotonic()
        cluster = Cluster(spec, progress=progress.show).start()
    try:
        console.print(
            f"[bold]{model}[/] by {engine} on {ranks} prefill (total_tokens) + {ranks} decode ranks (total_requests), "
            f"ready in {time.monotonic() - began:.1f} s; {len(answers)} prompts at once\n"
        )
        ended = asyncio.run(_answer_all(console, cluster.controller, answers, max_tokens))
    finally:
        cluster.stop()
    if verify:
        _verify(model, answers, max_tokens, demo.reference)
    console.print(_requests_table(answers, verify))
    console.print(_ranks_table(ended))
    return _print_outcome(console, answers, model, verify)


def _print_outcome(console: Console, answers: list[Answer], model: str, verify: bool) -> bool:
    """Print whether all is well, how to go on, and what failed. Return true if all is well."""
    good = all(not answer.error and answer.equal is not False for answer in answers)
    if verify and good:
        console.print(
            f"[green]All {len(answers)} answers equal the single-process run of the same model, token for token.[/]"
        )
    up, ask = how_to_ask(model)
    console.print(f"To ask it over HTTP yourself: {up}, and from another terminal:", markup=False, soft_wrap=True)
    console.print(ask, markup=False, soft_wrap=True)
    for answer in answers:
        if answer.error:
            console.print(f"[red]failed:[/] {answer.prompt!r}: {escape(answer.error)}")
        elif answer.equal is False:
            console.print(f"[red]differs from the single-process run:[/] {answer.prompt!r}")
    return good


def how_to_ask(model: str) -> tuple[str, str]:
    """Return two command lines: one that serves `model` over HTTP, and one that sends it a prompt."""
    usual = "" if model == "smollm2" else f" --model {model}"
    return f"pdbus up --http {HTTP_PORT}{usual}", curl_line(f"http://127.0.0.1:{HTTP_PORT}", model)


async def _answer_all(
    console: Console, controller: str, answers: list[Answer], max_tokens: int
) -> tuple[RankStatus, ...]:
    """Send all prompts at once and stream the answers; then return the status of each rank."""
    async with AsyncClient(controller=controller) as client:
        if console.is_terminal:
            with Live(_view(answers), console=console, refresh_per_second=12) as live:
                await asyncio.gather(
                    *(_answer(client, answer, max_tokens, lambda _: live.update(_view(answers))) for answer in answers)
                )
        else:
            lines = _LinePrinter(console, answers)
            await asyncio.gather(*(_answer(client, answer, max_tokens, lines.show) for answer in answers))
        return await _settled(client)


async def _settled(client: AsyncClient) -> tuple[RankStatus, ...]:
    """Return the status of the ranks once all report to be idle and all ends are known, or after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        ranks = (await client.status()).ranks
        busy = any(
            rank.estimate_requests or rank.estimate_tokens or rank.ended_total < rank.dispatched_total for rank in ranks
        )
        if time.monotonic() > deadline or not busy:
            return ranks
        await asyncio.sleep(0.1)


async def _answer(client: AsyncClient, answer: Answer, max_tokens: int, changed: Callable[[Answer], None]) -> None:
    try:
        stream = await client.generate(answer.prompt, max_tokens=max_tokens)
        answer.prompt_ids = list(stream.prompt_ids)
        async for piece in stream:
            answer.ids.extend(piece.ids)
            answer.text += cli.printable(piece.text)
            changed(answer)
        answer.result = stream.result
    except RequestFailed as error:
        answer.error = cli.printable(str(error))
    changed(answer)


class _LinePrinter:
    """Prints an answer in lines of a few words as it arrives, where the output is not a terminal."""

    def __init__(self, console: Console, answers: list[Answer]) -> None:
        self._console = console
        self._number = {id(answer): number for number, answer in enumerate(answers, 1)}
        self._shown = {id(answer): 0 for answer in answers}

    def show(self, answer: Answer) -> None:
        pending = answer.text[self._shown[id(answer)] :]
        ended = answer.result is not None or bool(answer.error)
        if pending.strip() and (len(pending) >= 40 or ended):
            self._shown[id(answer)] = len(answer.text)
            self._console.print(f"  [{self._number[id(answer)]}] {' '.join(pending.split())}", markup=False)


def _view(answers: list[Answer]) -> Group:
    return Group(
        *(
            Panel(Text(answer.text or "…"), title=Text(answer.prompt), title_align="left", border_style="dim")
            for answer in answers
        )
    )


def _verify(model: str, answers: list[Answer], max_tokens: int, engine: str = "torch") -> None:
    from nodes.own.engines.reference import generate_alone

    with ProgressLine(at_once=True).showing() as progress:
        for number, answer in enumerate(answers, 1):
            progress.show(f"computing every answer again in one process, to compare ({number} of {len(answers)}) ...")
            if not answer.error:
                answer.equal = (
                    generate_alone(model, answer.prompt_ids, max_tokens, Params(), engine=engine) == answer.ids
                )


def _requests_table(answers: list[Answer], verify: bool) -> Table:
    table = Table(title="Which ranks ran it", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("")
    table.add_column("prompt", no_wrap=True, ratio=1)
    for name in ("prefilled on", "decoded on", "found by"):
        table.add_column(name, no_wrap=True)
    for name in ("in", "out", "first token", "per token"):
        table.add_column(name, justify="right", no_wrap=True)
    if verify:
        table.add_column("equal", justify="center")
    for number, answer in enumerate(answers, 1):
        row = [str(number), answer.prompt]
        if answer.result is None:
            row += ["", "", "", str(len(answer.prompt_ids)), str(len(answer.ids)), "failed", ""]
        else:
            result = answer.result
            row += [
                f"{result.prefill.instance}/{result.prefill.dp_rank}" if result.prefill else "-",
                f"{result.decode.instance}/{result.decode.dp_rank}" if result.decode else "-",
                result.found_by,
                str(len(answer.prompt_ids)),
                str(len(answer.ids)),
                f"{result.ttft_s:.2f} s",
                f"{result.tpot_s * 1000:.0f} ms",
            ]
        if verify:
            row.append({True: "yes", False: "NO", None: "-"}[answer.equal])
        table.add_row(*row)
    return table


def _ranks_table(ranks: tuple[RankStatus, ...]) -> Table:
    table = Table(title="The load each rank ended with", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rank", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("dispatched", "ended", "running", "waiting", "KV tokens", "estimate", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        load = rank.load
        table.add_row(
            f"{rank.instance}/{rank.dp_rank}",
            rank.state,
            str(rank.dispatched_total),
            str(rank.ended_total),
            *([str(load.running), str(load.waiting), f"{load.kv_tokens}/{load.kv_capacity}"] if load else ["-"] * 3),
            f"{rank.estimate_requests} req, {rank.estimate_tokens} tok",
            str(rank.in_flight_requests),
        )
    return table
