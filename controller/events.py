"""What the controller's core is told, and what it asks for beside `bus.actions.Publish` and `Note`.

Peers are opaque to the core: routing ids of one of the two ROUTER sockets, which is why clients and nodes have
actions of their own. Owns these shapes only, which form no cycles: the garbage collector need not look at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from bus.actions import Note, Publish
from bus.wire.kv_names import Changes
from bus.wire.messages import Load, MemberKey, Message, Rid

if TYPE_CHECKING:
    from controller.requests.record import RequestRecord


class FromClient(Struct, frozen=True, gc=False):
    """A client said `message`, with payload `frames` (anything with a length in bytes) that nobody looks into."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class FromNode(Struct, frozen=True, gc=False):
    """A node said `message` over its connection `peer`."""

    peer: Any
    message: Message


class Published(Struct, frozen=True, gc=False):
    """`message` came over the bus."""

    message: Message


class Unreachable(Struct, frozen=True, gc=False):
    """The node connection `peer` is gone: `message` did not leave."""

    peer: Any
    message: Message | None = None


class Undelivered(Struct, frozen=True, gc=False):
    """`message` could not be queued for the node at `peer` (it is full)."""

    peer: Any
    message: Message


class ClientGone(Struct, frozen=True, gc=False):
    """`peer`, the client of `rid`, is connected no longer: it was not told that its request is accepted."""

    peer: Any
    rid: Rid


class CacheChanged(Struct, frozen=True, gc=False):
    """What rank `key` caches changed (KV events of our nodes or of an engine that is followed)."""

    key: MemberKey
    changes: Changes


class EngineLoad(Struct, frozen=True, gc=False):
    """Rank `key` said its load in a way that acknowledges nothing (SGLang's LoadStat)."""

    key: MemberKey
    load: Load


class Tick(Struct, frozen=True, gc=False):
    """Time passed; several a second."""


Event: TypeAlias = (
    FromClient | FromNode | Published | Unreachable | Undelivered | ClientGone | CacheChanged | EngineLoad | Tick
)


class ToClient(Struct, frozen=True, gc=False):
    """Send to a client; one that is gone is no error."""

    peer: Any
    message: Message


class ToNode(Struct, frozen=True, gc=False):
    """Send to a node, `frames` untouched; answered by `Unreachable` or `Undelivered` where it fails."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class Over(Struct, frozen=True, gc=False):
    """A request that is traced is over: `record` becomes a span."""

    record: RequestRecord


Action: TypeAlias = ToClient | ToNode | Publish | Note | Over
