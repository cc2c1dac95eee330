"""The messages of a client: its sockets, its core (which decides about requests) and its questions (status, drain,
trace), on one thread. Decides nothing.

`channel` or `loop_channel` runs it, on a thread of its own or on the caller's loop, and waits for the sockets.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import zmq

from bus.actions import Send
from bus.errors import ConfigError, PartFailed, RemoteProtocolError, StartError
from bus.rights import KeyRole
from bus.runtime import frames
from bus.runtime.intake import Rejections
from bus.runtime.logs import get_logger
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.wire import codec
from bus.wire.messages import CONTROLLER_TO_CLIENT, FROM_NODE_DATA, Detach, Failed, Message, Table
from pdbus.client.core import Action, ClientCore, Patience
from pdbus.client.output import Deliver, Result, failure
from pdbus.client.questions import ANSWERS, A, Questions
from pdbus.client.request import Request

TICK_S = 0.05
IDLE_S = 30.0  # a connection to a node that is unused for this long is closed

log = get_logger("client")
Update = tuple[int, ...] | Result
Sink = Callable[[Update], None]
FROM_STREAMS = codec.readable(Table({tag: FROM_NODE_DATA[tag] for tag in ("tokens", "refused")}))


@dataclass(slots=True, eq=False)
class _Peer:
    socket: Socket
    used_at: float


class Traffic:
    """The traffic with `controllers` (client endpoints) and with nodes, to which it connects as needed.

    `watch(socket, handler)` passes each message of a socket to `handler`, until `unwatch(socket)`. `send` sends frames.
    The owner calls `tick` every TICK_S. Messages wait for `flush` at the end of a turn, which `flush_soon` requests:
    messages sent together wake ZeroMQ's I/O thread once, and the wake-up is most of a message's cost. A `detach` waits
    for the next message to its rank, or for the next tick: alone it would wake the rank.
    """

    def __init__(
        self,
        controllers: Sequence[str],
        patience: Patience,
        rng: random.Random,
        sockets: Sockets,
        clock: Callable[[], float],
        watch: Callable[[Socket, Callable[[list[bytes]], None]], None],
        unwatch: Callable[[Socket], None],
        send: Callable[[Socket, Sequence[bytes]], None] = frames.send,
        flush_soon: Callable[[], None] = lambda: None,
    ) -> None:
        self._patience = patience
        self._controllers = frozenset(controllers)
        self._core = ClientCore(patience, rng)
        self._sockets = sockets
        self._clock = clock
        self._watch = watch
        self._unwatch = unwatch
        self._send_frames = send
        self._flush_soon = flush_soon
        self._outbox: list[Send] = []
        self._flush_due = False
        self._detaches: list[Send] = []  # they wait for another message to their rank, or for the tick
        self._peers: dict[str, _Peer] = {}
        self._sinks: dict[str, Sink] = {}
        self.dropped: deque[tuple[str, Sink]] = deque()  # requests that are no longer read; any thread appends
        self._unread: list[tuple[str, Sink]] = []  # taken from `dropped` at the last tick
        self._questions = Questions()
        self._rejections = Rejections(log, Counter())
        self._look_at = clock() + LOOK_S
        for endpoint in self._controllers:
            self._connect(endpoint)

    def begin(self, request: Request, sink: Sink) -> None:
        """Submit a request. `sink` gets new token ids as they come, and at the end the Result; at once, if its rid is
        live already."""
        if self._core.is_taken(request):
            why = f"this client has a live request with the rid {request.rid!r}"
            sink(failure(request.rid, "duplicate_rid", why))
            return
        self._sinks[request.rid] = sink
        self._do(self._core.begin(request, self._clock()))

    def cancel(self, rid: str, sink: Sink | None = None) -> None:
        """Cancel the request `rid` if it is live; with `sink`, only if it is the request of that sink."""
        if sink is None or self._sinks.get(rid) == sink:
            self._do(self._core.cancel(rid, self._clock()))

    def ask(
        self,
        controller: str,
        make: Callable[[int], Message],
        kind: type[A],
        answer: Future[A],
        timeout_s: float | None,
        until: Callable[[A], bool] | None,
        repeat_s: float,
    ) -> None:
        """Ask `controller`, see `Questions.ask`. `timeout_s` None: the patience's `connect_timeout_s`."""
        now = self._clock()
        wait_s = self._patience.connect_timeout_s if timeout_s is None else timeout_s
        self._questions.ask(controller, make, kind, answer, now, wait_s, enough=until, repeat_s=repeat_s)
        self._do(self._questions.tick(now))

    def tick(self) -> None:
        """Do what is due: retries, deadlines, repeated questions, dropped requests, idle connections."""
        now = self._clock()
        if self.dropped or self._unread:
            self._end_unread()
        self._release_detaches()
        self._do(self._core.tick(now))
        self._do(self._questions.tick(now))
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._sockets.look()
        if self._outbox:
            self._request_flush()
        idle = [e for e, p in self._peers.items() if now - p.used_at > IDLE_S and e not in self._controllers]
        if idle:
            attached = self._core.endpoints
            for endpoint in idle:
                if endpoint in attached:
                    self._peers[endpoint].used_at = now
                else:
                    peer = self._peers.pop(endpoint)
                    self._unwatch(peer.socket)
                    self._sockets.close_socket(peer.socket)

    def leave(self, why: Exception | None = None) -> None:
        """Cancel live requests (their sinks get results) and close the sockets. Open questions fail with `why`; None:
        they are cancelled."""
        for rid in list(self._sinks):
            self.cancel(rid)
        self._questions.drop(why)
        self._release_detaches()
        self._request_flush()
        self.flush()
        for peer in self._peers.values():  # messages just sent (cancel, detach) still leave
            self._unwatch(peer.socket)
            self._sockets.close_socket(peer.socket, linger_ms=200)
        self._peers.clear()

    def flush(self) -> None:
        """Send the outbox, if a flush was requested."""
        if not self._flush_due:
            return
        self._flush_due = False
        sends, self._outbox = self._outbox, []
        for action in sends:
            self._send(action)

    def drop_results(self) -> None:
        """Deliver nothing from now on, because the callers are gone."""
        self._sinks = dict.fromkeys(self._sinks, lambda update: None)

    def fail(self) -> None:
        """Give every request and question a failure as its end, after a bug of ours, so that no caller waits without
        end."""
        while self._sinks:
            rid, sink = self._sinks.popitem()
            sink(broken(rid))
        self._questions.drop(bug())

    # --- inside -------------------------------------------------------------------------------------------------

    def _end_unread(self) -> None:
        """Cancel dropped requests, one tick late: a request may be dropped before its `begin` has run."""
        due, self._unread = self._unread, []
        while self.dropped:
            self._unread.append(self.dropped.popleft())
        for rid, sink in due:
            if self._sinks.get(rid) == sink:  # not another request of that rid
                self.cancel(rid)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, Detach):
                    self._detaches.append(action)
                    continue
                if self._detaches:
                    self._release_detaches(action.peer)
                self._outbox.append(action)
                self._request_flush()
            elif isinstance(action, Deliver):
                self._sinks[action.rid](action.ids)
            else:
                self._sinks.pop(action.rid)(action.result)

    def _release_detaches(self, peer: str = "") -> None:
        """Put the waiting detaches for `peer` into the outbox (empty: all of them)."""
        waiting, self._detaches = self._detaches, []
        for send in waiting:
            if peer in ("", send.peer):
                self._outbox.append(send)
            else:
                self._detaches.append(send)

    def _request_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._flush_soon()

    def _send(self, action: Send) -> None:
        try:
            self._send_frames(self._connect(action.peer), [codec.encode(action.message), *action.frames])
        except zmq.Again:
            kind = type(action.message).__name__
            rid = getattr(action.message, "rid", None)
            log.debug("message.unsent", peer=action.peer, message=kind, rid=rid)
            self._core.untaken(action, self._clock())  # it repeats what matters
        except (ConfigError, StartError) as error:
            # A controller may name any endpoint as a rank's. To the core such a peer is silent.
            log.warning("rank.unreachable", peer=action.peer, error=str(error))

    def _connect(self, endpoint: str) -> Socket:
        """Return the socket to `endpoint`. Raises StartError for an address that cannot be connected to."""
        peer = self._peers.get(endpoint)
        if peer is None:
            role: KeyRole = "controllers" if endpoint in self._controllers else "nodes"
            peer = _Peer(self._sockets.dealer(endpoint, maximum=PAYLOAD_MAX, role=role), self._clock())
            self._peers[endpoint] = peer
            self._watch(peer.socket, partial(self._received, endpoint))
        peer.used_at = self._clock()
        return peer.socket

    def _received(self, endpoint: str, received: list[bytes]) -> None:
        table = CONTROLLER_TO_CLIENT if endpoint in self._controllers else FROM_STREAMS
        try:
            if len(received) != 1:
                raise RemoteProtocolError("frames", f"{len(received)} frames, not 1")
            message = codec.decode(received[0], table)
        except RemoteProtocolError as error:
            self._rejections.note(endpoint, error)
            return
        if isinstance(message, ANSWERS):
            self._questions.answered(endpoint, message, self._clock())
        elif isinstance(message, Failed) and not message.rid:
            log.warning("client.refused", peer=endpoint, code=message.code, message=message.message)
        else:
            self._do(self._core.received(endpoint, message, self._clock()))


def check_question(make: Callable[[int], Message], timeout_s: float | None) -> None:
    """Raise ConfigError when `make` rejects its arguments, when its message cannot be encoded, or when `timeout_s` is
    not a number of seconds."""
    try:
        codec.encode(make(0))
        wait_s = 0.0 if timeout_s is None else float(timeout_s)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(str(error)) from None
    if not math.isfinite(wait_s):
        raise ConfigError(f"timeout_s {wait_s}: a number of seconds")


def broken(rid: str) -> Result:
    """Return the result of a request that a bug in the client has ended."""
    return failure(rid, "shutting_down", "the client broke; its log says why")


def bug() -> PartFailed:
    """Return the error for questions that a bug in the client has ended."""
    return PartFailed("the client broke; its log says why")
