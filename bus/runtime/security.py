"""The ZAP handler: it decides by the allowlist which keys may connect (ZeroMQ RFC 26/CURVEZMQ, 27/ZAP), and cuts off
revoked ones.

This module owns that decision and remembers the keys that it let in. `bus.rights` has the roles for each socket,
`bus.runtime.keys` reads keys from disk, and `bus.runtime.sockets` configures sockets.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.z85

from bus.runtime.allowlist import Allowlist
from bus.runtime.keys import Keys
from bus.runtime.logs import get_logger
from bus.runtime.token_buckets import TokenBuckets

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
LOGGED_MAX = 100  # lines a minute of refusals of a domain, of those of strangers, and of admissions; all are counted
MINUTE_S = 60.0
LOOK_MS = 1000  # how long a key that is taken off the list keeps its connections
SOURCES_MAX = 64  # remembered of a key; where a key has more, all connections of the domain are cut off
# Connections of one key. A ROUTER numbers each, and aborts when it comes to a number that a peer has claimed: one that
# holds 8,192 claims needs 3 hours on average at this rate.
HANDSHAKES, HANDSHAKES_PER_S = 8192, 50
_STOP = b"stop"

log = get_logger("bus")


class Lines:
    """A limit on log lines: LOGGED_MAX of a kind in a minute, and the first of the next minute says how many were left
    out. Pure."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int, int]] = {}  # by kind: since when, how many, and how many not

    def one(self, kind: str, now: float) -> int:
        """Count a line of `kind` and tell if it may be logged: -1 if it must be left out, else the number of lines left
        out since the last one that was logged."""
        since, logged, left_out = self._logged.get(kind, (now, 0, 0))
        if now - since >= MINUTE_S:
            since, logged = now, 0
        if logged >= LOGGED_MAX:
            self._logged[kind] = since, logged, left_out + 1
            return -1
        self._logged[kind] = since, logged + 1, 0
        return left_out


class Gatekeeper:
    """The ZAP handler of one Context, on a thread of its own: it lets listed CURVE keys in and refuses everything else.
    The messages of a peer then carry its key's name (User-Id). `refused` counts refusals by domain (the kind of
    socket).

    It calls `on_revoked(domain, sources)`, on that thread, for a connected key that is no longer listed. The sources
    are the hosts or processes from which it connected; None: too many to remember. `on_key_revoked(name, domain)` is
    called then too.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused: Counter[str] = Counter()
        self.on_revoked: Callable[[str, set[str] | None], None] = lambda domain, sources: None
        self.on_key_revoked: Callable[[str, str], None] = lambda name, domain: None
        self._admitted: dict[tuple[bytes, str], tuple[str, set[str] | None]] = {}  # by key and domain: as whom, whence
        self._handshakes = TokenBuckets(HANDSHAKES, HANDSHAKES_PER_S, 0)
        self._lines = Lines()
        self._known: set[bytes] = set()  # keys that were let in once: their refusals are logged apart from strangers'
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

    def guards(self, domain: str) -> None:
        """Start the count of refused peers of `domain` at 0: a Prometheus series that starts above 0 shows no
        increase."""
        self.refused.setdefault(domain, 0)

    def no_handshake(self, domain: str, endpoint: str) -> None:
        """Count and log a peer that failed before it showed a key: plaintext, another protocol, noise."""
        self._refuse(domain, endpoint, "no CURVE handshake")

    def close(self) -> None:
        """Stop the thread and wait for it, up to 5 s."""
        with self._context.socket(zmq.PUSH) as caller:
            caller.setsockopt(zmq.LINGER, 1000)
            caller.connect(f"inproc://gatekeeper-orders-{id(self)}")
            caller.send(_STOP)
        self._thread.join(5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._orders, zmq.POLLIN)
        look_at = 0.0
        while True:
            ready = dict(poller.poll(LOOK_MS if self._admitted else None))
            if (now := time.monotonic()) >= look_at:
                look_at = now + LOOK_MS / 1000
                self.look()
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                self._socket.send_multipart([frames[0], b"", *self.answer(frames[2:])])
            if self._orders in ready and self._orders.recv() == _STOP:
                for socket in (self._socket, self._orders):
                    socket.close(linger=0)
                return

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one ZAP request (RFC 27): 200 for a key that may connect to the request's domain, 300 for
        one that connects too often, 400 for anything else."""
        version, number, domain, address, _, mechanism = (request + [b""] * 6)[:6]
        at, source = domain.decode(errors="replace"), address.decode(errors="replace")
        if mechanism == b"CURVE" and len(request) == 7:
            key = zmq.utils.z85.encode(request[6])
            if name := self._allowlist.admits(key, at):
                if not self._handshakes.allows(key, 1, time.monotonic()):
                    self._refuse(at, source, "connects too often", known=True, key=name)
                    return [version, number, b"300", b"later", b"", b""]
                self._admit(key, name, at, source)
                return [version, number, b"200", b"OK", name.encode(), b""]
            name, why = self._allowlist.listed(key), "its role may not connect here"
            if not name:
                name = self._allowlist.revoked(key)
                why = "was revoked" if name else "not on the allowlist"
            self._refuse(at, source, why, known=bool(name) or key in self._known, key=name or key.decode())
        else:
            self._refuse(at, source, "not on the allowlist")
        return [version or b"1.0", number, b"400", b"not on the allowlist", b"", b""]

    def look(self) -> None:
        """Cut off each peer whose key is no longer listed, or is listed under another name. The thread calls it each
        second."""
        for (key, domain), (name, sources) in list(self._admitted.items()):
            if self._allowlist.admits(key, domain) != name:
                del self._admitted[key, domain]
                log.warning("key.revoked", key=name, domain=domain)
                self.on_revoked(domain, sources)
                self.on_key_revoked(name, domain)

    def _admit(self, key: bytes, name: str, domain: str, source: str) -> None:
        self._known.add(key)
        known, sources = self._admitted.get((key, domain), (name, set()))
        if sources is not None and source not in sources:
            self._log("info", "peer.admitted", "admitted", key=name, domain=domain, address=source)
            sources = None if len(sources) >= SOURCES_MAX else sources | {source}
        self._admitted[key, domain] = known, sources

    def _refuse(self, domain: str, address: str, why: str, *, known: bool = False, **fields: Any) -> None:
        self.refused[domain] += 1
        kind = f"{domain} {'known' if known else 'strangers'}"
        self._log("warning", "peer.refused", kind, domain=domain, address=address, why=why, **fields)

    def _log(self, level: str, event: str, kind: str, **fields: Any) -> None:
        left_out = self._lines.one(kind, time.monotonic())
        if left_out >= 0:
            getattr(log, level)(event, **fields, **({"left_out": left_out} if left_out else {}))
