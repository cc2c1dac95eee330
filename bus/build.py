"""The build of pdbus that runs: its version, and whether its cores are compiled (docs/performance.md)."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Literal

from bus.timer_slots import TimerSlots  # all of the cores are compiled, or none

CORES: Literal["pure", "compiled"] = "pure" if isinstance(TimerSlots.add, FunctionType) else "compiled"


@cache  # it is read from a file
def version() -> str:
    """Return the installed version; `unknown` where pdbus runs from its sources and is not installed."""
    from importlib import metadata  # takes longer to load than most commands that don't ask

    try:
        return metadata.version("pdbus")
    except metadata.PackageNotFoundError:
        return "unknown"
