"""Turns among clients that share a resource: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). The queues of
controller and nodes ask it which client is next.

Pure. Each client has a clock that advances by the tokens it is served. The client with the lowest clock is next. A
client that is new, or comes back, starts at the clock of the client served last, so no client saves up turns.
"""

from __future__ import annotations

from collections.abc import Iterable


class FairQueue:
    """The clocks of the clients; it holds no requests. A client is any name, usually that of a key. All operations are
    O(1); `next` is O(number of given clients)."""

    def __init__(self) -> None:
        self._clocks: dict[str, int] = {}  # tokens; of clients that wait, and of those that did while others have
        self._now = 0  # the clock of the client that was served last, before it was

    def enter(self, client: str) -> None:
        """Record that a client has begun to wait, before `serve`, `clock` or `next` may name it."""
        self._clocks[client] = max(self._clocks.get(client, 0), self._now)

    def serve(self, client: str, tokens: int) -> None:
        """Advance the client's clock by the `tokens` of the request that it is served now."""
        self._now = self._clocks[client]
        self._clocks[client] += tokens

    def clock(self, client: str) -> int:
        """Return the client's clock, in tokens. A client with a lower clock comes first."""
        return self._clocks[client]

    def next(self, clients: Iterable[str]) -> str:
        """Return the client of `clients` that is next; the first named among equals. All of them must have entered."""
        return min(clients, key=self._clocks.__getitem__)

    def clear(self) -> None:
        """Reset all clocks: no client waits any more."""
        self._clocks.clear()
        self._now = 0
