"""The file of a timeline: trace events as JSON, compressed where its name ends with `.gz`."""

from __future__ import annotations

import gzip
from contextlib import ExitStack
from typing import IO

import msgspec

from bus import build
from pdbus.timeline.facts import Timeline
from pdbus.timeline.trace_events import Counts, TraceEvents
from pdbus.whole_file import WholeFile


class TimelineFile(WholeFile):
    """The file of a timeline."""

    def write(self, timeline: Timeline) -> Counts:
        """Write the timeline, and return what was written. Raises ConfigError if that fails."""
        events = TraceEvents(timeline)
        with self.whole() as file, ExitStack() as exits:
            out: IO[bytes] | gzip.GzipFile = file
            if self.path.name.endswith(".gz"):
                out = gzip.GzipFile("", "wb", 6, file, mtime=0)
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
        return events.counts
