"""Who may do what, by key. Pure, and the only place that says it; sockets and cores ask here.

A key's name is where its file lies in the list: `nodes/prefill-0` is `allow/nodes/prefill-0.key`, its role the folder.
A peer without a name has proved no key: there are none here (then whoever reaches a socket is one trust domain), or it
is this process itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias

from bus.wire import topics

KeyRole: TypeAlias = Literal["brokers", "controllers", "nodes", "clients", "admins"]
Domain: TypeAlias = Literal["publish", "subscribe", "bootstrap", "nodes", "clients", "data"]
ROLES: tuple[KeyRole, ...] = ("brokers", "controllers", "nodes", "clients", "admins")
# Who may connect to what. A key listed twice is taken for the first of these roles.
DOMAINS: dict[str, tuple[KeyRole, ...]] = {
    "publish": ("controllers", "nodes"),
    "subscribe": ("controllers", "nodes", "admins"),
    "bootstrap": ("controllers", "nodes", "admins"),
    "nodes": ("nodes",),
    "clients": ("admins", "clients"),
    "data": ("nodes", "admins", "clients"),
}


class Known(bytes):
    """The first frame of a message (a routing id, a topic) of a peer that has proved its key."""

    key: str


def key_of(peer: Any) -> str:
    """The name of the peer's key; empty where there are no keys."""
    return getattr(peer, "key", "")


def may(peer: Any, *roles: KeyRole) -> bool:
    """Whether a peer of one of these roles may do what this one asks for."""
    key = key_of(peer)
    return not key or key.partition("/")[0] in roles


def speaks_for(peer: Any, instance: str) -> bool:
    """Whether the peer may say something in the name of the ranks of `instance`."""
    key = key_of(peer)
    return not key or key == f"nodes/{instance}"


def owns(peer: Any, owner: str) -> bool:
    """Whether the peer may read and end what belongs to the key `owner`."""
    return not owner or key_of(peer) in ("", owner)


@lru_cache(8192)
def publishes(key: str) -> tuple[bytes, ...]:
    """The beginnings of the topics that the holder of `key` may publish under. The broker's come from itself."""
    role, _, name = key.partition("/")
    if role == "nodes":
        return tuple(kind + name.encode() + b"/" for kind in (topics.LOAD, topics.ROOMS, topics.MEMBER, topics.KV))
    return (topics.SENT + name.encode() + b"/",) if role == "controllers" else ()
