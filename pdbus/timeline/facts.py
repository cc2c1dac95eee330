"""The facts that are recorded of a cluster for a timeline, live or in virtual time. Owns shapes; `trace_events` draws.

Times are whole microseconds. Those of a rank are by its own clock, all others by the timeline's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from bus.wire.messages import ControllerEvent, Role


class Step(Struct, frozen=True, gc=False):
    """A forward step of a rank: the rows that decode in it, the prompt tokens that it computes, and the KV tokens of
    live requests while it runs. A rank numbers its steps 1, 2, 3 ..."""

    number: int
    began_us: int
    duration_us: int
    decode_rows: int
    prompt_tokens: int
    kv_tokens: int


class Work(Struct, frozen=True, gc=False):
    """A rank's work on one request: a `chunk` of its prompt that a step computes; a `fetch` of its KV cache from a
    prefill rank; a `read` of a part of it from a decode rank; or that it begins to `lend` or send its KV cache, which
    takes no time here.

    `tokens` of the prompt are concerned; of a chunk, `before` are computed before it and the prompt has
    `prompt_tokens`. The rank at the other end of a fetch or read is `instance/dp_rank`.
    """

    what: Literal["chunk", "fetch", "read", "lend"]
    rid: str
    attempt: int
    began_us: int
    duration_us: int
    tokens: int
    before: int = 0
    prompt_tokens: int = 0
    instance: str = ""
    dp_rank: int = 0


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
    steps: list[Step] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
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
