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
from bus.errors import ConfigError, PartFailed, PeerLost, RemoteProtocolError, RequestFailed
from bus.runtime.logs import get_logger
from bus.runtime.security import load_keys
from bus.runtime.service import Service
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, FROM_NODE_DATA, Failed, Message, Refused, Status
from bus.wire.status import join
from pdbus.client.core import Begin, CancelAsked, ClientCore, Event, Received, Tick
from pdbus.client.output import Result, failure
from pdbus.client.request import Deliver, Patience, RequestPlan

TICK_S = 0.05
IDLE_S = 30.0  # connections to nodes that nobody uses are closed after so long
ASK_AGAIN_S = 1.0

log = get_logger("client")
Update = tuple[int, ...] | Result
FROM_STREAMS = {tag: FROM_NODE_DATA[tag] for tag in ("tokens", "refused")}


@dataclass(slots=True, eq=False)
class _Peer:
    socket: Socket
    used_at: float
    rejected: bool = False


@dataclass(slots=True, eq=False)
class _Question:
    """An inquiry at a controller, repeated until answered or too late."""

    peer: str
    message: Message
    answer: Future[Message]
    next_at: float
    until: float
    status: Status | None = None  # as far as it has come


class Channel(Service):
    """`controllers` are client endpoints; connections to nodes are made as needed. Serves from its making to `stop`."""

    part = "client"

    def __init__(
        self, controllers: Sequence[str], patience: Patience, *, keys: str | Path = "", seed: int | None = None
    ) -> None:
        self._patience = patience
        self._keys = load_keys(keys, server=False) if keys else None
        self.rng = random.Random(seed)  # also draws rids and rooms; `seed` is for tests
        self._controllers = frozenset(controllers)
        self._core = ClientCore(patience, self.rng)
        self._peers: dict[str, _Peer] = {}
        self._sinks: dict[str, Callable[[Update], None]] = {}
        self._questions: dict[int, _Question] = {}
        self._next_question = 0
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

    def new_rid(self) -> str:
        with self._lock:
            return f"{self.rng.getrandbits(64):016x}"

    def new_room(self) -> int:
        with self._lock:
            return self.rng.getrandbits(63)

    def begin(self, rid: str, plan: RequestPlan, sink: Callable[[Update], None]) -> None:
        """Start a request; `sink` gets its new token ids as they come and, once and last, its Result."""

        def start() -> None:
            if rid in self._sinks:
                sink(failure(rid, "duplicate_rid", f"this client has a live request with the rid {rid!r}"))
                return
            self._sinks[rid] = sink
            self._handle(Begin(rid, plan))

        self._call(start, lambda: sink(_broken(rid)))

    def cancel(self, rid: str) -> None:
        """End the request if it is still live; its Result comes as ever."""
        if not self._closed and self.failure is None:
            self._call(lambda: self._handle(CancelAsked(rid)), lambda: None)

    def ask(self, controller: str, make: Callable[[int], Message], timeout_s: float | None = None) -> Future[Message]:
        """Send `make(id)` until an answer with that id comes. ConfigError when `make` takes exception to its arguments.
        The future fails with PeerLost after `timeout_s` (default: `connect_timeout_s`), or with RequestFailed when the
        controller refuses."""
        try:
            make(0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        answer: Future[Message] = Future()
        wait_s = self._patience.connect_timeout_s if timeout_s is None else timeout_s

        def start() -> None:
            self._next_question += 1
            now = self.loop.clock()
            question = _Question(controller, make(self._next_question), answer, now, now + wait_s)
            self._questions[self._next_question] = question
            self._ask_again(now)

        self._call(start, lambda: _fail(answer))
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
            while self._questions:
                _fail(self._questions.popitem()[1].answer)
            while self._calls:
                self._calls.popleft()[1]()

    def leave(self) -> None:
        for rid in list(self._sinks):
            self._handle(CancelAsked(rid))
        for question in self._questions.values():
            question.answer.cancel()
        for peer in self._peers.values():  # what was just said (cancel, detach) still goes out
            self.loop.remove(peer.socket)
            self._sockets.close_socket(peer.socket, linger_ms=200)
        self._peers.clear()
        self._questions.clear()
        self.loop.stop()

    def _handle(self, event: Event) -> None:
        for action in self._core.handle(event, self.loop.clock()):
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Deliver):
                self._sinks[action.rid](action.ids)
            else:
                self._sinks.pop(action.rid)(action.result)

    def _send(self, action: Send) -> None:
        socket = self._connect(action.peer)
        try:
            socket.send_multipart([codec.encode(action.message), *action.frames], zmq.NOBLOCK)
        except zmq.Again:
            log.debug("message.unsent", peer=action.peer, cause=action.cause)  # the core repeats what matters

    def _connect(self, endpoint: str) -> Socket:
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = _Peer(self._sockets.dealer(endpoint, maximum=PAYLOAD_MAX), self.loop.clock())
            self._peers[endpoint] = peer
            self.loop.add(peer.socket, lambda frames: self._received(endpoint, frames))
        peer.used_at = self.loop.clock()
        return peer.socket

    def _received(self, endpoint: str, frames: list[bytes]) -> None:
        table = CONTROLLER_TO_CLIENT if endpoint in self._controllers else FROM_STREAMS
        try:
            if len(frames) != 1:
                raise RemoteProtocolError("frames", f"{len(frames)} frames, not 1")
            message = codec.decode(frames[0], table)
        except RemoteProtocolError as error:
            if not self._peers[endpoint].rejected:
                self._peers[endpoint].rejected = True
                log.warning("message.rejected", peer=endpoint, reason=error.reason, detail=error.detail[:200])
            return
        if isinstance(message, Status | Refused):
            self._answered(message)
        elif isinstance(message, Failed) and not message.rid:
            log.warning("client.refused", peer=endpoint, code=message.code, message=message.message)
        else:
            self._handle(Received(endpoint, message))

    def _answered(self, message: Status | Refused) -> None:
        question = self._questions.get(message.id)
        if question is None or question.answer.done():
            return
        if isinstance(message, Status):
            question.status = message = join(question.status, message)
            if message.remaining:
                return
        del self._questions[message.id]
        if isinstance(message, Refused) and message.code != "ok":
            question.answer.set_exception(RequestFailed(message.code, message.message))
        else:
            question.answer.set_result(message)

    def _ask_again(self, now: float) -> None:
        for number, question in list(self._questions.items()):
            if question.answer.done():
                del self._questions[number]
            elif now >= question.until:
                del self._questions[number]
                question.answer.set_exception(PeerLost(f"no controller answers at {question.peer}"))
            elif now >= question.next_at:
                question.next_at = now + ASK_AGAIN_S
                self._send(Send(question.peer, question.message, cause="ask"))

    def _tick(self) -> None:
        now = self.loop.clock()
        if len(self._core):
            self._handle(Tick())
        self._ask_again(now)
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


def _fail(answer: Future[Message]) -> None:
    if not answer.done():
        answer.set_exception(PartFailed("the client broke; its log says why"))
