"""What the controller's core is told, and what it asks for beside `bus.actions.Publish` and `Note`.

Peers are opaque to the core: routing ids of one of the two ROUTER sockets, which is why clients and nodes have
actions of their own. Owns these shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct

from bus.actions import Note, Publish
from bus.messages import Load, MemberKey, Message
from controller.feeds.changes import Changes


class FromClient(NamedTuple):
    """A client said `message`, with payload `frames` (anything with a length in bytes) that nobody looks into."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class FromNode(NamedTuple):
    """A node said `message` over its connection `peer`."""

    peer: Any
    message: Message


class Published(NamedTuple):
    """`message` came over the bus."""

    message: Message


class Unreachable(NamedTuple):
    """The node connection `peer` is gone."""

    peer: Any


class Undelivered(NamedTuple):
    """`message` could not be queued for the node at `peer` (it is full)."""

    peer: Any
    message: Message


class CacheChanged(NamedTuple):
    """What rank `key` caches changed (KV events of our nodes or of an engine that is followed)."""

    key: MemberKey
    changes: Changes


class EngineLoad(NamedTuple):
    """Rank `key` said its load in a way that acknowledges nothing (SGLang's LoadStat)."""

    key: MemberKey
    load: Load


class Tick(NamedTuple):
    """Time passed; several a second."""


Event: TypeAlias = FromClient | FromNode | Published | Unreachable | Undelivered | CacheChanged | EngineLoad | Tick


class ToClient(Struct, frozen=True):
    """Send to a client; one that is gone is no error."""

    peer: Any
    message: Message
    cause: str = ""


class ToNode(Struct, frozen=True):
    """Send to a node, `frames` untouched; answered by `Unreachable` or `Undelivered` where it fails."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()
    cause: str = ""


Action: TypeAlias = ToClient | ToNode | Publish | Note
