"""`pdbus top`: a live view of a cluster in the terminal, until `q` or Ctrl-C. Owns its options and the loop over keys
and updates."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from contextlib import ExitStack

import click

from bus.endpoints import BusAddress
from bus.errors import ConfigError
from bus.runtime import cli, logs, settings
from bus.runtime.keys import any_key
from pdbus.client import Client
from pdbus.commands.common import (
    bus_option,
    check_http_installed,
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)


@settings.command("top")
@controller_option
@bus_option
@keys_option
@wait_option
@click.option(
    "--interval-s", type=cli.Seconds(0.2), default=1.0, show_default=True, help="How often to ask, in the terminal."
)
@click.option(
    "--http", default="", metavar="[HOST:]PORT", help="Serve it as a page there, instead of showing it in the terminal."
)
@click.option(
    "--ttft-slo-s",
    type=cli.Seconds(0),
    default=0.0,
    help="page: the line of an SLO in the chart  [default: the controller's]",
)
@click.option("--tpot-slo-s", type=cli.Seconds(0), default=0.0, help="page: the same of time per output token.")
@cli.log_level_option
def top(
    controller: str, bus: str, keys: str, wait_s: float, interval_s: float, http: str, ttft_slo_s: float,
    tpot_slo_s: float, log_level: str,
) -> None:  # fmt: skip
    """Watch a cluster: its ranks' load, latencies, faults and restarts, live. Press ? for the keys.

    With --http it is a page for browsers, at a URL that is printed; it works with all of the URL alone.
    """
    if http:
        logs.configure(log_level, part="top")
        _serve(http, controller, bus, keys, wait_s, ttft_slo_s, tpot_slo_s)
        return
    from rich.console import Console, Group

    from pdbus.fleet.figures import Sample
    from pdbus.fleet.history import History
    from pdbus.fleet.source import BrokerStatusClient, Watcher
    from pdbus.top.keys import is_terminal, keys_in, raw_keys
    from pdbus.top.screen import lines_of
    from pdbus.top.view import View

    if not is_terminal():
        raise ConfigError("top needs a terminal; elsewhere: pdbus top --http PORT, or pdbus status --watch")
    leave_on_signals()
    history, view, silent = History(), View(), ""
    console = Console(highlight=False)
    with ExitStack() as exits:
        client = exits.enter_context(Client(controller, keys=keys))
        wait_for_controller(client, controller, wait_s, keys)
        broker = exits.enter_context(BrokerStatusClient(BusAddress(bus), keys))
        woken, wake = os.pipe()
        exits.callback(os.close, woken)
        exits.callback(os.close, wake)
        signal.signal(signal.SIGWINCH, lambda number, frame: os.write(wake, b"x") and None)
        exits.callback(signal.signal, signal.SIGWINCH, signal.SIG_DFL)
        watcher = Watcher(client, broker, interval_s, wake)
        watcher.start()
        exits.callback(watcher.stop)
        exits.enter_context(raw_keys(sys.stdin.fileno()))
        screen = exits.enter_context(console.screen())
        selector = exits.enter_context(selectors.DefaultSelector())
        for descriptor in (sys.stdin.fileno(), woken):
            selector.register(descriptor, selectors.EVENT_READ)
        while not view.over:
            lines = lines_of(history, view, console.width, console.height, where=controller, silent=silent)
            screen.update(Group(*lines))
            for key, _ in selector.select():
                data = os.read(key.fd, 1024)
                if key.fd == woken:
                    continue
                if not data:
                    return  # the terminal has gone
                figures = history.figures()
                for pressed in keys_in(data):
                    view = view.pressed(pressed, figures.ranks if figures is not None else ())
            while not view.paused and not watcher.updates.empty():
                update = watcher.updates.get()
                if isinstance(update, Exception):
                    raise update
                silent = update if isinstance(update, str) else ""
                if isinstance(update, Sample):
                    history.add(update)


def _serve(
    http: str, controller: str, bus: str, keys: str, wait_s: float, ttft_slo_s: float, tpot_slo_s: float
) -> None:  # fmt: skip
    check_http_installed("pdbus top --http")
    from pdbus.edge.fleet_server import serve
    from pdbus.fleet.feed import Feed
    from pdbus.fleet.frames import Frames
    from pdbus.fleet.source import watching

    with Client(controller, keys=keys) as client:
        wait_for_controller(client, controller, wait_s, keys)
    key, frames = any_key(keys), Frames(ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
    serve(
        http,
        lambda publish, failed: Feed(lambda: watching(controller, key, bus), frames, publish, failed),
        lambda url: cli.ready(url=url),
    )
