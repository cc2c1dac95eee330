"""What the core of a rank asks its shell to do, besides sending and logging. Owns the vocabulary alone."""

from __future__ import annotations

from dataclasses import dataclass

from bus.actions import Note, Send
from bus.wire.messages import Code
from nodes.link.sender import SendBlock


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
class ImportBlock:
    block: int
    data: bytes | memoryview


Action = Send | SendBlock | Register | Unregister | Locate | Unlocate | ImportBlock | Note
