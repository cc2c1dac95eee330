"""The scheduler processes (nodes), each with one or several ranks of an engine: blocks, batching, legs (the halves of a
request), KV transfer, token streams and engines. This package knows `bus`, not `controller`.

`nodes.link` connects ranks to controllers, clients and each other; `nodes.own` is the engine that comes with pdbus.
`Node` is one process with one or several of its ranks (`python -m nodes.prefill|decode|unified`). An engine with a
scheduler of its own embeds `RankLink`. Names are loaded when they are first used, torch when its engine is built.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodes.config import NodeConfig
    from nodes.engines import EngineKind, Opened
    from nodes.link.embed import RankLink
    from nodes.link.runner import RankFacts
    from nodes.node import Node
    from nodes.own.engines.factory import EngineConfig

_HOMES = {
    "EngineConfig": "own.engines.factory",
    "EngineKind": "engines",
    "Node": "node",
    "NodeConfig": "config",
    "Opened": "engines",
    "RankFacts": "link.runner",
    "RankLink": "link.embed",
}

__all__ = [
    "EngineConfig",
    "EngineKind",
    "Node",
    "NodeConfig",
    "Opened",
    "RankFacts",
    "RankLink",
]

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
        raise AttributeError(f"module 'nodes' has no attribute {name!r}")
    return getattr(import_module(f"nodes.{home}"), name)
