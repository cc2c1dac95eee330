"""The input events of the broker's core. This module owns these shapes only."""

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
    """`peer` sent a request over the bootstrap socket."""

    peer: Peer
    message: Message


class Unreachable(Struct, frozen=True, gc=False):
    """A send failed because `peer` is not connected."""

    peer: Peer


class Tick(Struct, frozen=True, gc=False):
    """Time has passed. A tick comes every few tens of milliseconds while `needs_ticks`, else with each beacon."""


Event: TypeAlias = Published | Asked | Unreachable | Tick
