"""The table of load balancing methods. Owns the names users give; picks nothing itself."""

from __future__ import annotations

from collections.abc import Callable

from bus.errors import ConfigError
from bus.runtime.logs import get_logger
from bus.wire.messages import Role
from controller.policies.base import Policy
from controller.policies.cache_aware import CacheAware
from controller.policies.follow_bootstrap_room import FollowBootstrapRoom
from controller.policies.least import RoundRobin, TotalRequests, TotalTokens

POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "follow_bootstrap_room": FollowBootstrapRoom,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
    "cache_aware": CacheAware,
}
AUTO: dict[Role, str] = {
    "prefill": "follow_bootstrap_room",
    "decode": "round_robin",
    "unified": "round_robin",
}
DEPRECATED = {"shortest_queue": "total_requests", "minimum_tokens": "total_tokens"}
REMOVED = {
    "decode_round_robin": "--decode-method round_robin",
    "prefill_round_robin_balance": "--prefill-method round_robin",
}

log = get_logger("controller")


def resolve(method: str, role: Role) -> str:
    """The name in `POLICIES` that `method` stands for. Old names are taken with a warning; ConfigError for removed and
    unknown ones."""
    if method == "auto":
        return AUTO[role]
    if replacement := DEPRECATED.get(method):
        log.warning("method.deprecated", method=method, use=replacement, role=role)
        return replacement
    if replacement := REMOVED.get(method):
        raise ConfigError(f"load_balance_method {method} is gone: use {replacement}")
    if method not in POLICIES:
        known = ", ".join(["auto", *POLICIES])
        raise ConfigError(f"unknown load_balance_method {method!r} for {role}: choose one of {known}")
    return method
