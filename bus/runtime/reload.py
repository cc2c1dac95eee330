"""SIGHUP: a part's settings are read again, and those that may change while it runs take effect.

This module owns the comparison with the settings in force; the part decides what a change means.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import click

from bus.errors import ConfigError
from bus.runtime import cli, logs, settings
from bus.runtime.loop import Loop

log = logs.get_logger("settings")


class Reload:
    """The reload of the running command's settings: call it on SIGHUP. `apply` gets the changed settings, by
    parameter name, and may raise ConfigError to refuse them. `leave` is called instead when the signal means that
    the terminal that started the part is gone."""

    def __init__(self, apply: Callable[[dict[str, Any]], None], leave: Callable[[], None]) -> None:
        self._context = click.get_current_context()
        self._in_force = dict(self._context.params)
        self._apply = apply
        self._leave = leave
        self._had_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as under nohup

    def __call__(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._leave()
            return
        try:
            values = settings.reread(self._context)
            changed = {name: value for name, value in values.items() if value != self._in_force[name]}
            may = settings.reloadable(self._context)
            taken = {name: changed[name] for name in changed.keys() & may.keys()}
            self._apply(taken)
        except (ConfigError, click.UsageError) as error:
            why = error.format_message() if isinstance(error, click.UsageError) else str(error)
            log.error("settings.kept", why=why)
            return
        if "log_level" in taken:
            logs.set_level(taken["log_level"])
        self._in_force |= taken
        if fixed := sorted(settings.names(self._context, changed.keys() - taken.keys())):
            log.warning("settings.need_restart", settings=fixed)
        log.info("settings.reloaded", changed={may[name]: value for name, value in sorted(taken.items())})


def on_signals(
    loop: Loop, apply: Callable[[dict[str, Any]], None], leave: Callable[[], None], other: Callable[[int], None]
) -> None:
    """Let the loop handle the signals of a part: SIGHUP reloads the running command's settings, as `Reload` does with
    `apply` and `leave`; SIGINT and SIGTERM call `other(number)`. Main thread only."""
    reload = Reload(apply, leave)
    loop.on_signals(lambda number: reload() if number == signal.SIGHUP else other(number), *cli.SIGNALS)


def _has_terminal() -> bool:
    """Return true if a terminal controls this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
