"""How long a test waits for what has to come: less where a cut (`cuts`) sees to it that it does not."""

from __future__ import annotations

import os


def patience_s(seconds: float) -> float:
    return min(seconds, 10.0) if "PDBUS_TESTS_CUT" in os.environ else seconds
