"""The actions that a rank's core asks of its shell, besides sending and logging. This module owns the vocabulary
only.
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
    """Publish that this rank prefills `room`."""

    room: int
    attempt: int


class Unregister(Struct, frozen=True, gc=False):
    room: int
    attempt: int
    code: Code


class Locate(Struct, frozen=True, gc=False):
    """Find the rank that prefills `room` as `attempt` or newer, and call `located`."""

    room: int
    prefill_instance: str
    dp_rank: int | None
    deadline: float
    client: str  # for whose leg
    attempt: int  # 0: whichever there is


class Unlocate(Struct, frozen=True, gc=False):
    room: int
    client: str


class PublishFrames(Struct, frozen=True, gc=False):
    """Publish the runner's frames unchanged."""

    messages: Sequence[tuple[bytes, ...]]


# --- for the runner ----------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, gc=False):
    """Run the leg."""

    leg: Leg


class Cancel(Struct, frozen=True, gc=False):
    """Stop the leg: it is over before the runner ended it."""

    leg: Leg


class Release(Struct, frozen=True, gc=False):
    """Free the KV cache that the leg holds: it is not needed any more."""

    leg: Leg


class SendBlock(Struct, frozen=True, gc=False):
    """Send block `index` of a held leg, which has `tokens` tokens in it, to `peer`."""

    peer: bytes
    leg: Leg
    index: int
    tokens: int


class TakeBlock(Struct, frozen=True, gc=False):
    """A block came for a leg that the runner has."""

    leg: Leg
    index: int
    data: bytes | memoryview
    intact: bool


class Leave(Struct, frozen=True, gc=False):
    """The runner is dead: the rank ends, for `reason`."""

    reason: str


class Over(Struct, frozen=True, gc=False):
    """A traced leg is over: `record` becomes a span."""

    record: LegRecord


ForBus: TypeAlias = Register | Unregister | Locate | Unlocate | PublishFrames
ForRunner: TypeAlias = Start | Cancel | Release | TakeBlock
Action: TypeAlias = Send | SendBlock | Leave | Over | Note | ForBus | ForRunner
