"""The one table of load balancing methods: the names for users, and the factory behind each.

A method is a name in `POLICIES`, an entry point of the group `pdbus.policies`, or `module:Class`, where the module
may be the path of a file. This module picks nothing itself.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from bus.errors import ConfigError
from bus.runtime.logs import get_logger
from bus.wire.messages import Role
from controller.policies.base import Policy, PolicySettings
from controller.policies.guard import FAULTS, Guard, OnFault, fail_on, one_line
from controller.policies.least_cost import LeastCost
from controller.policies.methods import CacheAware, FollowBootstrapRoom, RoundRobin, TotalRequests, TotalTokens

Factory: TypeAlias = Callable[[PolicySettings], Policy]

GROUP = "pdbus.policies"  # of entry points
POLICIES: dict[str, Factory] = {
    "round_robin": RoundRobin,
    "follow_bootstrap_room": FollowBootstrapRoom,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
    "cache_aware": CacheAware,
    "least_cost": LeastCost,
}
"""The methods that come with pdbus, by name."""
OUR_OWN = tuple(POLICIES.values())  # those that come with pdbus: a program may add to POLICIES
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
    """Return the name of the method that `method` means for `role` (`auto` and old names become another one), in the
    form for `find`. Old names are logged. Raises ConfigError for removed and unknown ones, and for what cannot be
    loaded."""
    if method == "auto":
        return AUTO[role]
    if replacement := DEPRECATED.get(method):
        log.warning("method.deprecated", method=method, use=replacement, role=role)
        return replacement
    if replacement := REMOVED.get(method):
        raise ConfigError(f"load_balance_method {method} is gone: use {replacement}")
    if find(method) is None:
        raise unknown(f"load_balance_method {method!r} for {role}", method, ["auto", *POLICIES])
    return method


def find(method: str) -> Factory | None:
    """Return the factory of `method`'s policies; None when there is no such name. It imports the module of a policy
    from outside. Raises ConfigError when it cannot be loaded."""
    if method in POLICIES:
        return POLICIES[method]
    return _load(method) if ":" in method else _plugged_in(method)


def make_policy(method: str, settings: PolicySettings | None = None, on_fault: OnFault | None = None) -> Policy:
    """Return a new policy of `method` (from `resolve`), under a Guard unless it is one of ours. `settings` None: the
    defaults; `on_fault` None: a fault of the policy raises BusError. Raises ConfigError when it cannot be made."""
    factory = find(method)
    assert factory is not None, method
    try:
        policy = factory(settings or PolicySettings())
    except ConfigError:
        raise
    except FAULTS as error:
        raise ConfigError(f"{method} could not be made with its settings: {one_line(error)}") from error
    return guarded(policy, method, on_fault or fail_on(method))


def guarded(policy: Policy, method: str, on_fault: OnFault) -> Policy:
    """Return `policy` itself where it is ours, else a Guard of it. Raises ConfigError for an object that is no
    policy."""
    if type(policy) in OUR_OWN:
        return policy
    if not isinstance(policy, Policy):
        raise ConfigError(f"{method} makes a {type(policy).__name__}, which is no policy: subclass controller.Policy")
    return Guard(policy, on_fault)


def unknown(what: str, method: str, known: Iterable[str]) -> ConfigError:
    """Return (not raise) the error for an unknown name, with the known names and the nearest one."""
    names = [*known, *sorted(entry.name for entry in entry_points(group=GROUP))]
    near = difflib.get_close_matches(method, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return ConfigError(f"unknown {what}{hint}: choose from {', '.join(names)}, or give module:Class of your own")


def _plugged_in(name: str) -> Factory | None:
    for entry in entry_points(group=GROUP, name=name):
        return _factory(f"{name} ({entry.value})", entry.load)
    return None


def _load(method: str) -> Factory:
    where, _, name = method.rpartition(":")

    return _factory(
        method,
        lambda: attrgetter(name)(_module_at(Path(where)) if where.endswith(".py") else import_module(where)),
    )


def _factory(method: str, get: Callable[[], Any]) -> Factory:
    """Return what `get` imports; an exception of it becomes one line."""
    try:
        found = get()
    except FAULTS as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"cannot load the policy {method}: {what} (a module must be installed or on PYTHONPATH; "
            "path/to/file.py:Class names a file)"
        ) from error
    if not callable(found):
        raise ConfigError(f"{method} is a {type(found).__name__}: name a class or function that makes a policy")
    return found  # type: ignore[no-any-return]


def _module_at(path: Path) -> ModuleType:
    """Return the module in a file, imported once, by its path: so it hides no other module."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
