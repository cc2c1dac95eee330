"""Whose turn it is among clients that share something: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996).

Pure. Each client has a clock that runs on by the tokens of what it is served, and who is furthest behind is next. Who
comes anew, or comes back, starts where the clock of the one served last stood: nobody saves up turns.
"""

from __future__ import annotations

from collections.abc import Iterable


class FairQueue:
    """A client is any name, a key's as a rule. All operations are O(1), `next` is O(clients that it is given)."""

    def __init__(self) -> None:
        self._clocks: dict[str, int] = {}  # tokens; of clients that wait, and of those that did while others have
        self._now = 0  # the clock of the client that was served last, before it was

    def enter(self, client: str) -> None:
        """It has something to wait for, and had not."""
        self._clocks[client] = max(self._clocks.get(client, 0), self._now)

    def serve(self, client: str, tokens: int) -> None:
        self._now = self._clocks[client]
        self._clocks[client] += tokens

    def clock(self, client: str) -> int:
        """Less than another's: it is before that one."""
        return self._clocks[client]

    def next(self, clients: Iterable[str]) -> str:
        """Who of `clients`, that all have entered, is first; of equals the first named."""
        return min(clients, key=self._clocks.__getitem__)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._clocks.clear()
        self._now = 0
