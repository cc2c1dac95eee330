"""The broker's shell: the sockets, the proxy thread and the clock around `BrokerCore`, which decides what to answer.

`Broker` runs on a thread of its own (`with Broker("ipc:///dir/bus") as broker:`) or, for `python -m bus`, on the
caller's (`open`, `loop.run`, `close`). `zmq.proxy` forwards publications on one more thread, outside Python, from a SUB
of all our topics to a PUB. So subscriptions go no further than the broker and cost publishers nothing. The broker's own
PUB and SUB reach the proxy over inproc, so the broker sees what every other subscriber sees. While no room is watched,
publications have no visible effect until the next question, so reading them is deferred (`Loop.rest`): they are read
before the next question is answered, or with the next tick.

With keys the loop forwards publications itself, because only the receiving socket knows which key a connection has
proved. A rank's publications need the key of its instance, a controller's need its own. (A Python thread for this would
wait for the loop's thread with every message.)
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq

from bus import defaults
from bus.actions import Note, Send
from bus.arguments import typed
from bus.broker.core import Action, BrokerCore, BrokerLimits
from bus.broker.events import Asked, Event, Published, Tick, Unreachable
from bus.endpoints import BusAddress, advertised
from bus.errors import REASONS, ConfigError, LocalProtocolError, RemoteProtocolError
from bus.rights import key_of, may_see_all, publishes
from bus.runtime import metrics, probes
from bus.runtime.epochs import new_epoch
from bus.runtime.frames import name_of, send
from bus.runtime.intake import Rejections
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.service import Service
from bus.runtime.sockets import Socket, Sockets
from bus.runtime.ticker import Ticker
from bus.runtime.token_buckets import TokenBuckets
from bus.wire import codec, topics
from bus.wire.codes import refusal_of
from bus.wire.messages import PUBLICATIONS, TO_BROKER, BrokerStatusQuery, Message, Query, Refused, Topology

TICK_S = 0.025
IDLE_TICK_S = 0.25  # deferred publications wait no longer than this
BEHIND_TICK_S = 0.002  # a long sweep is done in short turns, with time for questions between them
_PUB_INSIDE = "inproc://publish"
_SUB_INSIDE = "inproc://subscribe"
_GAUGES = ("rooms_alive", "rooms_held", "watches", "ranks")

log = get_logger("broker")


@dataclass(frozen=True)
class BrokerConfig:
    """The broker's settings; ConfigError if one is invalid. `address` is a base (`bus.endpoints`); `keys` is a
    directory of CURVE keys, empty for none; times are in seconds."""

    address: str
    room_ttl_s: float = defaults.ROOM_TTL_S  # the lifetime of a room that is not refreshed: 0.01 s to a day
    beacon_s: float = defaults.BEACON_S  # between beacons, which show that the broker lives: 0.01 to 60 s
    max_rooms: int = defaults.MAX_ROOMS  # held at once; one more is refused
    max_rooms_per_publisher: int = 200_000  # of them, those of one rank
    max_watches: int = 262_144  # rooms asked for and not known yet, in all
    max_watches_per_peer: int = 65_536  # of one asking connection
    metrics_port: int = 0  # the port that serves Prometheus metrics; 0: none
    metrics_host: str = defaults.METRICS_HOST  # the address of that port
    spin_us: int = 0  # how long to poll after a message before sleeping, while messages come as densely
    keys: str = ""

    def __post_init__(self) -> None:
        typed(self)
        BusAddress(self.address)
        if not 0.01 <= self.room_ttl_s <= 86_400:
            raise ConfigError(f"room_ttl_s {self.room_ttl_s:g}: a room lives between 0.01 s and a day (86400 s)")
        if not 0.01 <= self.beacon_s <= 60:
            raise ConfigError(f"beacon_s {self.beacon_s:g}: choose between 0.01 s and 60 s")
        if not 0 <= self.spin_us <= defaults.SPIN_US_MAX:
            raise ConfigError(f"spin_us {self.spin_us}: choose between 0 and {defaults.SPIN_US_MAX}")
        for name in ("max_rooms", "max_rooms_per_publisher", "max_watches", "max_watches_per_peer"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")


class Broker(Service):
    """A broker that a program embeds: `with Broker(address) as broker:` serves on a thread of its own until the block
    ends. StartError on entry if an endpoint is taken. `rejected` counts dropped messages by reason."""

    part = "broker"

    def __init__(self, config: BrokerConfig | str) -> None:
        self.config = config if isinstance(config, BrokerConfig) else BrokerConfig(config)
        self.spin_us = self.config.spin_us
        self.address = BusAddress(self.config.address)
        self.epoch = new_epoch()
        self.rejected: Counter[str] = Counter()
        self._batches = metrics.Histogram(metrics.SIZES)
        self._rejections = Rejections(log, self.rejected)
        self._buckets = TokenBuckets()
        self._proxy: threading.Thread | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self.epoch = new_epoch()

    def _open(self, exits: ExitStack) -> None:
        config = self.config
        keys = load_keys(config.keys, "brokers") if config.keys else None
        self._sockets = exits.enter_context(Sockets(keys=keys))
        into = self._sockets.bus_in(topics.ALL, self.address.publish, *(() if keys else (_PUB_INSIDE,)))
        out = self._sockets.bus_out(self.address.subscribe, *(() if keys else (_SUB_INSIDE,)))
        self._router = self._sockets.router(self.address.bootstrap, domain="bootstrap")
        limits = BrokerLimits(
            room_ttl_s=config.room_ttl_s,
            beacon_s=config.beacon_s,
            max_rooms=config.max_rooms,
            max_rooms_per_publisher=config.max_rooms_per_publisher,
            max_watches=config.max_watches,
            max_watches_per_peer=config.max_watches_per_peer,
            metrics=advertised(config.metrics_host, config.metrics_port, self.address.base),
        )
        self.core = BrokerCore(limits, self.epoch, self.loop.clock(), self._dropped)
        self._ticker = Ticker(self.loop, self._tick, min(config.beacon_s, IDLE_TICK_S))
        if keys is not None:
            self._pub = out
            self.loop.add(into, self._on_incoming, budget=512, keyed=True)
        else:
            self._pub = self._sockets.pub(_PUB_INSIDE)
            self._sub = self._sockets.sub(_SUB_INSIDE, (topics.ROOMS, topics.MEMBER))
            self._proxy = threading.Thread(target=_forward, args=(into, out), name="broker-proxy", daemon=True)
            self._proxy.start()
            self._sockets.release(into)
            self._sockets.release(out)
            self.loop.add(self._sub, self._on_publication, budget=512)
            self.loop.after_turn(self._rest)
        self.loop.add(self._router, self._on_request, keyed=keys is not None)
        self._ticker.wake()
        if config.metrics_port:
            exits.callback(
                probes.serve(self.loop, config.metrics_host, config.metrics_port, self._gather, self._unready)
            )
        log.info("broker.started", address=self.address.base, epoch=self.epoch)

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_incoming(self, frames: list[bytes]) -> None:
        """Forward and read a publication that came straight from its publisher, if the publisher's key allows its
        topic."""
        topic = frames[0]
        if not topic.startswith(publishes(key_of(topic))):
            self._reject(topic, RemoteProtocolError("not_yours", f"topic {bytes(topic[:100])!r}"))
            return
        with suppress(zmq.Again):  # a PUB drops what a subscriber does not take
            send(self._pub, frames)
        if topic.startswith((topics.ROOMS, topics.MEMBER)):
            self._on_publication(frames)

    def _on_publication(self, frames: list[bytes]) -> None:
        topic = frames[0]
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = codec.decode(frames[1], PUBLICATIONS)
        except RemoteProtocolError as error:
            self._reject(topic, error)
            return
        self._handle(Published(topic, message))

    def _on_request(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            if len(frames) != 3 or frames[1]:
                raise RemoteProtocolError("frames", "want an empty frame, then one message")
            message = codec.decode(frames[2], TO_BROKER)
        except RemoteProtocolError as error:
            self._reject(peer, error)
            self._send(peer, Refused(refusal_of(error.reason), str(error)[:1024]))
            return
        if isinstance(message, BrokerStatusQuery) and not may_see_all(peer):
            self._send(
                peer, Refused("bad_identity", "the broker's status takes a viewer's or an admin's key", message.id)
            )
            return
        if isinstance(message, Query):
            self._batches.observe(len(message.rooms))
        self._handle(Asked(peer, message))

    def _reject(self, peer: bytes, error: RemoteProtocolError) -> None:
        self._rejections.note(name_of(peer), error)

    # --- out --------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for action in self.core.handle(event, self.loop.clock()):
            self._do(action)
        if self._ticker.dozing and self.core.needs_ticks:
            self._ticker.wake()

    def _rest(self) -> None:
        self.loop.rest(self._sub, not self.core.watches.size)

    def _tick(self) -> float | None:
        """Handle a tick and return the seconds to the next one: short while something may end, else long, so that an
        idle broker hardly wakes."""
        self._handle(Tick())
        if not self.core.needs_ticks:
            return None
        return BEHIND_TICK_S if self.core.behind else TICK_S

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.peer, action.message)
        elif isinstance(action, Note):
            getattr(log, action.level)(action.event, **action.fields)
        else:
            send(self._pub, (topics.of(action.message), codec.encode(action.message)))

    def _send(self, peer: bytes, message: Message) -> None:
        try:
            frame = codec.encode(message)
        except LocalProtocolError:
            refusal = Refused("too_many", "the answer does not fit in a message; ask for less", _id_of(message))
            frame = codec.encode(refusal)
        to = key_of(peer) or peer
        if isinstance(message, Topology) and not self._buckets.allows(to, len(frame), self.loop.clock()):
            self.core.counts["answers_dropped"] += 1
            return
        try:
            send(self._router, (peer, b"", frame))
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                self._handle(Unreachable(peer))
            elif error.errno == errno.EAGAIN:  # it does not read: it asks again, or its deadline passes
                self.core.counts["answers_dropped"] += 1
            else:
                raise

    def _dropped(self) -> dict[str, int]:
        counts = {f"rejected_{reason}": count for reason, count in self.rejected.items()}
        return counts | {"peers_refused": sum(self._sockets.refused.values())}

    # --- metrics ----------------------------------------------------------------------------------------------------

    def _unready(self) -> str:
        return "" if self._proxy is None or self._proxy.is_alive() else "publications are not forwarded"

    def reconfigure(self, changed: Mapping[str, Any]) -> None:
        """Apply settings by name; ConfigError for an invalid one, and then nothing is changed. Only `beacon_s` and
        `max_rooms` take effect while it serves, others when it is opened again. Call it on the loop's thread, as
        `python -m bus` does on SIGHUP, or before the broker is opened."""
        self.raise_if_inherited()
        if not isinstance(changed, Mapping):
            raise ConfigError(f"settings come by name, not as {type(changed).__name__}")
        try:
            config = replace(self.config, **{name: value for name, value in changed.items() if name != "log_level"})
        except TypeError as error:  # there is no such setting
            raise ConfigError(str(error)) from None
        self.config = config
        if self.opened:
            self.core.reconfigure(config.beacon_s, config.max_rooms)

    def _gather(self) -> tuple[metrics.Metric, ...]:
        tally = self.core.tally()
        return (
            *(metrics.gauge(f"pdbus_broker_{name}", f"{name} now", tally.pop(name)) for name in _GAUGES),
            *(metrics.counter(f"pdbus_broker_{name}_total", f"{name} so far", n) for name, n in tally.items()),
            metrics.labelled(
                "counter",
                "pdbus_broker_rejected_total",
                "messages dropped, by reason",
                "reason",
                dict.fromkeys(REASONS, 0) | self.rejected,
            ),
            metrics.labelled(
                "counter",
                "pdbus_broker_peers_refused_total",
                "peers not on the allowlist",
                "domain",
                self._sockets.refused,
            ),
            metrics.histogram("pdbus_broker_query_batch_rooms", "rooms in a query", self._batches.frozen()),
        )


def _forward(into: Socket, out: Socket) -> None:
    """Forward messages until the Context ends. Both sockets belong to this thread from its start."""
    try:
        zmq.proxy(into, out)
    except zmq.ContextTerminated:
        pass
    finally:
        into.close(linger=0)
        out.close(linger=0)


def _id_of(message: Message) -> int:
    number = getattr(message, "id", 0)
    return number if isinstance(number, int) else 0
