"""What the ranks of a process share: who they are, and where they find the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus import defaults
from bus.wire.messages import Role
from nodes.link.core import Limits


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Who the ranks of a process are, and where they find the rest. Durations in seconds."""

    role: Role
    instance: str
    dp_size: int = 1
    bus: str
    controllers: tuple[str, ...]
    data: str  # where the data socket goes: ipc:///directory or tcp://host
    report_interval_s: float = defaults.REPORT_INTERVAL_S
    room_ttl_s: float = defaults.ROOM_TTL_S
    limits: Limits = field(default_factory=Limits)
    keys: str = ""
