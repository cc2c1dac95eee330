"""The client's shell: one background thread with the sockets, the clock and the pure core. Decides nothing.

Callers on any thread (or in any asyncio loop) talk to it through `begin`, `cancel` and `ask`; what comes back is handed
to their callbacks on this thread, so a callback must only pass it on.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq

from bus.actions import Send
from bus.errors import ConfigError, PartFailed, RemoteProtocolError, StartError
from bus.runtime import frames
from bus.runtime.logs import get_logger
from bus.runtime.security import load_keys
from bus.runtime.service import Service
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, FROM_NODE_DATA, Failed, Message, Refused, Status
from pdbus.client.core import Action, ClientCore, Deliver, Patience
from pdbus.client.output import Result, failure
from pdbus.client.questions import Questions, settle
from pdbus.client.request import Request

TICK_S = 0.05
IDLE_S = 30.0  # connections to nodes that nobody uses are closed after so long

log = get_logger("client")
Update = tuple[int, ...] | Result
FROM_STREAMS = {tag: FROM_NODE_DATA[tag] for tag in ("tokens", "refused")}


@dataclass(slots=True, eq=False)
class _Peer:
    socket: Socket
    used_at: float
    rejected: bool = False


class Channel(Service):
    """`controllers` are client endpoints; connections to nodes are made as needed. Serves from its making to `stop`."""

    part = "client"

    def __init__(
        self, controllers: Sequence[str], patience: Patience, *, keys: str | Path = "", seed: int | None = None
    ) -> None:
        self._patience = patience
        self._keys = load_keys(keys, server=False) if keys else None
        self.rng = random.Random(seed)  # any thread draws from it: a single draw is atomic
        self._controllers = frozenset(controllers)
        self._core = ClientCore(patience, self.rng)
        self._peers: dict[str, _Peer] = {}
        self._sinks: dict[str, Callable[[Update], None]] = {}
        self._questions = Questions()
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()  # for the thread; see `_call`
        self._closed = False
        self.start()

    def _open(self, exits: ExitStack) -> None:
        self._sockets = exits.enter_context(Sockets(keys=self._keys))
        for endpoint in self._controllers:
            self._connect(endpoint)
        self.loop.call_every(TICK_S, self._tick)

    # --- any thread ---------------------------------------------------------------------------------------------

    def begin(self, request: Request, sink: Callable[[Update], None]) -> None:
        """Start a request; `sink` gets its new token ids as they come and, once and last, its Result."""
        rid = request.rid

        def start() -> None:
            if self._core.is_taken(request):
                sink(failure(rid, "duplicate_rid", f"this client has a live request with the rid {rid!r}"))
                return
            self._sinks[rid] = sink
            self._do(self._core.begin(request, self.loop.clock()))

        self._call(start, lambda: sink(_broken(rid)))

    def cancel(self, rid: str) -> None:
        """End the request if it is still live; its Result comes as ever."""
        if not self._closed and self.failure is None:
            self._call(lambda: self._do(self._core.cancel(rid, self.loop.clock())), lambda: None)

    def ask(
        self,
        controller: str,
        make: Callable[[int], Message],
        timeout_s: float | None = None,
        until: Callable[[Status], bool] | None = None,
    ) -> Future[Status]:
        """Send `make(id)` until the status comes that answers it. ConfigError when `make` takes exception to its
        arguments.

        With `until` it is sent again until the status meets that, and the last one is the answer when time is up. The
        future fails with PeerLost after `timeout_s` (default: `connect_timeout_s`) without any answer, or with
        RequestFailed when the controller refuses."""
        try:
            make(0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        answer: Future[Status] = Future()
        wait_s = self._patience.connect_timeout_s if timeout_s is None else timeout_s

        def start() -> None:
            now = self.loop.clock()
            self._questions.ask(controller, make, until, answer, now, wait_s)
            self._do(self._questions.tick(now))

        self._call(start, lambda: settle(answer, _bug()))
        return answer

    def stop(self) -> None:
        """Cancel what is live, and leave; idempotent. Every sink has got its Result when this returns."""
        self._closed = True
        super().stop()

    def _call(self, function: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Run `function` on the channel's thread, or `abandon` should that fail before."""
        self.raise_if_failed()
        if self._closed:
            raise RuntimeError("this client is closed")
        self._calls.append((function, abandon))
        self.loop.call_threadsafe(lambda: self._calls.popleft()[0]())
        if self.failure is not None:  # only now, so the thread may have looked for the last time
            self._failed()

    # --- the channel's thread -----------------------------------------------------------------------------------

    def _failed(self) -> None:
        """Nobody may wait for ever because of a bug of ours."""
        with self._lock:
            while self._sinks:
                rid, sink = self._sinks.popitem()
                sink(_broken(rid))
            self._questions.drop(_bug())
            while self._calls:
                self._calls.popleft()[1]()

    def leave(self) -> None:
        for rid in list(self._sinks):
            self._do(self._core.cancel(rid, self.loop.clock()))
        self._questions.drop()
        for peer in self._peers.values():  # what was just said (cancel, detach) still goes out
            self.loop.remove(peer.socket)
            self._sockets.close_socket(peer.socket, linger_ms=200)
        self._peers.clear()
        self.loop.stop()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Deliver):
                self._sinks[action.rid](action.ids)
            else:
                self._sinks.pop(action.rid)(action.result)

    def _send(self, action: Send) -> None:
        try:
            frames.send(self._connect(action.peer), [codec.encode(action.message), *action.frames])
        except zmq.Again:
            kind = type(action.message).__name__
            log.debug("message.unsent", peer=action.peer, message=kind)  # the core repeats what matters
        except StartError as error:  # a controller may name any endpoint as a rank's; to the core it is a silent one
            log.warning("rank.unreachable", peer=action.peer, error=str(error))

    def _connect(self, endpoint: str) -> Socket:
        """StartError where nobody can be."""
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = _Peer(self._sockets.dealer(endpoint, maximum=PAYLOAD_MAX), self.loop.clock())
            self._peers[endpoint] = peer
            self.loop.add(peer.socket, lambda received: self._received(endpoint, received))
        peer.used_at = self.loop.clock()
        return peer.socket

    def _received(self, endpoint: str, received: list[bytes]) -> None:
        table = CONTROLLER_TO_CLIENT if endpoint in self._controllers else FROM_STREAMS
        try:
            if len(received) != 1:
                raise RemoteProtocolError("frames", f"{len(received)} frames, not 1")
            message = codec.decode(received[0], table)
        except RemoteProtocolError as error:
            if not self._peers[endpoint].rejected:
                self._peers[endpoint].rejected = True
                log.warning("message.rejected", peer=endpoint, reason=error.reason, detail=error.detail[:200])
            return
        if isinstance(message, (Status, Refused)):
            self._questions.answered(endpoint, message, self.loop.clock())
        elif isinstance(message, Failed) and not message.rid:
            log.warning("client.refused", peer=endpoint, code=message.code, message=message.message)
        else:
            self._do(self._core.received(endpoint, message, self.loop.clock()))

    def _tick(self) -> None:
        now = self.loop.clock()
        if len(self._core):
            self._do(self._core.tick(now))
        self._do(self._questions.tick(now))
        idle = [e for e, p in self._peers.items() if now - p.used_at > IDLE_S and e not in self._controllers]
        if idle:
            attached = self._core.endpoints
            for endpoint in idle:
                if endpoint in attached:
                    self._peers[endpoint].used_at = now
                else:
                    peer = self._peers.pop(endpoint)
                    self.loop.remove(peer.socket)
                    self._sockets.close_socket(peer.socket)


def _broken(rid: str) -> Result:
    return failure(rid, "shutting_down", "the client broke; its log says why")


def _bug() -> PartFailed:
    return PartFailed("the client broke; its log says why")
