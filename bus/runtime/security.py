"""The handler that asks the allowlist who may connect (ZeroMQ RFC 26/CURVEZMQ, 27/ZAP).

Ports of the bus and the nodes' port of a controller take keys of nodes only; ports for clients take both. Owns that
decision; keys on disk are read in `bus.runtime.keys`, sockets configured in `bus.runtime.sockets`.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

import zmq
import zmq.utils.z85

from bus.runtime.allowlist import Allowlist
from bus.runtime.keys import Keys
from bus.runtime.logs import get_logger

Domain = Literal["nodes", "clients"]
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
REFUSALS_LOGGED = 1000  # a domain; all are counted
_STOP = b"stop"

log = get_logger("bus")


class Gatekeeper:
    """The ZAP handler of one Context, on a thread of its own: CURVE keys on the list get in, all else is refused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused: Counter[str] = Counter()
        self._allowlist = Allowlist(keys.directory)
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._orders = context.socket(zmq.PULL)
        self._orders.setsockopt(zmq.LINGER, 0)
        self._orders.bind(f"inproc://gatekeeper-orders-{id(self)}")
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def no_handshake(self, domain: str, endpoint: str) -> None:
        """Count a peer that failed before there was a key to judge: plaintext, another protocol, noise."""
        self._refuse(domain, endpoint, "no CURVE handshake")

    def close(self) -> None:
        with self._context.socket(zmq.PUSH) as caller:
            caller.setsockopt(zmq.LINGER, 1000)
            caller.connect(f"inproc://gatekeeper-orders-{id(self)}")
            caller.send(_STOP)
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._orders, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                self._socket.send_multipart([frames[0], b"", *self.answer(frames[2:])])
            if self._orders in ready and self._orders.recv() == _STOP:
                for socket in (self._socket, self._orders):
                    socket.close(linger=0)
                return

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request (RFC 27): 200 for an allowed CURVE key, 400 for anything else."""
        version, number, domain, address, _, mechanism = (request + [b""] * 6)[:6]
        verdict = (b"400", b"not on the allowlist", b"")
        if mechanism == b"CURVE" and len(request) == 7:
            key = zmq.utils.z85.encode(request[6])
            if self._allowlist.allows(key, domain.decode(errors="replace")):
                verdict = (b"200", b"OK", key)
        if verdict[0] != b"200":
            self._refuse(domain.decode(errors="replace"), address.decode(errors="replace"), "not on the allowlist")
        return [version or b"1.0", number, *verdict, b""]

    def _refuse(self, domain: str, address: str, why: str) -> None:
        self.refused[domain] += 1
        if self.refused[domain] <= REFUSALS_LOGGED:
            log.warning("peer.refused", domain=domain, address=address, why=why)
