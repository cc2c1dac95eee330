"""The client of the bus that an HTTP server is. Owns how long it waits for a cluster, and which key it takes."""

from __future__ import annotations

from pathlib import Path

from bus.runtime.keys import EDGE, load_keys
from pdbus.client import AsyncClient

OVERLOADED_S = 1.0  # how long an overloaded cluster is retried; longer back-off is the client's
NO_RANK_S = 5.0  # how long to wait for a restarting rank


class EdgeClient(AsyncClient):
    """A client that uses a client's key, never an admin's key in the same directory. `key_name` is the name of its own
    key in `keys`; empty: edge, else the only one."""

    def __init__(self, controller: str, keys: str = "", key_name: str = "") -> None:
        self._key_name = key_name
        super().__init__(controller, retries=12, overloaded_s=OVERLOADED_S, no_rank_s=NO_RANK_S, keys=keys)

    def _start(self, keys: str | Path, seed: int | None) -> None:
        super()._start("", seed)
        if keys:
            self._keys = load_keys(keys, "clients", name=self._key_name, default=EDGE)
