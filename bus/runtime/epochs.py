"""Fresh random epochs, one for each start of a node, broker or controller; and when its clock began."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable


def new_epoch() -> int:
    return secrets.randbelow(2**63 - 1) + 1


def wall_s(clock: Callable[[], float]) -> float:
    """What to add to `clock()` to get seconds since 1970. Taken once: a step of the machine's clock later would tear
    apart what happened in a row."""
    return time.time() - clock()
