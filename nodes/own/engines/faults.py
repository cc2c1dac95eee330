"""Fault injection for the fault suite: token ids that make an engine fail when it is fed them ("poison").

It is off unless a test's configuration turns it on. On the sim engine ids 0 to 2 are good poison, because it never
produces them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nodes.own.engines.base import Row

CRASH_EXIT_CODE = 86


@dataclass(frozen=True, slots=True)
class Faults:
    """The tokens with faults (None: none): a row that feeds `fail_token` fails its step, `hang_token` hangs it without
    end, `crash_token` kills the process. It is true if one is set."""

    fail_token: int | None = None
    hang_token: int | None = None
    crash_token: int | None = None

    def __bool__(self) -> bool:
        return (self.fail_token, self.hang_token, self.crash_token) != (None, None, None)

    def fed(self, rows: Iterable[Row]) -> str:
        """Return the fault that a step with these rows must have: "fail", "hang" or "" (none). On a crash token it ends
        the process."""
        fed = {token for row in rows for token in row.tokens}
        if self.crash_token in fed:
            os._exit(CRASH_EXIT_CODE)
        return "hang" if self.hang_token in fed else "fail" if self.fail_token in fed else ""


NO_FAULTS = Faults()
