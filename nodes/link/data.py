"""The connections to other nodes whose KV caches are pulled, and the sending of blocks (pieces of a KV cache). This
module owns these sockets; it decides nothing about legs, which are what a rank runs of requests.

Blocks travel as ZeroMQ frames, straight out of the engine's memory where they are large, over one DEALER per peer,
which all ranks of the process share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from bus.actions import Send
from bus.errors import RemoteProtocolError, StartError
from bus.runtime.frames import send
from bus.runtime.intake import Rejections
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.sockets import KV_MAX, Socket, Sockets
from bus.wire.codec import decode, encode
from bus.wire.hashing import block_crc32
from bus.wire.messages import FROM_NODE_DATA, KvBlock, KvDone, KvFail, KvMeta, KvPull
from nodes.link.actions import SendBlock

IDLE_S = 60.0
MAX_PEERS = 1024
FRAMES = {KvMeta: (1, 2), KvBlock: (2,), KvFail: (1,)}  # a meta may come with the engine's handle
Deliver = Callable[[KvMeta | KvBlock | KvFail, bytes | memoryview], None]

log = get_logger("node")


class _Peer:
    __slots__ = ("pulls", "socket", "used_at")

    def __init__(self, socket: Socket, now: float) -> None:
        self.socket = socket
        self.used_at = now
        # room -> the ranks of this process that pull it, and for which client
        self.pulls: dict[int, dict[tuple[Deliver, str], None]] = {}


class KvPeers:
    """The data connections of a process. `router` is its data ROUTER, over which pulls come in and blocks go out. No
    method blocks, or raises because of a peer; all are for the loop's thread."""

    def __init__(self, sockets: Sockets, loop: Loop, router: Socket, *, linger_ms: int = 500) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.unsent_blocks = 0
        self.rejected: Counter[str] = Counter()
        self._rejections = Rejections(log, self.rejected, socket="kv")
        self._sockets = sockets
        self._loop = loop
        self._router = router
        self._linger_ms = linger_ms
        self._peers: dict[str, _Peer] = {}

    def request(self, endpoint: str, message: KvPull | KvDone, deliver: Deliver) -> None:
        """Send a message to the node at `endpoint`, connecting if needed. From a KvPull until a KvDone, answers for its
        room go to `deliver`. A pull to a wrong address gets a KvFail, in a later turn. A node that is not there gives
        no answer, and at a full queue the message is lost, so the caller repeats pulls and limits its wait."""
        peer = self._peer(endpoint)
        if peer is None:
            if isinstance(message, KvPull):
                why = f"cannot connect to {endpoint[:128]!r}"
                fail = KvFail(message.room, message.attempt, "kv_failed", why, message.client)
                self._loop.call_later(0.0, lambda: deliver(fail, b""))
            return
        if isinstance(message, KvPull):
            peer.pulls.setdefault(message.room, {})[deliver, message.client] = None
        elif pullers := peer.pulls.pop(message.room, {}):
            pullers.pop((deliver, message.client), None)
            if pullers:
                peer.pulls[message.room] = pullers
        try:
            peer.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.rejected["unsent"] += isinstance(message, KvDone)  # a pull is repeated

    def serve(self, block: SendBlock, data: memoryview) -> int:
        """Send one block, with its bytes `data`, to a peer that pulled it, and return how many bytes were sent. ZeroMQ
        may read them later, without a notice; if they change meanwhile or do not arrive, the peer sees it by the
        checksum and asks again."""
        leg = block.leg
        crc32 = block_crc32(leg.room, leg.attempt, block.index, data)
        header = encode(KvBlock(leg.room, leg.attempt, block.index, block.tokens, crc32, leg.client))
        try:
            self._router.send_multipart([block.peer, header, data], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # its queue is full, or it is gone
            self.unsent_blocks += 1
            return 0
        self.sent_bytes += len(data)
        return len(data)

    def tick(self, now: float) -> None:
        """Close the connections without a pull that were not used for IDLE_S. Call it now and then."""
        for endpoint, peer in list(self._peers.items()):
            if not peer.pulls and now - peer.used_at >= IDLE_S:
                self._close_peer(endpoint)

    def close(self) -> None:
        """Close all connections; what is queued may still leave, for `linger_ms`."""
        for endpoint in list(self._peers):
            self._close_peer(endpoint)

    def _peer(self, endpoint: str) -> _Peer | None:
        now = self._loop.clock()
        peer = self._peers.get(endpoint)
        if peer is None:
            if not endpoint.startswith(("ipc:///", "tcp://")):
                return None
            if len(self._peers) >= MAX_PEERS:
                self._close_peer(min(self._peers, key=self._use))
            try:
                socket = self._sockets.dealer(endpoint, maximum=KV_MAX, role="nodes")
            except StartError as error:
                log.warning("kv_peer.unreachable", endpoint=endpoint, error=str(error))
                return None
            peer = self._peers[endpoint] = _Peer(socket, now)
            self._loop.add(socket, partial(self._receive, endpoint, peer), copied=1)
        peer.used_at = now
        return peer

    def _use(self, endpoint: str) -> tuple[bool, float]:
        """Return the order of closing, lowest first. A connection with a pull goes last, and its next pull opens it
        again."""
        peer = self._peers[endpoint]
        return bool(peer.pulls), peer.used_at

    def _receive(self, endpoint: str, peer: _Peer, frames: list[Any]) -> None:
        try:
            message = decode(frames[0], FROM_NODE_DATA)
            data = frames[1].buffer if len(frames) == 2 else b""
            if not isinstance(message, KvMeta | KvBlock | KvFail):
                raise RemoteProtocolError("tag", type(message).__name__)
            if len(frames) not in FRAMES[type(message)]:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            self._rejections.note(endpoint, error)
            return
        if isinstance(message, KvBlock):  # as they are counted where they are sent: no engine's handle
            self.received_bytes += len(data)
        pullers = peer.pulls.get(message.room, ())
        meant = [deliver for deliver, client in pullers if "" in (client, message.client) or client == message.client]
        for deliver in dict.fromkeys(meant):
            deliver(message, data)

    def _close_peer(self, endpoint: str) -> None:
        socket = self._peers.pop(endpoint).socket
        self._loop.remove(socket)
        self._sockets.close_socket(socket, linger_ms=self._linger_ms)


def send_answer(router: Socket, answer: Send) -> bool:
    """Send one small message to a peer of a ROUTER without blocking; return false when the peer is gone or its queue is
    full: it is lost."""
    try:
        send(router, (answer.peer, encode(answer.message), *answer.frames))
    except zmq.ZMQError:
        return False
    return True
