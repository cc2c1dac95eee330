"""Connections whose other side must prove a key: each is dropped when that key is no longer listed in `allow/` of the
key directory. The other side is called a port here.

ZeroMQ keeps the key that a socket had when it connected, also through reconnects, so the list must be read again. This
module owns the connections and their keys, and drops them. Lists are read in `bus.runtime.allowlist`, sockets made and
closed in `bus.runtime.sockets`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.rights import ROLES, KeyRole
from bus.runtime.allowlist import Folder
from bus.runtime.logs import get_logger

LOOK_S = 1.0
MISSES = 2  # looks in a row: a list that is just being copied may lack a key

log = get_logger("bus")
Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class _Port:
    endpoint: str
    role: KeyRole
    name: str  # of its key; empty: any name of that role will do
    key: bytes
    connected: bool = True
    missed: int = 0

    def key_in(self, listed: dict[str, bytes]) -> bytes | None:
        """Return the key that the port must prove according to this list, or None."""
        if self.name:
            return listed.get(self.name)
        if self.key in listed.values():
            return self.key
        return next(iter(listed.values())) if len(listed) == 1 and self.role != "nodes" else None


class PeerKeys:
    """The connections with keys; `directory` is the key directory. The owner calls `look` every `LOOK_S` seconds: it
    disconnects sockets from ports whose key is no longer listed, and connects them again where the same name has
    another key. A list that cannot be read changes nothing. Only the thread that owns the sockets may call its
    methods."""

    def __init__(self, directory: Path) -> None:
        self._lists = {role: Folder(directory / "allow" / role) for role in ROLES}
        self._ports: dict[Socket, _Port] = {}

    def connected(self, socket: Socket, endpoint: str, role: KeyRole, name: str, key: bytes) -> None:
        """Record that `socket` connects to a port at `endpoint`, which proves `key`. `name` is the name under which the
        list of `role` must have that key. With an empty name, `key` must be the only key of the role, or for nodes any
        key of the list."""
        self._ports[socket] = _Port(endpoint, role, name, key)

    def closed(self, socket: Socket) -> None:
        """Forget `socket`, because it is closed."""
        self._ports.pop(socket, None)

    def look(self) -> None:
        """Compare the key of each recorded connection with the list, and disconnect or reconnect as the class says. A
        key counts as gone when `MISSES` calls in a row have not found it."""
        for socket, port in self._ports.items():
            folder = self._lists[port.role]
            held = folder.still_holds(port.key)  # asks for one file's state; to read the list costs one for each
            if held and port.name in ("", held):
                self._compared(socket, port, port.key)
            elif folder.read():
                self._compared(socket, port, port.key_in(folder.keys))

    def _compared(self, socket: Socket, port: _Port, key: bytes | None) -> None:
        port.missed = 0 if key == port.key else port.missed + 1
        if port.connected and port.missed >= MISSES:
            log.warning("port_key.revoked", role=port.role, key=port.name or port.key.decode(), endpoint=port.endpoint)
            port.connected = False
            with suppress(zmq.ZMQError):  # it is not connected any more
                socket.disconnect(port.endpoint)
        if not port.connected and key is not None:
            log.info("port_key.replaced", role=port.role, key=port.name or key.decode(), endpoint=port.endpoint)
            port.key, port.connected, port.missed = key, True, 0
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.connect(port.endpoint)
