"""Epochs: random numbers, one for each start of a node, broker or controller, by which others notice a restart. Also
the offset of a process's clock."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable


def new_epoch() -> int:
    """Return a random epoch, from 1 to 2^63 - 1."""
    return secrets.randbelow(2**63 - 1) + 1


def wall_s(clock: Callable[[], float]) -> float:
    """Return the seconds to add to `clock()` to get the time since 1970. Call it once: a later step of the machine's
    clock would move events apart that happened one after another."""
    return time.time() - clock()
