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
    """Return the offset in seconds that turns a reading of `clock` into the time since 1970. A process asks for it
    once: if the machine's clock is set meanwhile, times that were made with two offsets would not follow one
    another."""
    return time.time() - clock()
