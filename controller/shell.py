"""The controller's shell: sockets, clock, thread. Carries out what the core asks for and decides nothing.

`Controller` runs on a thread of its own (`with Controller(config) as controller:`) or, for `python -m controller`, on
the caller's (`open`, `loop.run`, `close`). Payload frames go through as they came: `zmq.Frame`s, neither decoded nor
copied. Publications rest (`Loop.rest`) unless a request waits for what they say: all that came are read before anything
else a turn brings is decided.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from bus.actions import Publish
from bus.broker import Broker, BrokerConfig
from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import LocalProtocolError, RemoteProtocolError
from bus.rights import key_of, speaks_for
from bus.runtime import probes
from bus.runtime.epochs import new_epoch, wall_s
from bus.runtime.frames import name_of, send
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.metrics import Metric
from bus.runtime.ration import LARGE, Ration
from bus.runtime.service import Service
from bus.runtime.sockets import PAYLOAD_MAX, Socket, Sockets
from bus.runtime.spans import Spans
from bus.tracecontext import Span
from bus.wire import codec, topics
from bus.wire.kv_names import Changes
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    NODE_TO_CONTROLLER,
    Accepted,
    Beacon,
    Code,
    Load,
    MemberKey,
    Message,
    Refused,
    Submit,
)
from bus.wire.status import targets
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import (
    CacheChanged,
    ClientGone,
    EngineLoad,
    Event,
    FromClient,
    FromNode,
    Over,
    Published,
    Tick,
    ToClient,
    ToNode,
    Undelivered,
    Unreachable,
)
from controller.feeds.engine import EngineFeed
from controller.feeds.nodes import NodeCaches
from controller.observe import collect, probe
from controller.requests.story import Story, span_of

TICK_S = 0.05
IDLE_TICK_S = 0.25
FAREWELL_MS = 250  # for last answers to leave
PEERS_REMEMBERED = 4096
UNREAD_LARGE = 32  # messages with prompts that are read ahead of each client
LOCAL = "local"  # the peer that is this process; routing ids are bytes
SUBSCRIPTIONS = (topics.LOAD, topics.ROOMS, topics.MEMBER, topics.SENT, topics.BEACON)

log = get_logger("controller")


class Controller(Service):
    """Embedded: `with Controller(config) as controller:`; StartError on entry if an endpoint is taken.

    `on_local` gets (on the loop's thread) what the core answers to requests submitted with `submit_local`.
    `bus_seen` is set with the first beacon of a broker. `trace` (before `open`) logs each request at debug level.
    With `spans` the requests that are traced have a span, which it exports.
    Should the thread fail, every live request ends as at a stop, and then `on_failure` is called (on that thread).
    """

    part = "controller"

    def __init__(
        self,
        config: ControllerConfig,
        *,
        on_local: Callable[[Message], None] | None = None,
        on_failure: Callable[[], None] | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.config = config
        self._spans = spans
        self.epoch = new_epoch()
        self.bus_seen = threading.Event()
        self.trace = False
        self._on_local = on_local
        self._on_failure = on_failure
        self._rejecters: set[str] = set()
        self._ration = Ration()
        self._outbox: list[Any] = []
        self._dozing = False
        self._broker: Broker | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        config = self.config
        keys = load_keys(config.keys, "controllers", name=config.name) if config.keys else None
        bus, address = BusAddress(config.bus), ControllerAddress(config.controller)
        if config.with_broker:
            self._broker = exits.enter_context(Broker(BrokerConfig(config.bus, keys=config.keys)))
        self._sockets = exits.enter_context(Sockets(keys=keys))
        self._clients = self._sockets.router(
            address.clients, maximum=PAYLOAD_MAX, unread=UNREAD_LARGE, domain="clients", answers_one_frame=True
        )
        self._nodes = self._sockets.router(address.nodes, domain="nodes")
        self._sub = self._sockets.sub(bus.subscribe, SUBSCRIPTIONS)
        self._pub = self._sockets.pub(bus.publish)
        self.wall_s = wall_s(self.loop.clock)
        self.core = ControllerCore(config, self.epoch, self.loop.clock(), wall_s=self.wall_s)
        self.core.life.trace = self.trace
        self.core.life.spans = self._spans is not None
        exits.callback(self._farewell)
        self._follow(exits)
        self.loop.add(self._clients, self._on_client, copied=2, keyed=keys is not None)
        self.loop.add(self._nodes, self._on_node, keyed=keys is not None)
        self.loop.add(self._sub, self._on_publication, budget=512)
        self.loop.after_turn(self._carry_out)
        self.loop.after_turn(self._pace)
        self._timer = self.loop.call_later(TICK_S, self._tick)
        if config.metrics_port:
            exits.callback(
                probes.serve(
                    self.loop, config.metrics_host, config.metrics_port, self._gather, self._unready, self._targets
                )
            )
        log.info("controller.started", name=config.name, address=config.controller, epoch=self.epoch, **config.methods)

    def _failed(self) -> None:
        if self._on_failure is not None:
            self._on_failure()

    def _follow(self, exits: ExitStack) -> None:
        """The caches of our nodes, and the engines of other people (whose ports are plaintext)."""
        self._caches = NodeCaches(self.core.table.ranks, self.core.counts)
        if self.core.uses_hashes:
            events = self._sockets.sub(BusAddress(self.config.bus).subscribe, (topics.KV,))
            self.loop.add(events, self._on_kv_event, budget=512)
            self.loop.rest(events, True)
        if self.config.engines:
            foreign = exits.enter_context(Sockets())
            for engine in self.config.engines:
                feed = EngineFeed(self.loop, foreign, engine, self._on_changes, self._on_engine_load, self.core.counts)
                exits.callback(feed.close)

    def _farewell(self) -> None:
        """Every live request ends here, for its client to send it elsewhere."""
        self._outbox = self.core.shutdown(self.loop.clock())
        self._carry_out()
        for socket in (self._clients, self._nodes):
            self._sockets.close_socket(socket, linger_ms=FAREWELL_MS)

    # --- in -----------------------------------------------------------------------------------------------------------

    def submit_local(self, message: Message, frames: Sequence[Any] = ()) -> None:
        """A message of this process itself, from any thread: handled soon on the loop's. PartFailed where that has
        failed."""
        self.raise_if_failed()
        self.loop.call_threadsafe(lambda: self.handle(FromClient(LOCAL, message, frames)))

    def handle(self, event: Event) -> None:
        """Let the core decide; what it says is done at the end of the turn (on the loop's thread only)."""
        self._outbox += self.core.handle(event, self.loop.clock())

    def _tick(self) -> None:
        if self._broker is not None:
            self._broker.raise_if_failed()
        self.handle(Tick())
        self._dozing = not self.core.needs_ticks
        idle_s = min(IDLE_TICK_S, self.config.lease_s / 12)  # health wants to look several times a lease
        self._timer = self.loop.call_later(max(TICK_S, idle_s) if self._dozing else TICK_S, self._tick)

    def _pace(self) -> None:
        """At the end of a turn: what may wake the loop, and when it wakes by itself."""
        self.loop.rest(self._sub, not self.core.waiting)
        if self._dozing and self.core.needs_ticks:
            self._dozing = False
            self._timer.cancel()
            self._timer = self.loop.call_later(TICK_S, self._tick)

    def _on_client(self, frames: list[Any]) -> None:
        peer = frames[0]
        try:
            if len(frames) < 2:
                raise RemoteProtocolError("frames", "no header")
            message = codec.decode(frames[1], CLIENT_TO_CONTROLLER)
            if len(frames) > 2 and type(message) is not Submit:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
        except RemoteProtocolError as error:
            self._reject(peer, error)
            code: Code = "bad_version" if error.reason == "version" else "bad_message"
            self._send(self._clients, peer, Refused(code, str(error)[:1024]))
            return
        self.handle(FromClient(peer, message, frames[2:]))

    def _on_node(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = codec.decode(frames[1], NODE_TO_CONTROLLER)
            instance = getattr(message, "instance", None)  # a pong has none
            if instance is not None and not speaks_for(peer, instance):
                raise RemoteProtocolError("not_yours", f"{type(message).__name__} of {instance}")
        except RemoteProtocolError as error:
            self._reject(peer, error)
            codes: dict[str, Code] = {"version": "bad_version", "not_yours": "bad_identity"}
            self._send(self._nodes, peer, Refused(codes.get(error.reason, "bad_message"), str(error)[:1024]))
            return
        self.handle(FromNode(peer, message))

    def _on_publication(self, frames: list[bytes]) -> None:
        try:
            message = topics.read(frames)
        except RemoteProtocolError as error:
            self._reject(frames[0], error)
            return
        if type(message) is Beacon and not self.bus_seen.is_set():
            self.bus_seen.set()
        self.handle(Published(message))

    def _on_kv_event(self, frames: list[bytes]) -> None:
        try:
            key, changes = self._caches.received(frames)
        except RemoteProtocolError as error:
            self._reject(frames[0], error)
            return
        if changes:
            self._on_changes(key, changes)

    def _on_changes(self, key: MemberKey, changes: Changes) -> None:
        self.handle(CacheChanged(key, changes))

    def _on_engine_load(self, key: MemberKey, load: Load) -> None:
        self.handle(EngineLoad(key, load))

    def _reject(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.core.counts[f"rejected_{error.reason}"] += 1
        who = name_of(peer)
        if who not in self._rejecters and len(self._rejecters) < PEERS_REMEMBERED:
            self._rejecters.add(who)
            log.warning("message.rejected", peer=who, reason=error.reason, detail=error.detail[:200])

    # --- out ----------------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """At the end of a turn, so that what the turn sends to one peer shares system calls."""
        outbox = self._outbox
        for action in outbox:  # what a failed send leads to joins the end of the list
            kind = type(action)
            if kind is ToNode:
                if failure := self._send(self._nodes, action.peer, action.message, action.frames):
                    gone = failure == errno.EHOSTUNREACH
                    self.handle(Unreachable(action.peer) if gone else Undelivered(action.peer, action.message))
            elif kind is ToClient:
                if action.peer is LOCAL:
                    if self._on_local is not None:
                        self._on_local(action.message)
                elif failure := self._send(self._clients, action.peer, action.message):
                    self.core.counts["clients_unreachable"] += 1  # it may come back and ask again
                    if failure == errno.EHOSTUNREACH and type(action.message) is Accepted:
                        self.handle(ClientGone(action.peer, action.message.rid))
            elif kind is Publish:
                self._publish(action.message)
            elif kind is Over:
                if self._spans is not None:
                    self._spans.add(action.story, self._span_of)
            else:
                getattr(log, action.level)(action.event, **action.fields)
        outbox.clear()

    def _send(self, router: Socket, peer: bytes, message: Message, frames: Sequence[Any] = ()) -> int:
        """0, or the errno that says why the message did not leave."""
        try:
            header = codec.encode(message)
        except LocalProtocolError as error:
            log.error("message.too_large", detail=str(error))
            header = codec.encode(
                Refused("too_many", "the answer does not fit in a message", getattr(message, "id", 0))
            )
        if len(header) > LARGE and not self._ration.allows(key_of(peer) or peer, len(header), self.loop.clock()):
            return errno.EAGAIN
        try:
            send(router, (peer, header, *frames))
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return error.errno
        return 0

    def _publish(self, message: Message) -> None:
        try:
            self._pub.send_multipart((topics.of(message), codec.encode(message)))
        except LocalProtocolError as error:
            log.error("message.too_large", detail=str(error))

    def _span_of(self, story: Story) -> Span:
        return span_of(story, self.wall_s)

    def _gather(self) -> Sequence[Metric]:
        core, now = self.core, self.loop.clock()
        ranks = core.table.ranks.values()
        probe(ranks, now)
        return collect(core.tally(), ranks, core.health.pulses, self.config.methods, core.regret, now)

    def _targets(self) -> list[dict[str, Any]]:
        return targets(self.core.status(0, self.loop.clock()))

    def _unready(self) -> str:
        return self.core.unready if self.bus_seen.is_set() else f"no broker heard at {self.config.bus}"
