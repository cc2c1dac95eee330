"""The actions that a rank's core returns and its shell carries out, besides sending and logging. This module owns the
vocabulary only.

A leg is what a rank runs of a request: its prefill, its decode, or both. A room joins the two legs of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from bus.actions import Note, Send
from bus.wire.codes import Code
from nodes.link.leg import Leg
from nodes.link.record import LegRecord

# --- for the bus -------------------------------------------------------------------------------------------------


class Register(Struct, frozen=True, gc=False):
    """Publish that this rank prefills `room`, as this attempt of its request."""

    room: int
    attempt: int


class Unregister(Struct, frozen=True, gc=False):
    """Publish that the room is over here: `ok`, or the code that says why no KV cache will come."""

    room: int
    attempt: int
    code: Code


class Locate(Struct, frozen=True, gc=False):
    """Find the rank that prefills `room` before `deadline` (the loop's clock), and give the result to the core's
    `located`. `prefill_instance` and `dp_rank` are what the dispatch says of that rank (empty, None: nothing)."""

    room: int
    prefill_instance: str
    dp_rank: int | None
    deadline: float
    client: str  # for whose leg
    attempt: int  # 0: whichever there is


class Unlocate(Struct, frozen=True, gc=False):
    """Stop the search of a Locate; no result is given."""

    room: int
    client: str


class PublishFrames(Struct, frozen=True, gc=False):
    """Publish these messages, as frames of the runner's own making, unchanged."""

    messages: Sequence[tuple[bytes, ...]]


# --- for the runner ----------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, gc=False):
    """Give the leg to the runner, which begins it."""

    leg: Leg


class Cancel(Struct, frozen=True, gc=False):
    """Make the runner drop the leg: it is over before the runner ended it."""

    leg: Leg


class Release(Struct, frozen=True, gc=False):
    """Make the runner free the KV cache that it holds for the leg: it is not needed any more."""

    leg: Leg


class SendBlock(Struct, frozen=True, gc=False):
    """Send KV block `index` of a leg that is held, or lent, to the rank `peer`; it has `tokens` tokens in it."""

    peer: bytes
    leg: Leg
    index: int
    tokens: int


class TakeBlock(Struct, frozen=True, gc=False):
    """Give the runner a KV block that came for its leg. `intact` is false where the checksum is wrong."""

    leg: Leg
    index: int
    data: bytes | memoryview
    intact: bool


class Readable(Struct, frozen=True, gc=False):
    """Tell the runner that its prefill leg can read the first `blocks` blocks of the prompt from the decode rank. 0: it
    reads no more, and computes what is missing."""

    leg: Leg
    blocks: int


class Lend(Struct, frozen=True, gc=False):
    """Make the runner keep what it caches of a decode leg's prompt, for the prefill rank to read."""

    leg: Leg


class Reclaim(Struct, frozen=True, gc=False):
    """Make the runner keep that no longer."""

    leg: Leg


class Leave(Struct, frozen=True, gc=False):
    """Make the rank leave, because its runner is dead for `reason`."""

    reason: str


class Over(Struct, frozen=True, gc=False):
    """Export `record` as a span: a traced leg is over."""

    record: LegRecord


ForBus: TypeAlias = Register | Unregister | Locate | Unlocate | PublishFrames
ForRunner: TypeAlias = Start | Cancel | Release | TakeBlock | Readable | Lend | Reclaim
Action: TypeAlias = Send | SendBlock | Leave | Over | Note | ForBus | ForRunner
