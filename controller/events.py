"""The events that the controller's core takes, and the actions that it returns for others to carry out, besides
`bus.actions.Publish` (publish on the bus) and `Note` (log). A node serves ranks, each a copy of the model; a `rid` is a
request's id.

Peers are opaque to the core: routing ids of one of the two ROUTER sockets, so clients and nodes have actions of their
own. This module owns only these shapes. They form no cycles: the garbage collector need not look at them.
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
    """A client sent `message`, with payload `frames` (anything with a length in bytes) that are not read here."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class FromNode(Struct, frozen=True, gc=False):
    """A node sent `message` over its connection `peer`."""

    peer: Any
    message: Message


class Published(Struct, frozen=True, gc=False):
    """An event: `message` came over the bus from any part (loads, memberships, counters of other controllers,
    beacons)."""

    message: Message


class Unreachable(Struct, frozen=True, gc=False):
    """An event: the node connection `peer` is gone. `message` did not leave; None: none was being sent."""

    peer: Any
    message: Message | None = None


class Undelivered(Struct, frozen=True, gc=False):
    """An event: `message` could not be queued for the node at `peer` (its queue is full); the connection stays."""

    peer: Any
    message: Message


class ClientGone(Struct, frozen=True, gc=False):
    """An event: `peer`, the client of `rid`, is no longer connected; its `Accepted` did not reach it."""

    peer: Any
    rid: Rid


class CacheChanged(Struct, frozen=True, gc=False):
    """An event: the prefix cache of rank `key` has changed (KV events of our nodes or of an engine that is
    followed)."""

    key: MemberKey
    changes: Changes


class EngineLoad(Struct, frozen=True, gc=False):
    """An event: rank `key` published its load in a form that acknowledges no dispatches (SGLang's LoadStat)."""

    key: MemberKey
    load: Load


class NextPart(Struct, frozen=True, gc=False):
    """An event: another turn has begun, for what is done a part at a time (`ControllerCore.unfinished`)."""


class Tick(Struct, frozen=True, gc=False):
    """An event: time has passed; the caller makes several a second."""


Event: TypeAlias = (
    FromClient
    | FromNode
    | Published
    | Unreachable
    | Undelivered
    | ClientGone
    | CacheChanged
    | EngineLoad
    | NextPart
    | Tick
)


class ToClient(Struct, frozen=True, gc=False):
    """An action: send a message to a client; one that is gone is no error."""

    peer: Any
    message: Message


class ToNode(Struct, frozen=True, gc=False):
    """An action: send a message to a node, `frames` unchanged; `Unreachable` or `Undelivered` comes back where it
    fails."""

    peer: Any
    message: Message
    frames: Sequence[Any] = ()


class Over(Struct, frozen=True, gc=False):
    """An action: a traced request has ended; `record` becomes a span."""

    record: RequestRecord


Action: TypeAlias = ToClient | ToNode | Publish | Note | Over
