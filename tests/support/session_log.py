"""A method of a controller that writes down the session of each request, one a line, into the file `$SESSIONS`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from controller import Policy


class SessionLog(Policy):
    """The rank with the fewest tokens; each dispatch leaves a line."""

    def __init__(self, settings: Any) -> None:
        self._path = Path(os.environ["SESSIONS"])

    def pick(self, view: Any, request: Any, tokens: int) -> Any:
        return min(view, key=lambda rank: rank.tokens, default=None)

    def dispatched(self, rank: Any, request: Any, now: float) -> None:
        with self._path.open("a") as file:
            file.write(f"{request.session}\n")
