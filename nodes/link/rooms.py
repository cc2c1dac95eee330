"""What one rank has of rooms. With keys a room is its client's: another key that names it means another room. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ByRoom(Generic[_T]):
    """One of a room and key, the oldest first. The empty key (there are none; a Dispatcher's; an older peer's, which
    says none) is anybody's."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, str], _T] = OrderedDict()
        self._clients: dict[int, list[str]] = {}  # of each room

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[_T]:
        return iter(self._held.values())

    def find(self, room: int, client: str) -> _T | None:
        """What is meant by `client`'s saying `room`: its own, else what is nobody's. Who says no key means the only one
        there is: of several, none, since one of them would be another's."""
        found = self._held.get((room, client))
        if found is not None or room not in self._clients:
            return found
        if client:
            return self._held.get((room, ""))
        clients = self._clients[room]
        return self._held[room, clients[0]] if len(clients) == 1 else None

    def all(self, room: int) -> list[_T]:
        """Whoever's."""
        return [self._held[room, client] for client in self._clients.get(room, ())]

    def put(self, room: int, client: str, value: _T) -> None:
        """It is the newest."""
        self.pop(room, client)
        self._held[room, client] = value
        self._clients.setdefault(room, []).append(client)

    def pop(self, room: int, client: str) -> None:
        """Forget that of just this key, if there is one."""
        if self._held.pop((room, client), None) is not None:
            clients = self._clients[room]
            clients.remove(client)
            if not clients:
                del self._clients[room]

    def pop_oldest(self) -> None:
        self.pop(*next(iter(self._held)))
