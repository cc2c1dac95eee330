"""The scheduler processes: blocks, batching, legs, KV transfer, token streams, engines. Knows `bus`, not `controller`.

Pure cores: `BlockPool` and `Scheduler`, which the replay lab runs too, `Legs`, `Streams`. The shell around them:
`Node`, one process with one or several ranks (`python -m nodes.prefill|decode|unified`). Names are loaded when they are
first used; torch only when its engine is built.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nodes.blocks import BlockPool
    from nodes.config import NodeConfig
    from nodes.engines.factory import EngineConfig, build_engine
    from nodes.legs import Legs, Limits
    from nodes.scheduler import Scheduler, Sequence
    from nodes.shell import Node
    from nodes.streams import Streams

_HOMES = {
    "BlockPool": "blocks",
    "EngineConfig": "engines.factory",
    "Legs": "legs",
    "Limits": "legs",
    "Node": "shell",
    "NodeConfig": "config",
    "Scheduler": "scheduler",
    "Sequence": "scheduler",
    "Streams": "streams",
    "build_engine": "engines.factory",
}

__all__ = [
    "BlockPool",
    "EngineConfig",
    "Legs",
    "Limits",
    "Node",
    "NodeConfig",
    "Scheduler",
    "Sequence",
    "Streams",
    "build_engine",
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
