"""The actions that a pure core returns and its shell (the code that has the sockets and the clock) carries out, in
order. This module owns the vocabulary only.

A core is `handle(event, now) -> list[Action]`: no sockets, clocks, threads or global random numbers inside; `now` is
seconds on a monotonic clock. Events and actions, here and in each core, are frozen trees that the garbage collector
need not look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from bus.wire.messages import Message


class Send(Struct, frozen=True, gc=False):
    """Send `message`, then `frames` unchanged, to `peer` (a routing id, or a name that the shell resolves)."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class Publish(Struct, frozen=True, gc=False):
    """Publish `message` under its topic (`bus.wire.topics.of`)."""

    message: Message


class Note(Struct, frozen=True, gc=False):
    """A log line for the shell to write: `event` has the form noun.past_verb, `level` is debug, info, warning or error,
    and `fields` are its keys."""

    event: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict)
