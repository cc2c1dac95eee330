"""The interface for engines: a rank takes legs (what it runs of a request: prefill, decode or both), and a runner runs
them. This module owns the types and holds no logic.

A runner gets a leg by `start`, and reports on it by events. All its methods are called on the link's thread, and it
must call `emit` there; none may block. An event of a leg that is over is ignored, so a late output after a cancel does
no harm. There is an event for each token and a load for each turn, so these are msgspec structs, which are built in a
third of the time of dataclasses.
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

# --- events of a runner -------------------------------------------------------------------------------------------


class Began(Struct, frozen=True):
    """A leg's computation has begun; `cached_tokens` of its prompt came from the prefix cache, and `written_tokens` of
    the others are written to it."""

    leg: Leg
    cached_tokens: int = 0
    written_tokens: int = 0


class Output(Struct, frozen=True):
    """The next output tokens of a decode or unified leg, with one of `logprobs` each where the leg asks for them."""

    leg: Leg
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


class PromptLogprobs(Struct, frozen=True):
    """The log probabilities of a unified leg's prompt, from its second token on. They come before its first output
    where its `params` ask for them and its `offset` is 0."""

    leg: Leg
    logprobs: tuple[TokenLogprobs, ...]


class Held(Struct, frozen=True):
    """A prefill leg's prompt is computed, and its KV cache is kept for `valid_s` seconds, or until `release` if that is
    sooner. `handle` goes to the decode rank's runner unread."""

    leg: Leg
    first_token: int
    handle: bytes = b""
    valid_s: float = FOR_EVER
    first_logprobs: TokenLogprobs | None = None  # where the leg asks for them and decode does not sample it itself


class Pull(Struct, frozen=True):
    """A decode leg wants blocks `first` .. `first`+`count`-1 of its prefill rank, or a prefill leg those of its decode
    rank; they come by `received` (BlockRunner)."""

    leg: Leg
    first: int
    count: int


class Reads(Struct, frozen=True):
    """A prefill leg has its memory, and wants to read what the decode rank of its request caches of the prompt."""

    leg: Leg


class HasRead(Struct, frozen=True):
    """A prefill leg reads no more, after so many seconds: `tokens` of its prompt came from the decode rank."""

    leg: Leg
    tokens: int
    seconds: float = 0.0


class Lent(Struct, frozen=True):
    """The first `blocks` blocks of a decode leg's prompt are kept here, for its prefill rank to read: until `reclaim`,
    and where they are read by an engine's own connector, with this `handle`, for `valid_s` seconds."""

    leg: Leg
    blocks: int
    handle: bytes = b""
    valid_s: float = FOR_EVER


class Fetched(Struct, frozen=True):
    """A decode leg's KV cache has been fetched, in so many seconds: the rank it came from may free it. `cached_tokens`
    of the prompt were in this rank's prefix cache, and so did not travel. `to_first_token`: the seconds last until the
    first token, with a wait and a step in them, and no speed of a link is learnt from them."""

    leg: Leg
    seconds: float = 0.0
    cached_tokens: int = 0
    to_first_token: bool = False


class Finished(Struct, frozen=True):
    """A decode or unified leg has ended well, after all its output."""

    leg: Leg
    reason: Literal["stop", "length"]


class LegFailed(Struct, frozen=True):
    """A leg has failed. Usual codes: `engine_failed` (another rank may do better), `kv_failed`."""

    leg: Leg
    code: Code
    message: str = ""


class Stepped(Struct, frozen=True):
    """A forward step is done, or the load has changed in another way: a `turn` and a report are due."""

    seconds: float = 0.0  # how long the step took; 0: unknown


class CacheChanged(Struct, frozen=True):
    """KV-cache events to publish unchanged: `[topic, sequence number, payload]` each, in the format of vLLM and
    SGLang."""

    messages: Sequence[tuple[bytes, bytes, bytes]]


class Dead(Struct, frozen=True):
    """The engine is dead, and all its legs with it: the process leaves, and its supervisor starts it again."""

    reason: str


Event: TypeAlias = (
    Began | Output | PromptLogprobs | Held | Pull | Reads | HasRead | Lent | Fetched | Finished | LegFailed | Stepped
    | CacheChanged | Dead
)  # fmt: skip
EVENTS = frozenset(
    {Began, Output, PromptLogprobs, Held, Pull, Reads, HasRead, Lent, Fetched, Finished, LegFailed, Stepped,
     CacheChanged, Dead}
)  # fmt: skip
Emit: TypeAlias = Callable[[Event], None]


class Runner(Protocol):
    """The runner of one rank's legs. An engine implements it; the link calls it."""

    facts: RankFacts

    def attach(self, emit: Emit) -> None:
        """Store the function that takes the runner's events. It is called once, before anything else. Call `emit` on
        the link's thread only."""

    def start(self, leg: Leg) -> None:
        """Run a leg, now or when there is space for it; it counts in `load` from here on. A decode leg comes with its
        `handle`: its KV cache is ready to be fetched."""

    def cancel(self, leg: Leg) -> None:
        """Stop a leg, in whatever state, and free what it holds. It is called once for each leg that did not end by
        itself; no event is needed."""

    def release(self, leg: Leg) -> None:
        """Free a held KV cache: it was fetched, or is not needed any more."""

    @property
    def busy(self) -> bool:
        """True while a step is computed. A `step` of the load that does not rise meanwhile is taken for a hang."""

    def load(self) -> Load:
        """Return the load of all legs that were started and are not over. It is read right after the inbox, so that
        load and acknowledgements are of one moment. The link itself sets `seq`, `acks` and, from the facts,
        `kv_capacity` and `max_running`."""

    def turn(self, now: float) -> None:
        """Plan the next step. It is called after each turn of the loop in which something came for this rank, or after
        a Stepped."""

    def tick(self, now: float) -> None:
        """Do what is due by time. It is called about 20 times a second, with seconds on the loop's clock."""

    def close(self) -> None:
        """Stop, and free what the runner has; idempotent."""


class BlockRunner(Runner, Protocol):
    """A runner whose KV caches travel block by block over the bus."""

    def export(self, leg: Leg, index: int) -> memoryview:
        """Return the bytes of block `index` of a held leg, without a copy where possible."""

    def received(self, leg: Leg, index: int, data: bytes | memoryview, intact: bool, now: float) -> None:
        """Take a block that a leg may have pulled. `intact` is false where its checksum was wrong: pull it again."""


class ReadingRunner(Runner, Protocol):
    """A runner whose prefill legs read back, or whose decode legs are read from: those of ranks whose facts say so.
    The `export` of a BlockRunner gives blocks that are lent, too."""

    def readable(self, leg: Leg, blocks: int, now: float) -> None:
        """Pull those of the first `blocks` blocks that are not here, and then compute the rest; 0: compute what has not
        come. It follows the leg's Reads, and ends with a HasRead. An engine's own connector reads with the leg's
        `handle`, all at once; what comes after its time is not used."""

    def lend(self, leg: Leg) -> None:
        """Keep what is cached of the prompt of a decode leg, which was not started, until `reclaim`; emit Lent. A
        handle is given for one leg alone."""

    def reclaim(self, leg: Leg) -> None:
        """Keep it no longer."""
