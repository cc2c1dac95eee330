"""The controller: it picks a rank (one copy of the model, at a node) for every leg (a rank's share of a request:
prefill, decode, or unified, which is both) and dispatches the leg there. It knows `bus`, not `nodes`.

`Controller` runs beside others or embedded. `Dispatcher` takes requests from the engine that embeds it.
`ControllerCore`, `LoadTable` and `POLICIES` are the pure parts, for simulation and for policies of your own. Names are
loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.checked import ControllerCore
    from controller.config import ControllerConfig
    from controller.dispatcher import Dispatcher
    from controller.load.checked import LoadTable
    from controller.policies import POLICIES, Policy, PolicySettings, PrefixPolicy
    from controller.shell import Controller

_HOMES = {
    "POLICIES": "policies",
    "Controller": "shell",
    "ControllerConfig": "config",
    "ControllerCore": "checked",
    "Dispatcher": "dispatcher",
    "LoadTable": "load.checked",
    "Policy": "policies",
    "PolicySettings": "policies",
    "PrefixPolicy": "policies",
}

__all__ = [
    "POLICIES", "Controller", "ControllerConfig", "ControllerCore", "Dispatcher", "LoadTable", "Policy",
    "PolicySettings", "PrefixPolicy",
]  # fmt: skip

_spec = find_spec("bus")
_bus = _spec and (_spec.origin or next(iter(_spec.submodule_search_locations or ()), None))
if _bus and Path(_bus).resolve().with_suffix("") != Path(__file__).resolve().parents[1] / "bus" / "__init__":
    raise ImportError(
        f"{_bus} hides pdbus's own package 'bus': rename it, or keep it off the import path (python -P)",
        name=__name__,  # so that `python -m` says it in one line
    )


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'controller' has no attribute {name!r}")
    return getattr(import_module(f"controller.{home}"), name)
