"""The rights of keys: which role may do what. Pure, and the only module that says it; sockets and cores ask here.

A key's name is its place in the list: `nodes/prefill-0` is `allow/nodes/prefill-0.key`, and the folder is its role.
A peer without a name has proved no key: there are no keys (then everything that can reach a socket is one trust
domain), or the peer is this process itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias

from bus.wire import topics

KeyRole: TypeAlias = Literal["brokers", "controllers", "nodes", "clients", "admins"]
Domain: TypeAlias = Literal["publish", "subscribe", "bootstrap", "nodes", "clients", "data"]
ROLES: tuple[KeyRole, ...] = ("brokers", "controllers", "nodes", "clients", "admins")
# The roles that may connect to each socket. A key that is listed twice has the first of these roles.
DOMAINS: dict[str, tuple[KeyRole, ...]] = {
    "publish": ("controllers", "nodes"),
    "subscribe": ("controllers", "nodes", "admins"),
    "bootstrap": ("controllers", "nodes", "admins"),
    "nodes": ("nodes",),
    "clients": ("admins", "clients"),
    "data": ("nodes", "admins", "clients"),
}


class Known(bytes):
    """The first frame of a message (a routing id, a topic) from a peer that has proved its key."""

    key: str


def key_of(peer: Any) -> str:
    """Return the name of the peer's key; empty where there are no keys."""
    return getattr(peer, "key", "")


def may(peer: Any, *roles: KeyRole) -> bool:
    """Return true if the peer has one of these roles, or there are no keys."""
    key = key_of(peer)
    return not key or key.partition("/")[0] in roles


def speaks_for(peer: Any, instance: str) -> bool:
    """Return true if the peer may send in the name of the ranks of `instance`, or there are no keys."""
    key = key_of(peer)
    return not key or key == f"nodes/{instance}"


def owns(peer: Any, owner: str) -> bool:
    """Return true if the peer may read and end what belongs to the key `owner`; everyone may if `owner` is empty, and a
    peer without a key may do all."""
    return not owner or key_of(peer) in ("", owner)


@lru_cache(8192)
def publishes(key: str) -> tuple[bytes, ...]:
    """Return the beginnings of the topics that the holder of `key` (a key's name) may publish under; empty: none. The
    broker publishes without this check."""
    role, _, name = key.partition("/")
    if role == "nodes":
        return tuple(kind + name.encode() + b"/" for kind in (topics.LOAD, topics.ROOMS, topics.MEMBER, topics.KV))
    return (topics.SENT + name.encode() + b"/",) if role == "controllers" else ()
