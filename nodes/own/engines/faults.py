"""Fault injection for the fault suite: token ids that make the engine that is fed them misbehave ("poison").

Off unless a test's configuration turns it on. On the sim engine ids 0 to 2 are good poison: it never produces them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nodes.own.engines.base import Row

CRASH_EXIT_CODE = 86


@dataclass(frozen=True, slots=True)
class Faults:
    """A row that feeds `fail_token` fails its step, `hang_token` hangs it for ever, `crash_token` kills the process."""

    fail_token: int | None = None
    hang_token: int | None = None
    crash_token: int | None = None

    def __bool__(self) -> bool:
        return (self.fail_token, self.hang_token, self.crash_token) != (None, None, None)

    def fed(self, rows: Iterable[Row]) -> str:
        """ "", "fail" or "hang"; does not return on a crash token."""
        fed = {token for row in rows for token in row.tokens}
        if self.crash_token in fed:
            os._exit(CRASH_EXIT_CODE)
        return "hang" if self.hang_token in fed else "fail" if self.fail_token in fed else ""


NO_FAULTS = Faults()
