"""The controller's shell: sockets, clock and thread. It decides nothing.

`Controller` runs on a thread of its own (`with Controller(config) as controller:`) or, for `python -m controller`,
on the caller's (`open`, `loop.run`, `close`). `controller.traffic` handles what its sockets carry. Publications rest
(`Loop.rest`) unless a request waits for their content: all that have come are read before anything else in a turn is
decided.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from bus.broker import Broker, BrokerConfig
from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import RemoteProtocolError
from bus.runtime import probes
from bus.runtime.epochs import new_epoch, wall_s
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.metrics import Metric, labelled
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.service import Service
from bus.runtime.sockets import PAYLOAD_MAX, Sockets
from bus.runtime.spans import Spans
from bus.runtime.ticker import Ticker
from bus.wire import codec, topics
from bus.wire.kv_names import Changes
from bus.wire.messages import CLIENT_TO_CONTROLLER, Load, MemberKey, Message
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import CacheChanged, EngineLoad, Event, FromClient, NextPart, Tick
from controller.feeds.engine import EngineFeed
from controller.feeds.nodes import NodeCaches
from controller.observe import probe
from controller.requests.record import RequestRecord, span_of
from controller.traffic import LOCAL, Traffic

TICK_S = 0.05
IDLE_TICK_S = 0.25
FAREWELL_MS = 250  # for last answers to leave
UNREAD_LARGE = 32  # messages with prompts that are read ahead of each client
SUBSCRIPTIONS = (topics.LOAD, topics.ROOMS, topics.MEMBER, topics.SENT, topics.BEACON)

log = get_logger("controller")


class Controller(Service):
    """An embedded controller, on a thread of its own: `with Controller(config) as controller:`. Raises StartError on
    entry if an endpoint is taken, ConfigError for invalid keys. `core` is its pure part, for its thread alone.

    `on_local` gets (on the loop's thread) the core's answers to requests submitted with `submit_local`. `bus_seen` is
    set with the first beacon of a broker. `trace` (before `open`) logs each request at debug level. With `spans`,
    traced requests have a span, which it exports. If the thread fails, every live request ends as at a stop, and then
    `on_failure` is called (on that thread).
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
        if not isinstance(config, ControllerConfig):
            raise TypeError(f"a ControllerConfig expected, not {type(config).__name__}")
        self.config = config
        self.spin_us = config.spin_us
        self._spans = spans
        self.epoch = new_epoch()
        self.bus_seen = threading.Event()
        self.trace = False
        self._on_local = on_local
        self._on_failure = on_failure
        self._flooded = False
        self._goes_on = False  # a NextPart is due
        self._broker: Broker | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self.epoch = new_epoch()
        self.bus_seen.clear()
        self._flooded = self._goes_on = False

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
        self.wall_s = wall_s(self.loop.clock)
        self.core = ControllerCore(
            config, self.epoch, self.loop.clock(), wall_s=self.wall_s, trace=self.trace,
            spans=self._spans is not None, dropped=self._dropped,
        )  # fmt: skip
        self._indexes = tuple(self.core.prefixes.values())
        self._traffic = traffic = Traffic(
            self.core, self.loop.clock, self._clients, self._nodes, self._sockets.pub(bus.publish), self._on_local,
            self.bus_seen.set, self._export,
        )  # fmt: skip
        exits.callback(self._farewell)
        self._follow(exits)
        self.loop.add(self._clients, traffic.from_client, copied=2, keyed=keys is not None)
        self.loop.add(self._nodes, traffic.from_node, keyed=keys is not None)
        self.loop.add(self._sub, traffic.published, budget=512)
        if self._sockets.keyed:
            self.loop.call_every(LOOK_S, self._sockets.look)
            self._sockets.on_key_revoked(self._key_revoked)
        self.loop.after_turn(traffic.carry_out)
        self.loop.after_turn(self._pace)
        # health wants to look several times a lease
        self._ticker = Ticker(self.loop, self._tick, max(TICK_S, min(IDLE_TICK_S, config.lease_s / 12)))
        self._ticker.wake(TICK_S)
        if config.metrics_port:
            exits.callback(
                probes.serve(
                    self.loop,
                    config.metrics_host,
                    config.metrics_port,
                    self._gather,
                    self._unready,
                    lambda: self.core.targets(self.loop.clock()),
                    {"controller": config.name},
                )
            )
        log.info("controller.started", name=config.name, address=config.controller, epoch=self.epoch, **config.methods)

    def _failed(self) -> None:
        if self._on_failure is not None:
            self._on_failure()

    def _follow(self, exits: ExitStack) -> None:
        """Follow the caches of our nodes, and foreign engines (whose ports are plaintext)."""
        self._caches = NodeCaches(self.core.members.known, self.core.counts)
        if self.core.uses_hashes:
            events = self._sockets.sub(BusAddress(self.config.bus).subscribe, (topics.KV,))
            self.loop.add(events, self._on_kv_event, budget=512)
            self.loop.rest(events, True)
        if self.config.engines:
            foreign = exits.enter_context(Sockets())
            for engine in self.config.engines:
                feed = EngineFeed(self.loop, foreign, engine, self._on_changes, self._on_engine_load, self.core.counts)
                exits.callback(feed.close)

    def _key_revoked(self, name: str, domain: str) -> None:
        add = partial(
            self.core.events.add, self.loop.clock(), "key_revoked", phrase=f"{name}, connected to {domain}", bad=True
        )
        self.loop.call_threadsafe(add)

    def _farewell(self) -> None:
        self._traffic.farewell()
        for socket in (self._clients, self._nodes):
            self._sockets.close_socket(socket, linger_ms=FAREWELL_MS)

    # --- in -----------------------------------------------------------------------------------------------------------

    def submit_local(self, message: Message, frames: Sequence[Any] = ()) -> None:
        """Hand over a message of this process itself, from any thread, without waiting; it is handled soon on the
        loop's. Its frames are bytes, or have a buffer of bytes or 32-bit integers. Raises ProtocolError, TypeError or
        ValueError where a client may not send it; PartFailed where the loop has failed, or does not serve."""
        self.raise_if_closed()
        codec.decode(codec.encode(message), CLIENT_TO_CONTROLLER)
        self._submit(message, [bytes_of(frame) for frame in frames])

    def _submit(self, message: Message, frames: Sequence[Any] = ()) -> None:
        """`submit_local` of what was looked at before."""
        self.raise_if_closed()
        self.loop.call_threadsafe(lambda: self._handle(FromClient(LOCAL, message, frames)))

    def _handle(self, event: Event) -> None:
        """Let the core decide; what it says is done at the end of the turn (on the loop's thread only)."""
        self._traffic.handle(event)

    def _tick(self) -> float | None:
        if self._broker is not None:
            self._broker.raise_if_failed()
        self._handle(Tick())
        dozes = not self.core.needs_ticks and not self._flooded
        self._flooded = False
        return None if dozes else TICK_S

    def _pace(self) -> None:
        """Set, at the end of a turn, what may wake the loop, and when it wakes by itself; what can wait until the
        turn's messages are sent is done here too."""
        for index in self._indexes:
            index.catch_up()
        self.loop.rest(self._sub, not self.core.waiting)
        self._flooded |= self.loop.behind  # thousands of busy ranks: their loads would not fit in the queue till then
        if self._ticker.dozing and self.core.needs_ticks:
            self._ticker.wake(TICK_S)
        if self.core.unfinished and not self._goes_on:
            self._goes_on = True
            self.loop.call_later(0.0, self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._handle(NextPart())

    def _on_kv_event(self, frames: list[bytes]) -> None:
        try:
            key, changes = self._caches.received(frames)
        except RemoteProtocolError as error:
            self._traffic.reject(frames[0], error)
            return
        if changes:
            self._on_changes(key, changes)

    def _on_changes(self, key: MemberKey, changes: Changes) -> None:
        self._handle(CacheChanged(key, changes))

    def _on_engine_load(self, key: MemberKey, load: Load) -> None:
        self._handle(EngineLoad(key, load))

    def _export(self, record: RequestRecord) -> None:
        if self._spans is not None:
            self._spans.add(record, lambda over: span_of(over, self.wall_s))

    def _dropped(self) -> dict[str, int]:
        return {"peers_refused": sum(self._sockets.refused.values())}

    def _gather(self) -> Sequence[Metric]:
        now = self.loop.clock()
        probe(self.core.members.ranks.values(), now)
        refused = labelled(
            "counter",
            "pdbus_controller_peers_refused_total",
            "peers not on the allowlist",
            "domain",
            self._sockets.refused,
        )
        return *self.core.metrics(now), refused

    def _unready(self) -> str:
        return self.core.unready if self.bus_seen.is_set() else f"no broker heard at {self.config.bus}"


def bytes_of(frame: object) -> bytes:
    """Return the bytes of an object that has a buffer of bytes or of 32-bit integers (a copy unless it is bytes).
    Raises TypeError for any other."""
    if isinstance(frame, bytes):
        return frame
    view = memoryview(frame)  # type: ignore[arg-type]
    if view.itemsize != 1 and view.format not in ("i", "I"):
        raise TypeError(f"a frame is bytes, or integers of 32 bits, and not of the format {view.format!r}")
    return view.tobytes()
