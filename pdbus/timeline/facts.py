"""The facts that are recorded of a cluster for a timeline, live or in virtual time. Owns shapes; `trace_events` draws.

Times are whole microseconds. Those of a rank's steps and work are by its own clock, all others by the timeline's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from bus.wire.messages import ControllerEvent, RankStep, RankWork, Role

MAX_FACTS = 2_000_000  # of a timeline: some hundred megabytes in memory


class LoadSample(Struct, frozen=True, gc=False):
    """A rank's load, as it was last known at `at_us`."""

    at_us: int
    running: int
    waiting: int
    kv_tokens: int


@dataclass(slots=True)
class RankTrack:
    """The recording of one rank. Its clock is ahead of the timeline's by `offset_us`, known to within half of
    `rtt_us` (-1: not known at all). `note` says what is missing of it, for people."""

    instance: str
    dp_rank: int
    role: Role
    offset_us: int = 0
    rtt_us: int = 0
    steps: list[RankStep] = field(default_factory=list)
    work: list[RankWork] = field(default_factory=list)
    samples: list[LoadSample] = field(default_factory=list)
    note: str = ""

    @property
    def name(self) -> str:
        """The rank's name, as in `decode-0/1`."""
        return f"{self.instance}/{self.dp_rank}"


@dataclass(slots=True)
class Timeline:
    """The recording of a cluster. `queues` has for each controller how many requests wait in its central queue,
    from which time on."""

    title: str
    ranks: list[RankTrack] = field(default_factory=list)
    queues: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    events: dict[str, list[ControllerEvent]] = field(default_factory=dict)  # by controller
    notes: list[str] = field(default_factory=list)  # what a reader has to know, for people
