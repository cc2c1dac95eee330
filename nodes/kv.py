"""Moving KV blocks between nodes. Owns the transfer's sockets and bytes; decides nothing about legs.

`KvTransfer` is what a backend offers; `ZmqKv` is the first: blocks travel as ZeroMQ frames, straight out of the
engine's memory where they are large, over one DEALER per peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import structlog
import zmq

from bus.actions import Send
from bus.codec import decode, encode
from bus.errors import RemoteProtocolError, StartError
from bus.loop import Loop
from bus.messages import FROM_NODE_DATA, KvBlock, KvDone, KvFail, KvMeta, KvPull
from bus.sockets import KV_MAX, Socket, Sockets
from nodes.fetch import block_crc32
from nodes.offers import SendBlock

IDLE_S = 60.0
MAX_PEERS = 1024
Deliver = Callable[[KvMeta | KvBlock | KvFail, bytes | memoryview], None]

log = structlog.get_logger("node")


class KvTransfer(Protocol):
    """Nothing here blocks or raises for what a peer does."""

    sent_bytes: int
    received_bytes: int

    def request(self, endpoint: str, message: KvPull | KvDone, deliver: Deliver) -> None:
        """Send it to the node at `endpoint`; what comes back for the room goes to `deliver` until a KvDone."""

    def serve(self, block: SendBlock, data: memoryview) -> None:
        """Send one block to a peer that pulled it; it asks again if it does not arrive."""

    def tick(self, now: float) -> None: ...

    def close(self) -> None: ...


class _Peer:
    __slots__ = ("socket", "used_at")

    def __init__(self, socket: Socket, now: float) -> None:
        self.socket = socket
        self.used_at = now


class ZmqKv:
    """`router` is the process's data ROUTER, over which pulls come in and blocks go out."""

    def __init__(self, sockets: Sockets, loop: Loop, router: Socket, *, linger_ms: int = 500) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.unsent_blocks = 0
        self.rejected: Counter[str] = Counter()
        self._sockets = sockets
        self._loop = loop
        self._router = router
        self._linger_ms = linger_ms
        self._peers: dict[str, _Peer] = {}
        self._deliver: dict[int, tuple[int, Deliver]] = {}  # room -> (attempt, who pulls it)

    def request(self, endpoint: str, message: KvPull | KvDone, deliver: Deliver) -> None:
        known = self._deliver.get(message.room)
        if isinstance(message, KvPull):
            self._deliver[message.room] = (message.attempt, deliver)
        elif known is not None and known[0] == message.attempt:
            del self._deliver[message.room]
        peer = self._peer(endpoint)
        if peer is not None:
            try:
                peer.socket.send(encode(message), zmq.NOBLOCK)
                return
            except zmq.Again:
                if isinstance(message, KvDone):
                    self.rejected["unsent"] += 1
                return  # the pull is repeated
        if isinstance(message, KvPull):
            fail = KvFail(message.room, message.attempt, "kv_failed", f"cannot connect to {endpoint[:128]!r}")
            self._loop.call_later(0.0, lambda: self._hand_over(fail, b""))

    def serve(self, block: SendBlock, data: memoryview) -> None:
        crc32 = block_crc32(block.room, block.attempt, block.index, data)
        header = encode(KvBlock(block.room, block.attempt, block.index, block.tokens, crc32))
        try:
            self._router.send_multipart([block.peer, header, data], zmq.NOBLOCK, copy=False)
            self.sent_bytes += len(data)
        except zmq.ZMQError:  # its queue is full, or it is gone
            self.unsent_blocks += 1

    def tick(self, now: float) -> None:
        """Close connections that have been idle."""
        for endpoint, peer in list(self._peers.items()):
            if now - peer.used_at >= IDLE_S and not self._deliver:
                self._close_peer(endpoint)

    def close(self) -> None:
        for endpoint in list(self._peers):
            self._close_peer(endpoint)
        self._deliver.clear()

    def _peer(self, endpoint: str) -> _Peer | None:
        now = self._loop.clock()
        peer = self._peers.get(endpoint)
        if peer is None:
            if not endpoint.startswith(("ipc:///", "tcp://")):
                return None
            if len(self._peers) >= MAX_PEERS:
                self._close_peer(min(self._peers, key=lambda key: self._peers[key].used_at))
            try:
                socket = self._sockets.dealer(endpoint, maximum=KV_MAX)
            except StartError as error:
                log.warning("kv_peer.unreachable", endpoint=endpoint, error=str(error))
                return None
            self._loop.add(socket, self._receive, copied=1)
            peer = self._peers[endpoint] = _Peer(socket, now)
        peer.used_at = now
        return peer

    def _receive(self, frames: list[Any]) -> None:
        try:
            message = decode(frames[0], FROM_NODE_DATA)
            data = frames[1].buffer if len(frames) == 2 else b""
            if not isinstance(message, KvMeta | KvBlock | KvFail):
                raise RemoteProtocolError("tag", type(message).__name__)
            if len(frames) != (2 if isinstance(message, KvBlock) else 1):
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            if not self.rejected[error.reason]:
                log.warning("message.rejected", reason=error.reason, detail=error.detail, socket="kv")
            self.rejected[error.reason] += 1
            return
        self.received_bytes += len(data)
        self._hand_over(message, data)

    def _hand_over(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview) -> None:
        known = self._deliver.get(message.room)
        if known is not None:
            known[1](message, data)

    def _close_peer(self, endpoint: str) -> None:
        socket = self._peers.pop(endpoint).socket
        self._loop.remove(socket)
        self._sockets.close_socket(socket, linger_ms=self._linger_ms)


def send_answer(router: Socket, send: Send) -> bool:
    """Send one small message over a ROUTER without blocking; False when the peer is gone or its queue is full."""
    try:
        router.send_multipart([send.peer, encode(send.message), *send.frames], zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True
