"""The file of a timeline: trace events as JSON, compressed where its name ends with `.gz`. Owns the file; it is there
under its name only when it is whole.
"""

from __future__ import annotations

import errno
import gzip
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from bus import build
from bus.errors import ConfigError
from pdbus.timeline.facts import Timeline
from pdbus.timeline.trace_events import Counts, TraceEvents


class TimelineFile:
    """The file at `path`, before there is anything to write: it is opened under another name in the same folder, and
    has its own once `write` is done. Raises ConfigError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.parent / f".pdbus-{os.getpid()}.part"
        try:
            with suppress(FileNotFoundError):
                mode = path.stat().st_mode
                if not stat.S_ISREG(mode):  # a pipe or a device, or the error for a folder
                    self._part = path
                elif not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._out: IO[bytes] = open(self._part, "wb")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what is still buffered does not fit, which `write` has said
            self._out.close()
        if self._part != self.path:
            self._part.unlink(missing_ok=True)

    def write(self, timeline: Timeline) -> Counts:
        """Write the timeline, and return what was written. Raises ConfigError if that fails."""
        events = TraceEvents(timeline)
        try:
            with ExitStack() as exits:
                out: IO[bytes] | gzip.GzipFile = self._out
                if self.path.name.endswith(".gz"):
                    out = gzip.GzipFile("", "wb", 6, self._out, mtime=0)
                    exits.callback(out.close)
                out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
                separator = b""
                for event in events:
                    out.write(separator + msgspec.json.encode(event))
                    separator = b",\n"
                about = {
                    "pdbus": build.version(), "notes": events.notes(), "zero_us": events.zero_us,
                    "slices": events.counts.slices, "counters": events.counts.counters, "flows": events.counts.flows,
                }  # fmt: skip
                out.write(b'\n],"otherData":' + msgspec.json.encode(about) + b"}\n")
            self._out.flush()
            if self._part != self.path:
                os.replace(self._part, self.path)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from None
        return events.counts
