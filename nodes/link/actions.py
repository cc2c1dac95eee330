"""What the core of a rank asks its shell to do, besides sending and logging. Owns the vocabulary alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bus.actions import Note, Send
from bus.wire.messages import Code
from nodes.link.leg import Leg

# --- for the bus -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Publish that this rank prefills `room`."""

    room: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Unregister:
    room: int
    attempt: int
    code: Code


@dataclass(frozen=True, slots=True)
class Locate:
    """Find the rank that prefills `room`, and call `located`."""

    room: int
    prefill_instance: str
    dp_rank: int | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Unlocate:
    room: int


@dataclass(frozen=True, slots=True)
class PublishFrames:
    """Publish what the runner made, as it is."""

    messages: Sequence[tuple[bytes, ...]]


# --- for the runner ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Run the leg."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Cancel:
    """The leg is over before the runner said so."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the KV cache that the leg holds."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send block `index` of a held leg, which has `tokens` tokens in it, to `peer`."""

    peer: bytes
    leg: Leg
    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TakeBlock:
    """A block came for a leg that the runner has."""

    leg: Leg
    index: int
    data: bytes | memoryview
    intact: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """The runner is dead: the rank is over, for `reason`."""

    reason: str


ForBus: TypeAlias = Register | Unregister | Locate | Unlocate | PublishFrames
ForRunner: TypeAlias = Start | Cancel | Release | TakeBlock
Action: TypeAlias = Send | SendBlock | Leave | Note | ForBus | ForRunner
