"""What the pure cores ask their shells to do. Owns the vocabulary; must not do any of it.

A core is `handle(event, now) -> list[Action]`: no sockets, clocks, threads or global random inside; `now` is
seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bus.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message`, then `frames` untouched, to `peer` (a routing id, or a name the shell resolves)."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish `message` under its topic (`bus.wire.topics.of`)."""

    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """A log line: `event` is noun.past_verb."""

    event: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict)
