"""The node process: sockets, clock, signals and the ranks it hosts. Decides nothing.

One PUB, one SUB, one bootstrap DEALER and one data ROUTER serve all ranks of the process; each rank has a DEALER of
its own to each controller, so a connection is a rank. Engines compute on threads of their own.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from bus.actions import Publish, Send
from bus.embed.resolution import Resolved, ResolverCore
from bus.endpoints import BusAddress, ControllerAddress, why_silent
from bus.errors import RemoteProtocolError, StartError
from bus.runtime import metrics, probes
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.security import load_keys
from bus.runtime.sockets import Sockets
from bus.wire import subscription, topics
from bus.wire.codec import decode, encode
from bus.wire.messages import (
    FROM_BROKER,
    TO_NODE_DATA,
    Attach,
    Beacon,
    Conflict,
    Detach,
    KvDone,
    KvFail,
    KvPull,
    Member,
    Refused,
    Resync,
    Tokens,
)
from nodes.config import NodeConfig
from nodes.link.actions import Locate
from nodes.link.data import ZmqKv, send_answer
from nodes.link.rank import Rank
from nodes.link.streams import RETRY_S, SendFailure, Streams
from nodes.metrics import snapshot
from nodes.own.engines.base import Engine
from nodes.own.kv_events import Frames

TICK_S = 0.05
SLOW_TICK_S = 0.25
SAY_WAITING_S = 2.0
GOODBYE_S = 1.0  # a drained process waits this long for its goodbye to come back from the bus
STREAM_GRACE_S = 5.0  # a drained process waits this long for readers to take the end of their streams
LINGER_MS = 500
MAX_LOGGED_PEERS = 1024

log = get_logger("node")


class Node:
    """`with Node(config, loop, engines) as node: node.run(on_ready)`; `engines` are one for each of its dp_ranks."""

    def __init__(self, config: NodeConfig, loop: Loop, engines: Sequence[Engine]) -> None:
        self.config = config
        self.loop = loop
        self.streams = Streams()
        self.resolver = ResolverCore()
        self.rejected: Counter[str] = Counter()
        self.step_s = metrics.Histogram()
        self.first_token_s = metrics.Histogram()
        self.fetch_s = metrics.Histogram()
        self.failure: StartError | None = None
        self.unsent_publications = 0
        self._logged: set[tuple[str, bytes]] = set()
        self._on_ready: Callable[[Node], None] | None = None
        self._began = self._said = loop.clock()
        self._drain_began: float | None = None
        self._left = False
        self._stop_metrics: Callable[[], None] = lambda: None
        keys = load_keys(config.keys, server=True) if config.keys else None
        self._sockets = Sockets(keys=keys, max_sockets=16384)
        try:
            self._open(engines)
        except BaseException:
            self._sockets.close()
            raise

    def _open(self, engines: Sequence[Engine]) -> None:
        config, sockets, loop = self.config, self._sockets, self.loop
        bus = BusAddress(config.bus)
        self._router, self.endpoint = sockets.ephemeral_router(config.data_bind(new_epoch()))
        self._pub = sockets.pub(bus.publish)
        kinds = (topics.TO, topics.MEMBER)  # what the broker tells us, and our own words come back
        mine = tuple(topics.for_rank(kind, config.instance, rank) for kind in kinds for rank in config.dp_ranks)
        self._sub = sockets.sub(bus.subscribe, (topics.BEACON, *mine))
        self._bootstrap = sockets.dealer(bus.bootstrap)
        self.kv = ZmqKv(sockets, loop, self._router, linger_ms=LINGER_MS)
        self.ranks = {rank: Rank(self, rank, engine) for rank, engine in zip(config.dp_ranks, engines, strict=True)}
        self._by_epoch = {rank.epoch: rank for rank in self.ranks.values()}
        for rank in self.ranks.values():
            for key, base in enumerate(config.controllers):
                rank.add_link(sockets, key, ControllerAddress(base).nodes)
        loop.add(self._router, self._data_received)
        loop.add(self._sub, self._publication_received)
        loop.add(self._bootstrap, self._answer_received)
        loop.call_every(TICK_S, self._tick)
        loop.call_every(SLOW_TICK_S, self._slow_tick)
        loop.after_turn(self._after_turn)
        if config.metrics_port:
            self._stop_metrics = probes.serve(
                loop, config.metrics_host, config.metrics_port, lambda: snapshot(self), self._unready
            )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def now(self) -> float:
        return self.loop.clock()

    # --- life ---------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[Node], None]) -> None:
        """Until drained or stopped. StartError when bus or controllers are not there within `wait_s`, or when one of
        our ranks was started again elsewhere."""
        self._on_ready = on_ready
        self.loop.run()
        if self.failure is not None:
            raise self.failure

    def on_signal(self, number: int) -> None:
        """The first drains, the second leaves at once."""
        if self._drain_began is not None or self._on_ready is not None:
            self._left = True
            self.loop.stop()
            return
        self.drain(signal.Signals(number).name)

    def drain(self, cause: str) -> None:
        """All ranks: take nothing new, finish what runs, say goodbye; the loop then stops."""
        if self._drain_began is None:
            self._drain_began = self.now
        for rank in self.ranks.values():
            rank.drain(cause)

    def leave(self) -> None:
        """At once; may be called from any thread."""
        self._left = True
        self.loop.stop()

    def superseded(self, why: str) -> None:
        """A later start of one of our ranks has taken its place: the process leaves as a whole, and what runs here ends
        at once. Before it has served it goes on asking instead: the other may be dead, and its clock have been ahead.
        """
        if self._on_ready is not None or self.failure is not None:
            return
        log.warning("node.superseded", why=why)
        self.failure = StartError(f"{why}; this one leaves")
        self._drain_began = self.now
        self.drain("superseded")
        for rank in self.ranks.values():
            rank.abandon()

    def close(self) -> None:
        linger_ms = 0 if self._left else LINGER_MS
        self._stop_metrics()
        for rank in self.ranks.values():
            rank.close(linger_ms=linger_ms)
        if linger_ms:
            self.kv.close()
            for socket in (self._pub, self._router):
                self._sockets.close_socket(socket, linger_ms=linger_ms)
        self._sockets.close()
        self.loop.close()

    # --- for the ranks ------------------------------------------------------------------------------------------

    def publish(self, publications: list[Publish]) -> None:
        for publication in publications:
            try:
                frames = [topics.of(publication.message), encode(publication.message)]
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self.unsent_publications += 1

    def publish_kv_events(self, messages: list[Frames]) -> None:
        for frames in messages:
            try:
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self.unsent_publications += 1  # a hole in the numbers tells the followers

    def answer(self, send: Send) -> None:
        """To a peer of the data ROUTER; a peer that is gone asks again if it returns."""
        send_answer(self._router, send)

    def locate(self, rank: Rank, want: Locate) -> None:
        now = self.now
        self._resolve(
            self.resolver.want(
                want.room,
                now,
                deadline_s=max(0.001, want.deadline - now),
                prefill_instance=want.prefill_instance,
                dp_rank=want.dp_rank,
                asker=rank.dp_rank,
            )
        )

    def unlocate(self, rank: Rank, room: int) -> None:
        self.resolver.cancel(room, rank.dp_rank)

    # --- what comes in ------------------------------------------------------------------------------------------

    def reject(self, socket: str, error: RemoteProtocolError, peer: bytes = b"") -> None:
        """Count a bad message; log the first of each peer."""
        self.rejected[f"{socket}:{error.reason}"] += 1
        if (socket, peer) in self._logged or len(self._logged) >= MAX_LOGGED_PEERS:
            return
        self._logged.add((socket, peer))
        log.warning("message.rejected", socket=socket, reason=error.reason, detail=error.detail[:200])

    def _data_received(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = decode(frames[1], TO_NODE_DATA)
        except RemoteProtocolError as error:
            self.reject("data", error, peer)
            return
        if isinstance(message, Attach):
            self.streams.attach(peer, message, self.now)
        elif isinstance(message, Detach):
            self.streams.detach(peer, message)
        elif isinstance(message, KvPull):
            holder = self._by_epoch.get(message.epoch)
            if holder is not None:
                holder.pulled(peer, message)
            else:
                why = "the prefill rank has restarted"
                self.answer(Send(peer, KvFail(message.room, message.attempt, "prefill_failed", why)))
        elif isinstance(message, KvDone):
            for rank in self.ranks.values():
                rank.pulled(peer, message)

    def _publication_received(self, frames: list[bytes]) -> None:
        try:
            message = subscription.read(frames)
            if not isinstance(message, Beacon | Resync | Conflict | Member):
                raise RemoteProtocolError("topic", "nothing for a publisher")
        except RemoteProtocolError as error:
            self.reject("bus", error)
            return
        if isinstance(message, Beacon):
            self._resolve(self.resolver.on_message(message, self.now))
            for rank in self.ranks.values():
                rank.from_bus(message)
        elif (addressed := self.ranks.get(message.dp_rank)) is None:
            return
        elif isinstance(message, Member):
            addressed.came_back(message)
        else:
            addressed.from_bus(message)

    def _answer_received(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2 or frames[0]:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = decode(frames[1], FROM_BROKER)
        except RemoteProtocolError as error:
            self.reject("bootstrap", error)
            return
        if isinstance(message, Refused):
            log.warning("query.refused", code=message.code, why=message.message)
        self._resolve(self.resolver.on_message(message, self.now))

    def _resolve(self, actions: Sequence[Send | Resolved]) -> None:
        for action in actions:
            if isinstance(action, Send):
                try:
                    self._bootstrap.send_multipart([b"", encode(action.message)], zmq.NOBLOCK)
                except zmq.Again:
                    self.rejected["bootstrap:unsent"] += 1  # the resolver asks again
                continue
            rank = self.ranks[action.asker]
            rank.do(rank.legs.located(action.room, action.at, action.attempt, action.code, action.found_by, self.now))

    # --- turns and timers ---------------------------------------------------------------------------------------

    def _after_turn(self) -> None:
        for rank in self.ranks.values():
            if rank.dirty:
                rank.turn()
        self._resolve(self.resolver.flush(self.now))
        self._send_tokens()

    def _send_tokens(self) -> None:
        failed: dict[bytes, SendFailure] = {}
        now = self.now
        for send in self.streams.flush(now):
            if send.peer not in failed:
                try:
                    self._router.send_multipart([send.peer, encode(send.message)], zmq.NOBLOCK)
                    continue
                except zmq.Again:
                    failed[send.peer] = SendFailure.FULL
                except zmq.ZMQError:
                    failed[send.peer] = SendFailure.GONE
            assert isinstance(send.message, Tokens)
            self.streams.unsent(send, failed[send.peer], now)
        if SendFailure.FULL in failed.values():
            self.loop.call_later(RETRY_S, lambda: None)  # the turn after it flushes again

    def _tick(self) -> None:
        for rank in self.ranks.values():
            rank.tick()
        self._resolve(self.resolver.tick(self.now))

    def _slow_tick(self) -> None:
        now = self.now
        self.streams.tick(now)
        self.kv.tick(now)
        if self._on_ready is not None:
            self._check_ready(now)
        self._check_drained(now)

    def _check_ready(self, now: float) -> None:
        missing = self._missing()
        if not missing:
            on_ready, self._on_ready = self._on_ready, None
            assert on_ready is not None
            on_ready(self)
        elif now - self._began >= self.config.wait_s:
            why = why_silent(missing[0].partition(" at ")[2], self.config.keys)
            silent = f"{' and '.join(missing)} did not answer (waited {self.config.wait_s:g} s): {why}"
            fenced = next((link.fenced for rank in self.ranks.values() for link in rank.links if link.fenced), "")
            self.failure = StartError(f"{fenced}; this one leaves" if fenced else silent)
            self.leave()
        elif now - self._said >= SAY_WAITING_S:
            self._said = now
            left_s = round(self.config.wait_s - (now - self._began), 1)
            log.info("node.waiting", waits_for=missing, waited_s=round(now - self._began, 1), gives_up_in_s=left_s)

    def _missing(self) -> list[str]:
        """What the process still waits for before it is ready."""
        joined = self.resolver.broker_heard_at is not None and all(r.on_the_bus for r in self.ranks.values())
        missing = [] if joined else [f"the bus at {self.config.bus}"]
        for key, base in enumerate(self.config.controllers):
            if any(rank.links[key].welcome is None for rank in self.ranks.values()):
                missing.append(f"the controller at {base}")
        return missing

    def _unready(self) -> str:
        """Why no leg can come here now; empty: one can."""
        if missing := self._missing():
            return f"waiting for {' and '.join(missing)}"
        ranks = self.ranks.values()
        if all(rank.state != "ready" for rank in ranks):
            return "draining"
        deaf = [str(rank.dp_rank) for rank in ranks if all(link.silent for link in rank.links)]
        return f"no controller speaks to dp_rank {', '.join(deaf)}" if deaf else ""

    def _check_drained(self, now: float) -> None:
        ranks = self.ranks.values()
        draining_s = -1.0 if self._drain_began is None else now - self._drain_began
        if draining_s >= self.config.drain_s:
            for rank in ranks:
                rank.abandon()
        if self.failure is not None and draining_s >= STREAM_GRACE_S:  # an engine that hangs holds nobody up
            self.loop.stop()
        ended = [rank.drained_at for rank in ranks]
        if any(at is None for at in ended):
            return
        last = max(at for at in ended if at is not None)
        if not all(rank.said_goodbye for rank in ranks) and now - last < GOODBYE_S:
            return  # it is said again with each interval
        if not self.streams.untaken or now - last >= STREAM_GRACE_S:
            self.loop.stop()
