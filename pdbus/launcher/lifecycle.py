"""Waits for children (the processes of a cluster): until all are READY, and until all have left. Owns no process."""

from __future__ import annotations

import json
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from bus.errors import StartError
from pdbus.launcher.child import Child

PROGRESS_S = 0.25
HURRY_S = 2.0  # how long a part may take to leave at once

Progress = Callable[[str], None]


def wait_ready(
    children: Iterable[Child],
    timeout_s: float,
    progress: Progress = lambda line: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait until each child is READY, calling `meanwhile` and `progress` (with a line to show) a few times a second.
    Raises StartError when a child exits first, ConfigError when that is for a bad setting, and StartError when not all
    are READY after `timeout_s`. It stops no child."""
    began = time.monotonic()
    until = began + timeout_s
    waiting = {child.fileno: child for child in children}
    with selectors.DefaultSelector() as selector:
        for fileno in waiting:
            selector.register(fileno, selectors.EVENT_READ)
        while waiting:
            for key, _ in selector.select(PROGRESS_S):
                child = waiting.get(key.fd)
                if child is None:
                    continue
                more = child.read()
                if child.ready:
                    selector.unregister(key.fd)
                    del waiting[key.fd]
                elif not more:
                    child.wait(10.0)
                    raise child.failure()
            meanwhile()
            now = time.monotonic()
            names = [child.name for child in waiting.values()]
            if waiting and now >= until:
                last = "".join(next(iter(waiting.values())).last_lines()[-1:])[:300]
                raise StartError(f"{', '.join(names)} not ready after {timeout_s:g} s; last words: {last or '-'}")
            if waiting:
                progress(_waiting_line(list(waiting.values()), now - began))


def take_down(
    children: list[Child],
    grace_s: float,
    progress: Progress = lambda line: None,
    *,
    hurried: Callable[[], bool] = lambda: False,
) -> bool:
    """Stop `children`, and return when all have ended: send SIGTERM (a node drains); after `grace_s` seconds, or once
    `hurried` returns true, send it again, which means to leave at once; after at most 2 s more, kill. Return true if
    Ctrl-C shortened a wait. Exceptions of `progress` are dropped."""
    hurry = min(HURRY_S, grace_s), lambda: False
    interrupted = False
    try:
        for wait_s, cut_short in (hurry if hurried() else (grace_s, hurried), hurry):
            try:
                _ask_to_leave(children, wait_s, progress, cut_short)
            except KeyboardInterrupt:
                interrupted = True
    finally:
        for child in children:
            child.close()
    return interrupted


def _ask_to_leave(children: list[Child], wait_s: float, progress: Progress, cut_short: Callable[[], bool]) -> None:
    for child in (living := [child for child in children if child.returncode is None]):
        child.send(signal.SIGCONT)
        child.send(signal.SIGTERM)
    began = time.monotonic()
    while living and not cut_short() and (waited_s := time.monotonic() - began) < wait_s:
        living[0].wait(min(PROGRESS_S, wait_s - waited_s))
        living = [child for child in living if child.returncode is None]
        if living:
            with suppress(Exception):
                progress(f"waiting for {_names(living)} to leave ({waited_s:.0f} s)")


def _waiting_line(children: list[Child], waited_s: float) -> str:
    """Return the names waited for, with the progress that the first one logs."""
    doing = ""
    for line in reversed(children[0].last_lines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "model.loading":
            doing = f": {entry.get('doing')} {entry.get('percent')} %"
        break
    return f"starting {_names(children)}{doing} ({waited_s:.0f} s)"


def _names(children: list[Child]) -> str:
    return ", ".join(child.name for child in children[:4]) + (" ..." if len(children) > 4 else "")
