"""`pdbus generate`: sends one prompt, streams the answers to stdout one after another, and prints a line of facts for
each on stderr. With --json, each answer is one object at its end, and so is an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click
from msgspec import structs

from bus.errors import BusError, ConfigError, PeerLost, RequestFailed
from bus.runtime import cli, settings
from bus.wire.messages import Location
from pdbus.client import Client, Options, Result, Stream, choices
from pdbus.client.options import any_rank
from pdbus.commands.common import (
    ProgressLine,
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)

_BY_CAPABILITY = {  # sampling parameters that only some ranks support, by client option
    "min_p": float, "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float,
    "min_tokens": int, "logprobs": int, "json_schema": str, "regex": str, "ebnf": str,
}  # fmt: skip
_PLACEMENT = ("leg", "instance", "prefill_instance", "routed_dp_rank", "disagg_prefill_dp_rank", "bootstrap_room")


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, kind in reversed(_BY_CAPABILITY.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, type=kind, default=None, help="As in vLLM; only for ranks that support it.")(
            command
        )
    return command


@contextmanager
def _failure_as_json(rids: Sequence[str] = (), *, as_json: bool) -> Iterator[None]:
    """With `as_json`, print an error as JSON too. `rids` are the requests sent so far."""
    try:
        yield
    except (click.ClickException, BusError) as error:
        if as_json:
            print(json.dumps(_failure(error, rids[-1] if rids else "")), flush=True)
        raise


class _Command(settings.Command):
    """A command that prints JSON also for an invalid call."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _failure_as_json(as_json="--json" in args):
            return super().make_context(info_name, list(args), parent, **extra)

    def check_environment(self) -> None:
        with _failure_as_json(as_json=click.get_current_context().params["as_json"]):
            super().check_environment()


@settings.command("generate", cls=_Command)
@click.argument("text")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="0: off.")
@click.option("--top-p", type=float, default=1.0, help="1: off.")
@click.option("--seed", type=int, default=None, help="The same seed gives the same sample  [default: drawn]")
@click.option(
    "-n",
    "--n",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of answers, each a request of its own.",
)
@_sampling_options
@click.option("--system", default=None, help="The system message.")
@click.option("--raw", is_flag=True, help="Continue TEXT as it is, without the chat template.")
@click.option("--tokens", is_flag=True, help="TEXT is a list of token ids, and so is the output.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each answer.")
@click.option("--deadline-s", type=cli.Seconds(), default=0.0, help="Give up after this time (0: never).")
@click.option("--leg", type=click.Choice(["pair", "prefill", "decode", "unified"]), default=None)
@click.option("--instance", default="", help="The instance that decodes, if there are several.")
@click.option("--prefill-instance", default="", help="The instance that prefills, if there are several.")
@click.option("--routed-dp-rank", type=int, default=None, help="The rank that decodes.")
@click.option("--disagg-prefill-dp-rank", type=int, default=None, help="The rank that prefills.")
@click.option("--bootstrap-room", type=int, default=None, help="[default: drawn]")
@click.option(
    "--retries", type=click.IntRange(0), default=6, show_default=True, help="Retries without a new token in between."
)
@click.option(
    "--tokenizer",
    default="",
    metavar="DIR",
    help="A folder with tokenizer.json, or the word bytes  [default: the model's own]",
)
@click.option("--prefill-controller", default=None, metavar="BASE", help="With --decode-controller: one for each leg.")
@click.option("--decode-controller", default=None, metavar="BASE")
@controller_option
@keys_option
@wait_option
def generate(text: str, controller: str, wait_s: float, **options: Any) -> None:
    """Send TEXT and stream the answer."""
    if options["logprobs"] is not None and not options["as_json"]:
        raise ConfigError("--logprobs goes with --json, which shows them")
    leave_on_signals()  # Ctrl-C then cancels the request
    split = options["decode_controller"]
    rids: list[str] = []
    try:
        with (
            _failure_as_json(rids, as_json=options["as_json"]),
            Client(
                None if split else controller,
                prefill_controller=options["prefill_controller"],
                decode_controller=split,
                retries=options["retries"],
                connect_timeout_s=wait_s,
                keys=options["keys"],
                tokenizer=options["tokenizer"],
            ) as client,
        ):
            status = wait_for_controller(client, split or controller, wait_s, keys=options["keys"])
            waits = "" if any_rank(status) else "waiting for a first rank to join ..."
            for stream in _begin(client, text, options, waits):
                rids.append(stream.rid)
                _show(stream, as_json=options["as_json"], tokens=options["tokens"])
    except KeyboardInterrupt:
        if options["as_json"] and not rids:  # otherwise the output so far is shown
            early = RequestFailed("cancelled", "cancelled before it was sent")
            print(json.dumps(_failure(early, "")), flush=True)
        raise


def _show(stream: Stream, *, as_json: bool, tokens: bool) -> None:
    shown = ""
    terminal = sys.stdout.isatty()
    try:
        for piece in stream:
            words = " ".join(map(str, piece.ids)) + " " if tokens else piece.text
            shown += words
            if not as_json:
                sys.stdout.write(cli.printable(words) if terminal else words)
                sys.stdout.flush()
    except RequestFailed:
        if shown and not as_json:
            print(flush=True)  # so that the error is on a line of its own
        raise
    except KeyboardInterrupt:
        if as_json:
            print(json.dumps(_as_dict(stream, shown)), flush=True)  # the output up to the cancel
        raise
    if as_json:
        print(json.dumps(_as_dict(stream, shown)))
    else:
        print(flush=True)
        with suppress(OSError):  # where stderr takes nothing, the answer is whole all the same
            print(cli.printable(_facts(stream.result, len(stream.prompt_ids))), file=sys.stderr)


def _begin(client: Client, text: str, options: dict[str, Any], waits: str) -> list[Stream]:
    """Submit all requests at once, so that reading one answer does not delay another."""
    chosen: Options = {name: options[name] for name in _PLACEMENT if options[name] not in (None, "")}  # type: ignore[assignment]
    chosen["max_tokens"] = options["max_tokens"]
    chosen["temperature"] = options["temperature"]
    chosen["top_k"] = options["top_k"]
    chosen["top_p"] = options["top_p"]
    chosen["deadline_s"] = options["deadline_s"]
    chosen |= {name: options[name] for name in _BY_CAPABILITY if options[name] is not None}  # type: ignore[typeddict-item]
    if options["seed"] is not None:
        chosen["seed"] = options["seed"]
    asked = choices(options["n"], **chosen)
    with ProgressLine().showing() as progress:
        if options["tokens"]:
            progress.show(waits)
            ids = _ids(text)
            return [client.generate_tokens(ids, **each) for each in asked]
        progress.show(waits or "loading the tokenizer ...")
        return [client.generate(text, chat=not options["raw"], system=options["system"], **each) for each in asked]


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ConfigError("with --tokens, TEXT is a list of token ids, like '5 6 7'") from None


def _name(at: Location | None) -> str:
    return f"{at.instance}/{at.dp_rank}" if at is not None else "-"


def _facts(result: Result, prompt_tokens: int) -> str:
    where = f"{_name(result.prefill)} -> {_name(result.decode)}" if result.prefill else _name(result.decode)
    return (
        f"[{where}, found by {result.found_by or '-'}; {prompt_tokens} prompt tokens, {len(result.ids)} output tokens; "
        f"first token after {result.ttft_s:.3f} s, then {1000 * result.tpot_s:.1f} ms each; "
        f"ended by {result.finish}, attempt {result.attempts}]"
    )


def _failure(error: click.ClickException | BusError, rid: str) -> dict[str, Any]:
    """Return what --json prints instead of a result. `rid` is empty when no request was sent."""
    if isinstance(error, RequestFailed):
        code, message, retryable = error.code, error.message, error.retryable
    else:
        lost = isinstance(error, PeerLost)
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        code, retryable = "no_controller" if lost else "bad_request", lost
    return {"code": code, "message": message, "retryable": retryable, "rid": rid}


def _as_dict(stream: Stream, text: str) -> dict[str, Any]:
    result = stream.result
    return {
        **structs.asdict(result),
        "logprobs": [{"logprob": each.logprob, "top": each.top} for each in result.logprobs],
        "prefill": _name(result.prefill),
        "decode": _name(result.decode),
        "tpot_s": result.tpot_s,
        "prompt_tokens": len(stream.prompt_ids),
        "text": text,
    }
