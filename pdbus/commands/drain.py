"""`pdbus drain`: let one rank finish what it has and leave."""

from __future__ import annotations

import time

import click

from bus.errors import ConfigError, StartError
from bus.runtime import cli, settings
from bus.wire.messages import RankStatus, Status
from pdbus.client import Client
from pdbus.commands.common import Teller, controller_option, keys_option, wait_for_controller, wait_option

ASK_S = 0.25


@settings.command("drain")
@click.argument("rank", metavar="INSTANCE/RANK")
@click.option("--drain-s", type=cli.Seconds(), default=120.0, show_default=True, help="How long to wait for its end.")
@controller_option
@keys_option
@wait_option
def drain(rank: str, drain_s: float, controller: str, keys: str, wait_s: float) -> None:
    """Drain a rank, as in: pdbus drain decode-0/1. It takes nothing new, finishes what it has, and leaves."""
    instance, slash, number = rank.rpartition("/")
    if not slash or not number.isdecimal():
        raise ConfigError(f"{rank!r}: name a rank like decode-0/1")
    with Client(controller, keys=keys) as client, Teller().telling() as teller:
        before = _find(wait_for_controller(client, controller, wait_s, keys), instance, int(number))
        client.drain(instance, int(number))
        until = time.monotonic() + drain_s
        while True:
            seen = _find(client.status(), instance, int(number))
            if seen is None or seen.state == "gone" or (before is not None and seen.epoch != before.epoch):
                break
            if seen.state == "lost":
                raise StartError(f"{rank} is lost: {silence_of(seen)}; nothing to drain")
            if time.monotonic() >= until:
                raise StartError(
                    f"{rank} still has {seen.outstanding} requests after {drain_s:g} s; it goes on draining"
                )
            teller.say(f"{rank} is {seen.state}: {seen.outstanding} requests left")
            time.sleep(ASK_S)
    click.echo(f"{rank} has finished and left")


def _find(status: Status, instance: str, dp_rank: int) -> RankStatus | None:
    return next((rank for rank in status.ranks if (rank.instance, rank.dp_rank) == (instance, dp_rank)), None)


def silence_of(rank: RankStatus) -> str:
    """For sentences: how long a rank that is lost has been silent."""
    age_s = rank.report_age_s
    return "it never reported" if age_s < 0 else f"it has said nothing for {age_s:.0f} s"
