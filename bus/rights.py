"""The rights of keys: which role may do what. Only this module defines them; sockets and cores ask it. Pure.

A key's name is its place in the list: `nodes/prefill-0` is `allow/nodes/prefill-0.key`, and the folder is its role.
A peer without a name has proved no key, either because no keys are used (then everything that can reach a socket is one
trust domain), or because the peer is this process itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias

from bus.wire import topics

KeyRole: TypeAlias = Literal["brokers", "controllers", "nodes", "clients", "viewers", "admins"]
Domain: TypeAlias = Literal["publish", "subscribe", "bootstrap", "nodes", "clients", "data"]
ROLES: tuple[KeyRole, ...] = ("brokers", "controllers", "nodes", "clients", "viewers", "admins")
# The roles that may connect to each socket. A key that is listed twice has the first of these roles.
DOMAINS: dict[str, tuple[KeyRole, ...]] = {
    "publish": ("controllers", "nodes"),
    "subscribe": ("controllers", "nodes", "admins"),
    "bootstrap": ("controllers", "nodes", "admins", "viewers"),
    "nodes": ("nodes",),
    "clients": ("admins", "clients", "viewers"),
    "data": ("nodes", "admins", "clients"),
}


class Known(bytes):
    """The first frame of a message (a routing id, a topic) from a peer that has proved its key."""

    key: str


def key_of(peer: Any) -> str:
    """Return the name of the peer's key; empty if it has proved none."""
    return getattr(peer, "key", "")


def may(peer: Any, *roles: KeyRole) -> bool:
    """Return true if the peer has one of these roles, or has no key."""
    key = key_of(peer)
    return not key or key.partition("/")[0] in roles


def may_see_all(peer: Any) -> bool:
    """Return true if the peer may see all of a status, and what became of any request."""
    return may(peer, "admins", "viewers")


def submits(key: str) -> bool:
    """Return true if the holder of a key (its name) may submit requests; a viewer may not."""
    return not key.startswith("viewers/")


def speaks_for(peer: Any, instance: str) -> bool:
    """Return true if the peer may send in the name of the ranks of `instance`; a peer without a key may."""
    key = key_of(peer)
    return not key or key == f"nodes/{instance}"


def owns(peer: Any, owner: str) -> bool:
    """Return true if the peer may read and end what belongs to the key `owner`. Every peer may if `owner` is empty; a
    peer without a key always may."""
    return not owner or key_of(peer) in ("", owner)


@lru_cache(8192)
def publishes(key: str) -> tuple[bytes, ...]:
    """Return the prefixes of the topics under which the holder of `key` (a key's name) may publish; empty: it may not
    publish. The broker itself publishes without this check."""
    role, _, name = key.partition("/")
    if role == "nodes":
        return tuple(kind + name.encode() + b"/" for kind in (topics.LOAD, topics.ROOMS, topics.MEMBER, topics.KV))
    return (topics.SENT + name.encode() + b"/",) if role == "controllers" else ()
