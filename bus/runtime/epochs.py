"""Random epochs, one for each start of a node, broker or controller, and the offset of its clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable


def new_epoch() -> int:
    return secrets.randbelow(2**63 - 1) + 1


def wall_s(clock: Callable[[], float]) -> float:
    """Return the seconds to add to `clock()` to get the time since 1970. Call it once: a later step of the machine's
    clock would move events apart that happened one after another."""
    return time.time() - clock()
