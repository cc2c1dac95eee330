"""The seam for engines: a rank takes legs, and a runner runs them. Owns the types; holds no logic.

A runner is told of a leg by `start`, and says what becomes of it by events. All its methods are called on the link's
thread, and so is `emit`; none may block. What a runner says of a leg that is over is ignored, so a late output after
a cancel does no harm. An event is made for each token, and a load for each turn, so they are msgspec's structs, which
are made in a third of the time of dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from bus.wire.codes import Code
from bus.wire.messages import Load, TokenLogprobs
from nodes.link.facts import FOR_EVER as FOR_EVER
from nodes.link.facts import OVER_THE_BUS as OVER_THE_BUS
from nodes.link.facts import KvHandle as KvHandle
from nodes.link.facts import RankFacts as RankFacts
from nodes.link.leg import Leg

# --- events: what a runner says -----------------------------------------------------------------------------------


class Began(Struct, frozen=True):
    """Its computation has begun; `cached_tokens` of its prompt came from the prefix cache."""

    leg: Leg
    cached_tokens: int = 0


class Output(Struct, frozen=True):
    """Decode and unified legs: the next output tokens, and where the leg asks for log probabilities one for each."""

    leg: Leg
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


class Held(Struct, frozen=True):
    """A prefill leg's prompt is computed, and its KV cache kept for `valid_s` or until `release`, if sooner."""

    leg: Leg
    first_token: int
    handle: bytes = b""
    valid_s: float = FOR_EVER
    first_logprobs: TokenLogprobs | None = None  # where the leg asks for them and decode does not sample it itself


class Pull(Struct, frozen=True):
    """A decode leg wants blocks `first` .. `first`+`count`-1 (BlockRunner)."""

    leg: Leg
    first: int
    count: int


class Fetched(Struct, frozen=True):
    """A decode leg's KV cache is here: the rank it came from may free it."""

    leg: Leg
    seconds: float = 0.0


class Finished(Struct, frozen=True):
    """A decode or unified leg is over and well; all its output was told."""

    leg: Leg
    reason: Literal["stop", "length"]


class LegFailed(Struct, frozen=True):
    """A leg is over, and why. Usual codes: `engine_failed` (another rank may do better), `kv_failed`."""

    leg: Leg
    code: Code
    message: str = ""


class Stepped(Struct, frozen=True):
    """A forward step is done, or the load has changed otherwise: a `turn` and a report are due."""

    seconds: float = 0.0  # how long the step took; 0: not told


class CacheChanged(Struct, frozen=True):
    """KV-cache events to publish as they are: `[topic, sequence number, payload]` each, in the field's own format."""

    messages: Sequence[tuple[bytes, bytes, bytes]]


class Dead(Struct, frozen=True):
    """The engine is gone for good, and all its legs with it: the process says so, leaves, and is started anew."""

    reason: str


Event: TypeAlias = Began | Output | Held | Pull | Fetched | Finished | LegFailed | Stepped | CacheChanged | Dead
EVENTS = frozenset({Began, Output, Held, Pull, Fetched, Finished, LegFailed, Stepped, CacheChanged, Dead})
Emit: TypeAlias = Callable[[Event], None]


class Runner(Protocol):
    """Runs the legs of one rank."""

    facts: RankFacts

    def attach(self, emit: Emit) -> None:
        """Called once, before anything else: where events go. On the link's thread only."""

    def start(self, leg: Leg) -> None:
        """Run it: now, or when there is room for it (it counts in `load` from here on). A decode leg has a `handle`."""

    def cancel(self, leg: Leg) -> None:
        """Give it up, wherever it is, and free what it holds. Called once for each leg that did not end by itself."""

    def release(self, leg: Leg) -> None:
        """A held KV cache was fetched, or nobody wants it any more: free it."""

    @property
    def busy(self) -> bool:
        """Whether a step is being computed: a `step` of the load that stands still meanwhile is taken for a hang."""

    def load(self) -> Load:
        """The load as it is now, of all legs that were started and are not over: read right after the inbox, so that
        load and acknowledgements are of one moment. What the link knows itself it sets: `seq`, `acks`, and by the facts
        `kv_capacity` and `max_running`."""

    def turn(self, now: float) -> None:
        """After each turn of the loop in which something came for this rank: plan the next step, say."""

    def tick(self, now: float) -> None:
        """About 20 times a second: what is due by time."""

    def close(self) -> None:
        """Stop; idempotent."""


class BlockRunner(Runner, Protocol):
    """A runner whose KV caches travel block by block over the bus."""

    def export(self, leg: Leg, index: int) -> memoryview:
        """The bytes of block `index` of a held leg, without a copy where possible."""

    def received(self, leg: Leg, index: int, data: bytes | memoryview, intact: bool, now: float) -> None:
        """A block that a decode leg may have pulled; `intact`: its checksum was right."""
