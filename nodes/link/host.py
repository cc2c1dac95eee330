"""The sockets that all linked ranks of a process share (a rank is one scheduler with its KV memory), on a loop that the
caller runs. It decides nothing.

One PUB, one SUB, one bootstrap DEALER and one data ROUTER serve all ranks of the process. Each rank has a DEALER of its
own to each controller, so a connection is a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import zmq

from bus.actions import Publish, Send
from bus.embed.resolution import Resolved, ResolverCore
from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import BusError, RemoteProtocolError, Replaced
from bus.rights import key_of, may
from bus.runtime.epochs import new_epoch, wall_s
from bus.runtime.frames import name_of
from bus.runtime.frames import send as send_frames
from bus.runtime.intake import Rejections
from bus.runtime.keys import load_keys
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.peer_keys import LOOK_S
from bus.runtime.sockets import Sockets
from bus.runtime.spans import Spans
from bus.wire import topics
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
from nodes.link.actions import Locate, Unlocate
from nodes.link.config import LinkConfig
from nodes.link.data import KvPeers, send_answer
from nodes.link.rank import LinkedRank
from nodes.link.runner import Runner
from nodes.link.streams import RETRY_S, SendFailure, Streams

TICK_S = 0.05
SLOW_TICK_S = 0.25
GOODBYE_S = 1.0  # a drained process waits this long for its goodbye to come back from the bus
STREAM_GRACE_S = 5.0  # a drained process waits this long for readers to take the end of their streams
LINGER_MS = 500

log = get_logger("node")


class EngineDied(BusError):
    """The failure of a host one of whose runners is dead. The process exits, and its supervisor starts it again."""


class Host:
    """The host of the ranks in one process, for a node or a RankLink. `runners` has one runner for each dp_rank here.
    All methods are for the loop's thread, and none blocks.

    `on_change` is called at the end of each turn that may have changed the result of `missing` or `drained`, or a
    rank's state. ConfigError for bad keys, StartError where an endpoint is taken.
    """

    def __init__(
        self, config: LinkConfig, loop: Loop, runners: Mapping[int, Runner], on_change: Callable[[], None],
        spans: Spans | None = None,
    ) -> None:  # fmt: skip
        assert runners.keys() == set(config.dp_ranks), f"runners of {list(runners)}, ranks {config.dp_ranks}"
        self.config = config
        self.loop = loop
        self.wall_s = wall_s(loop.clock)
        self.streams = Streams()
        self.resolver = ResolverCore()
        self.rejected: Counter[str] = Counter()
        self.unsent_publications = 0
        self.serving = False  # the owner's: everything it needs has been there
        self.failure: BusError | None = None  # why the process must leave; its legs have ended, and its ranks drain
        self.spans = spans
        self._on_change = on_change
        self._changed = False
        self._rejections: dict[str, Rejections] = {}  # by socket
        keys = load_keys(config.keys, "nodes", name=config.instance) if config.keys else None
        self._sockets = Sockets(keys=keys, max_sockets=16384)
        try:
            self._open(runners)
        except BaseException:
            self._sockets.close()
            raise

    def _open(self, runners: Mapping[int, Runner]) -> None:
        config, sockets, loop = self.config, self._sockets, self.loop
        bus = BusAddress(config.bus)
        where = f"{config.data}/node-{new_epoch():016x}" if config.data.startswith("ipc://") else config.data
        blocks = config.role == "prefill" or any(runner.facts.reads_back for runner in runners.values())
        self._router, self.endpoint = sockets.ephemeral_router(where, answers_one_frame=not blocks)
        self._pub = sockets.pub(bus.publish)
        kinds = (topics.TO, topics.MEMBER)  # what the broker tells us, and our own words come back
        mine = tuple(topics.for_rank(kind, config.instance, rank) for kind in kinds for rank in runners)
        self._sub = sockets.sub(bus.subscribe, (topics.BEACON, *mine))
        self._bootstrap = sockets.dealer(bus.bootstrap)
        self.kv = KvPeers(sockets, loop, self._router, linger_ms=LINGER_MS)
        self.ranks = {dp_rank: LinkedRank(self, dp_rank, runner) for dp_rank, runner in runners.items()}
        self._by_epoch = {rank.epoch: rank for rank in self.ranks.values()}
        for rank in self.ranks.values():
            for base in config.controllers:
                rank.connect(sockets, ControllerAddress(base).nodes)
        loop.add(self._router, self._data_received, keyed=sockets.keyed)
        loop.add(self._sub, self._publication_received)
        loop.add(self._bootstrap, self._answer_received)
        loop.call_every(TICK_S, self._tick)
        loop.call_every(SLOW_TICK_S, self._slow_tick)
        if sockets.keyed:
            loop.call_every(LOOK_S, sockets.look)
        loop.after_turn(self._after_turn)

    def close(self, *, linger_ms: int = LINGER_MS) -> None:
        """Close sockets and Context. They are gone when it returns; the loop is the caller's."""
        for rank in self.ranks.values():
            rank.close(linger_ms=linger_ms)
        if linger_ms:
            self.kv.close()
            for socket in (self._pub, self._router):
                self._sockets.close_socket(socket, linger_ms=linger_ms)
        self._sockets.close()

    # --- life ---------------------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Return what the ranks still wait for before they can serve, in words for a log line: the bus, and every
        controller. Empty: nothing."""
        joined = self.resolver.broker_seen_at is not None and all(r.on_the_bus for r in self.ranks.values())
        missing = [] if joined else [f"the bus at {self.config.bus}"]
        for key, base in enumerate(self.config.controllers):
            if any(rank.connections[key].welcome is None for rank in self.ranks.values()):
                missing.append(f"the controller at {base}")
        return missing

    def can_serve(self) -> bool:
        """Return true if the bus is connected, and at least one controller has welcomed each rank."""
        there = self.resolver.broker_seen_at is not None and all(r.on_the_bus for r in self.ranks.values())
        return there and all(any(each.welcome for each in rank.connections) for rank in self.ranks.values())

    def unready(self) -> str:
        """Return why no leg can come here now, in words; empty: one can."""
        if not self.serving and (missing := self.missing()):
            return f"waiting for {' and '.join(missing)}"
        ranks = self.ranks.values()
        if all(rank.state != "ready" for rank in ranks):
            return "draining"
        deaf = [str(rank.dp_rank) for rank in ranks if all(each.silent for each in rank.connections)]
        return f"no controller speaks to dp_rank {', '.join(deaf)}" if deaf else ""

    def fenced(self) -> str:
        """Return why a controller refuses one of our ranks, or an empty string."""
        return next((each.fenced for rank in self.ranks.values() for each in rank.connections if each.fenced), "")

    def drain(self, cause: str) -> None:
        """Let all ranks refuse new legs, finish those that run, and leave. It returns at once; `drained` becomes true
        later."""
        for rank in self.ranks.values():
            rank.drain(cause)

    def drained(self) -> bool:
        """Return true if every rank has left and the bus has carried it, and readers have taken the end of their
        streams (or had time)."""
        ranks = self.ranks.values()
        ended = [rank.drained_at for rank in ranks if rank.drained_at is not None]
        if len(ended) < len(ranks):
            return False
        left_s = self.now - max(ended)
        if not all(rank.bye_sent for rank in ranks) and left_s < GOODBYE_S:
            return False  # it is said again with each interval
        return not self.streams.untaken(self.now) or left_s >= STREAM_GRACE_S

    @property
    def _leaving(self) -> bool:
        return all(rank.state == "gone" for rank in self.ranks.values())

    # --- for the ranks (rank.Services) --------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.loop.clock()

    def publish(self, publications: Sequence[Publish]) -> None:
        """Publish messages on the bus, in order."""
        for publication in publications:
            self.publish_frames((topics.of(publication.message), encode(publication.message)))

    def publish_frames(self, frames: Sequence[bytes]) -> None:
        """Publish one message, as its topic and further frames. Where the queue is full it is lost, and counted."""
        try:
            send_frames(self._pub, frames)
        except zmq.Again:
            self.unsent_publications += 1

    def answer(self, send: Send) -> None:
        """Send an answer to a peer of the data ROUTER. If the peer is gone, the answer is lost; the peer asks again if
        it returns."""
        send_answer(self._router, send)

    def locate(self, dp_rank: int, want: Locate) -> None:
        """Look for the prefill rank that `want` names, for the rank `dp_rank` here, which gets the result by
        `located`."""
        now = self.now
        self._resolve(
            self.resolver.want(
                want.room,
                now,
                deadline_s=max(0.001, want.deadline - now),
                attempt=want.attempt,
                prefill_instance=want.prefill_instance,
                dp_rank=want.dp_rank,
                asker=(dp_rank, want.client),  # a room of another client is another room
            )
        )

    def unlocate(self, dp_rank: int, want: Unlocate) -> None:
        """End the search of a `locate`; its rank gets no result."""
        self.resolver.cancel(want.room, (dp_rank, want.client))

    def reject(self, socket: str, error: RemoteProtocolError, peer: str = "") -> None:
        """Count an invalid message that came over `socket`; log the first of each peer."""
        if socket not in self._rejections:
            self._rejections[socket] = Rejections(log, self.rejected, prefix=f"{socket}:", socket=socket)
        self._rejections[socket].note(peer or socket, error)

    def runner_died(self, dp_rank: int, reason: str) -> None:
        """Drain the process after a runner died: its legs have ended, and the other ranks finish theirs."""
        log.error("runner.died", dp_rank=dp_rank, reason=reason)
        self.failure = self.failure or EngineDied(f"{self.config.instance}/{dp_rank}: its engine died: {reason}")
        self.drain("a runner died")

    def superseded(self, why: str) -> None:
        """End all legs and leave, because a later start of one of our ranks has taken its place. Before this process
        has served, it goes on asking instead: the other start may be dead and its clock may have been ahead."""
        if not self.serving or self.failure is not None:
            return
        log.warning("node.superseded", why=why)
        self.failure = Replaced(f"{why}; this one leaves")
        self.drain("superseded")
        for rank in self.ranks.values():
            rank.abandon()

    def changed(self) -> None:
        """Note that a rank's state, its welcome or the bus's view of it may have changed."""
        self._changed = True

    # --- what comes in ------------------------------------------------------------------------------------------

    def _data_received(self, frames: list[bytes]) -> None:
        peer = frames[0]
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("frames", f"{len(frames)} frames")
            message = decode(frames[1], TO_NODE_DATA)
        except RemoteProtocolError as error:
            self.reject("data", error, name_of(peer))
            return
        if isinstance(message, Attach):
            self.streams.attach(peer, message, self.now)
        elif isinstance(message, Detach):
            self.streams.detach(peer, message)
        elif not may(peer, "nodes"):
            stranger = RemoteProtocolError("not_yours", f"{type(message).__name__} of {key_of(peer)}")
            self.reject("data", stranger, name_of(peer))
        elif isinstance(message, KvPull):
            holder = self._by_epoch.get(message.epoch)
            if holder is not None:
                holder.pulled(peer, message)
            else:
                why = "the prefill rank has restarted"
                self.answer(Send(peer, KvFail(message.room, message.attempt, "prefill_failed", why, message.client)))
        elif isinstance(message, KvDone):
            for rank in self.ranks.values():
                rank.pulled(peer, message)

    def _publication_received(self, frames: list[bytes]) -> None:
        try:
            message = topics.read(frames)
            if not isinstance(message, Beacon | Resync | Conflict | Member):
                raise RemoteProtocolError("topic", "nothing for a publisher")
        except RemoteProtocolError as error:
            self.reject("bus", error)
            return
        if isinstance(message, Beacon):
            if self.resolver.broker_seen_at is None:
                self.changed()
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
                    send_frames(self._bootstrap, (b"", encode(action.message)))
                except zmq.Again:
                    self.rejected["bootstrap:unsent"] += 1  # the resolver asks again
                continue
            dp_rank, client = cast(tuple[int, str], action.asker)
            self.ranks[dp_rank].located(action.room, action.at, action.attempt, action.code, action.found_by, client)

    # --- turns and timers ---------------------------------------------------------------------------------------

    def _after_turn(self) -> None:
        dirty = [rank for rank in self.ranks.values() if rank.driver.dirty]
        for rank in dirty:
            rank.plan()
        self._send_tokens()  # before the reports to controllers, so that readers do not wait for those
        for rank in dirty:
            rank.report()
        self._resolve(self.resolver.flush(self.now))
        if self._changed:
            self._changed = self._leaving  # to be drained then takes nothing but turns and time
            self._on_change()

    def _send_tokens(self) -> None:
        failed: dict[bytes, SendFailure] = {}
        now = self.now
        for send in self.streams.flush(now):
            if send.peer not in failed:
                try:
                    send_frames(self._router, (send.peer, encode(send.message)))
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
        self.streams.tick(self.now)
        for leg in self.streams.unread(self.now):
            self.ranks[leg.dp_rank].unread(leg)
        self.kv.tick(self.now)
