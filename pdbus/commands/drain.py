"""`pdbus drain`: a rank, or all ranks of a role, finish their requests and leave; the command waits until they have
left. A rank that is lost, or still has requests after `--drain-s`, is a StartError."""

from __future__ import annotations

import time

import click

from bus.errors import ConfigError, StartError
from bus.runtime import cli, settings
from bus.wire.messages import RankStatus, Status
from pdbus.client import Client
from pdbus.commands.common import ProgressLine, controller_option, keys_option, wait_for_controller, wait_option

ASK_S = 0.25
ROLES = ("prefill", "decode", "unified")


@settings.command("drain")
@click.argument("rank", metavar="[INSTANCE/RANK]", default="")
@click.option("--role", default="", metavar="ROLE", help="Drain all ranks of this role instead.")
@click.option("--model", default="", metavar="MODEL", help="With --role: only ranks of this model.")
@click.option(
    "--drain-s",
    type=cli.Seconds(),
    default=120.0,
    show_default=True,
    help="How long to wait for the end of its requests.",
)
@controller_option
@keys_option
@wait_option
def drain(rank: str, role: str, model: str, drain_s: float, controller: str, keys: str, wait_s: float) -> None:
    """Drain a rank, as in: pdbus drain decode-0/1. It takes no new requests, finishes those it has, and leaves.

    With --role, drain all ranks of a role. The controller does not report the role as missing then, unless it runs with
    --expect for that role.
    """
    instance, slash, number = rank.rpartition("/")
    if role and role not in ROLES:
        raise ConfigError(f"--role {role}: choose {', '.join(ROLES)}")
    if bool(rank) == bool(role) or (model and not role):
        raise ConfigError("name a rank like decode-0/1, or a role with --role (and a --model)")
    if rank and (not slash or not number.isdecimal() or len(number) > 4):
        raise ConfigError(f"{rank!r}: name a rank like decode-0/1")
    with Client(controller, keys=keys) as client, ProgressLine().showing() as progress:
        seen = wait_for_controller(client, controller, wait_s, keys)
        ours: list[RankStatus | None] = [_find(seen, instance, int(number))] if rank else []
        if role:
            there = [each for each in seen.ranks if each.role == role and model in ("", each.model)]
            ours += [each for each in there if each.state not in ("gone", "lost", "hung")]
            client.drain_role(role, model)  # type: ignore[arg-type]
        else:
            client.drain(instance, int(number))
        until = time.monotonic() + drain_s
        for before in ours:
            name = f"{before.instance}/{before.dp_rank}" if before is not None else rank
            _until_left(client, name, before, until, drain_s, progress)
            click.echo(f"{name} has finished and left")
    if role and not ours:
        click.echo(f"no {role} rank{f' of {model}' if model else ''} is there to drain")


def _until_left(
    client: Client, name: str, before: RankStatus | None, until: float, drain_s: float, progress: ProgressLine
) -> None:
    instance, _, number = name.rpartition("/")
    while True:
        seen = _find(client.status(), instance, int(number))
        if seen is None or seen.state == "gone" or (before is not None and seen.epoch != before.epoch):
            return
        if seen.state == "lost":
            raise StartError(f"{name} is lost: {silence_of(seen)}; nothing to drain")
        if time.monotonic() >= until:
            raise StartError(f"{name} still has {seen.outstanding} requests after {drain_s:g} s; it goes on draining")
        progress.show(f"{name} is {seen.state}: {seen.outstanding} requests left")
        time.sleep(ASK_S)


def _find(status: Status, instance: str, dp_rank: int) -> RankStatus | None:
    return next((rank for rank in status.ranks if (rank.instance, rank.dp_rank) == (instance, dp_rank)), None)


def silence_of(rank: RankStatus) -> str:
    """Return in words how long a lost rank has been silent, by the age of its last load report."""
    age_s = rank.report_age_s
    return "it never reported" if age_s < 0 else f"it has been silent for {age_s:.0f} s"
