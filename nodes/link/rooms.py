"""One rank's values by room (the number that joins the prefill and the decode leg of a request). With keys, a room
belongs to its client: the same number from another key is another room. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ByRoom(Generic[_T]):
    """Values by room and client, the oldest first. `client` is the name of a client's key. It is empty where the client
    is not known: there are no keys, or the sender (a Dispatcher, or an older peer) does not say. `len` and iteration
    are over all values."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, str], _T] = OrderedDict()
        self._clients: dict[int, list[str]] = {}  # of each room

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[_T]:
        return iter(self._held.values())

    def find(self, room: int, client: str) -> _T | None:
        """Return the value that `client` means by `room`: its own, else the one with an empty client; None if there is
        neither. For an empty `client` return the room's only value, or its own; None where several others could be
        meant, since each belongs to another client."""
        found = self._held.get((room, client))
        if found is not None or room not in self._clients:
            return found
        if client:
            return self._held.get((room, ""))
        clients = self._clients[room]
        return self._held[room, clients[0]] if len(clients) == 1 else None

    def all(self, room: int) -> list[_T]:
        """Return all values of a room, of every key."""
        return [self._held[room, client] for client in self._clients.get(room, ())]

    def put(self, room: int, client: str, value: _T) -> None:
        """Add a value as the newest; it replaces the value of the same room and client."""
        self.pop(room, client)
        self._held[room, client] = value
        self._clients.setdefault(room, []).append(client)

    def pop(self, room: int, client: str) -> None:
        """Remove the value of exactly this room and client, if there is one."""
        if self._held.pop((room, client), None) is not None:
            clients = self._clients[room]
            clients.remove(client)
            if not clients:
                del self._clients[room]

    def pop_oldest(self) -> None:
        """Remove the oldest value; there must be one."""
        self.pop(*next(iter(self._held)))
