"""Fresh random epochs: one for each start of a node, broker or controller."""

from __future__ import annotations

import secrets


def new_epoch() -> int:
    return secrets.randbelow(2**63 - 1) + 1
