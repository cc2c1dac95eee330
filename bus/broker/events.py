"""What the broker's core is told. Owns these shapes only."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from bus.broker.watches import Peer
from bus.wire.messages import Message


class Published(Struct, frozen=True, gc=False):
    """A publication arrived under `topic`."""

    topic: bytes
    message: Message


class Asked(Struct, frozen=True, gc=False):
    """`peer` asked over the bootstrap socket."""

    peer: Peer
    message: Message


class Unreachable(Struct, frozen=True, gc=False):
    """A send to `peer` found nobody."""

    peer: Peer


class Tick(Struct, frozen=True, gc=False):
    """Time passed. Wanted every few tens of milliseconds while `needs_ticks`, else for each beacon."""


Event: TypeAlias = Published | Asked | Unreachable | Tick
