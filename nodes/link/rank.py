"""One rank of a process: its core, its runner (the engine behind it) and its connections to controllers. It executes
the core's decisions.

The host calls `plan` and then `report` after every turn of the loop in which something happened to this rank. `plan`
lets the runner plan. `report` reads load and acknowledgements at one point, after the inbox, and publishes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, cast

from bus.actions import Note, Publish, Send
from bus.embed.publications import PublisherCore
from bus.errors import RemoteProtocolError
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.sockets import Sockets
from bus.runtime.spans import Spans
from bus.tracecontext import Span
from bus.wire.codes import Code
from bus.wire.messages import (
    CancelLeg,
    Conflict,
    Dispatch,
    FoundBy,
    Hello,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Location,
    Member,
    Message,
    NodeState,
    RecordQuery,
    RecordReply,
    TraceEvent,
    Welcome,
)
from nodes.link.actions import (
    Action,
    Leave,
    Locate,
    Over,
    PublishFrames,
    Register,
    SendBlock,
    Unlocate,
    Unregister,
)
from nodes.link.config import LinkConfig
from nodes.link.connection import Connection
from nodes.link.core import RankCore
from nodes.link.data import KvPeers
from nodes.link.driver import RankDriver
from nodes.link.leg import Leg
from nodes.link.record import LegRecord, span_of
from nodes.link.runner import BlockRunner, RankFacts, Runner
from nodes.link.streams import Streams


def hello_of(
    config: LinkConfig, facts: RankFacts, dp_rank: int, epoch: int, state: NodeState, endpoint: str, *,
    running: tuple[tuple[str, int], ...] = (), started_us: int = 0, clients: tuple[tuple[str, int], ...] = (),
    records: bool = False,
) -> Hello:  # fmt: skip
    """Return the hello of one start of a rank. `running`: `(rid, attempt)` of its legs; `clients`: how many of them
    each key owns; `records`: it can say what it does."""
    return Hello(
        instance=config.instance, dp_rank=dp_rank, epoch=epoch, role=config.role, model=facts.model,
        dp_size=config.dp_size, state=state, endpoint=endpoint, max_context=facts.max_context,
        kv_capacity=facts.kv_capacity, max_running=facts.max_running, block_tokens=facts.block_tokens,
        running=running, started_us=started_us, wants_prompt=facts.wants_prompt,
        kv_transfer=facts.kv_transfer, kv_layout=facts.kv_layout, params=facts.params,
        metrics=config.metrics, clients=clients, prefills=facts.prefills, reads_back=facts.reads_back,
        records=records,
    )  # fmt: skip


class Services(Protocol):
    """The services that a rank uses of the process that hosts it (`nodes.link.host`): shared sockets, time, and notices
    that a runner died, that a later start took this rank's place, or that its state has `changed`."""

    config: LinkConfig
    loop: Loop
    streams: Streams
    kv: KvPeers
    endpoint: str
    wall_s: float
    spans: Spans | None

    @property
    def now(self) -> float: ...
    def publish(self, publications: list[Publish]) -> None: ...
    def publish_frames(self, frames: Sequence[bytes]) -> None: ...
    def answer(self, send: Send) -> None: ...
    def locate(self, dp_rank: int, want: Locate) -> None: ...
    def unlocate(self, dp_rank: int, want: Unlocate) -> None: ...
    def reject(self, socket: str, error: RemoteProtocolError, peer: str = "") -> None: ...
    def runner_died(self, dp_rank: int, reason: str) -> None: ...
    def superseded(self, why: str) -> None: ...
    def changed(self) -> None: ...


class LinkedRank:
    """One rank. The host makes it, owns the sockets that ranks share, and calls it on the loop's thread; nothing here
    blocks. `epoch` names this start of it. `drained_at` is the time at which it had left; None: not yet."""

    def __init__(self, host: Services, dp_rank: int, runner: Runner) -> None:
        config = host.config
        self.instance = config.instance
        self.dp_rank = dp_rank
        self.epoch = new_epoch()
        self.started_us = time.time_ns() // 1000
        self.wall_s = host.wall_s
        self.runner = runner
        self.state: NodeState = "ready"
        self.drained_at: float | None = None
        self.on_the_bus: NodeState | None = None  # our state as subscribers hear it; None: not heard yet
        self.connections: list[Connection] = []
        self._controllers: dict[int, int] = {}  # epochs of the controllers that have welcomed it, by connection
        self.log = get_logger("node").bind(rank=f"{config.instance}/{dp_rank}")
        self.core = RankCore(config.role, dp_rank, runner.facts, host.streams, runner.load, config.limits)
        self.core.spans = host.spans is not None
        if (record_steps := getattr(runner, "record_steps", None)) is not None:
            record_steps(self.core.recorder)
        self.publisher = PublisherCore(
            instance=config.instance,
            dp_rank=dp_rank,
            epoch=self.epoch,
            role=config.role,
            model=runner.facts.model,
            dp_size=config.dp_size,
            endpoint=host.endpoint,
            interval_s=config.report_interval_s,
            room_ttl_s=config.room_ttl_s,
            state="ready",
            on_conflict=self._conflict,
            started_us=self.started_us,
        )
        self._host = host
        self._reported_at = float("-inf")
        self.driver = RankDriver(self.core, runner, self._do, host.loop.clock)

    def connect(self, sockets: Sockets, endpoint: str) -> None:
        """Connect to one more controller, at its endpoint for nodes."""
        host = self._host
        connection = Connection(sockets, self, len(self.connections), endpoint, host.loop.clock, host.reject)
        self.connections.append(connection)
        host.loop.add(connection.socket, connection.receive)

    def close(self, *, linger_ms: int) -> None:
        """Close the runner and the connections, which go on sending what is queued for `linger_ms`."""
        self.runner.close()
        for connection in self.connections:
            connection.close(linger_ms=linger_ms)

    # --- from controllers (connection.RankEndpoint) ------------------------------------------------------------------

    def hello(self) -> Hello:
        """Return the introduction of this rank as it is now, with the legs that it runs."""
        host = self._host
        running, clients = self.core.running()
        return hello_of(
            host.config, self.runner.facts, self.dp_rank, self.epoch, self.state, host.endpoint,
            running=running, started_us=self.started_us, clients=clients, records=True,
        )  # fmt: skip

    def welcomed(self, connection: Connection, welcome: Welcome, again: bool) -> None:
        """Take in a controller's welcome. If it came again, report what began and ended lately; a new controller gets
        the whole cache."""
        self.log.info("controller.welcomed", controller=welcome.controller, again=again)
        self.driver.dirty = True
        self.core.reports.welcomed(connection.key, welcome.epoch)
        if again:
            self.core.restate(connection.key)
        if self._controllers.get(connection.key) != welcome.epoch:
            self._controllers[connection.key] = welcome.epoch
            self.restate_cache()
        follow = all(each.welcome is not None and each.welcome.follow_bootstrap_room for each in self.connections)
        self._host.publish(self.publisher.set_follow(follow, self._host.now))
        self._host.changed()

    def restate_cache(self) -> None:
        """Publish the whole cache again, if the runner can: a controller does not know it, or knows it no longer."""
        restate = getattr(self.runner, "restate_cache", None)
        if restate is not None:
            restate()

    def dispatched(self, connection: Connection, dispatch: Dispatch, frames: list[bytes]) -> None:
        """Take in a leg that a controller dispatched, with its payload frames."""
        self.driver.dirty = True  # there is something to report, also where nothing is to be done
        self.driver.apply(self.core.ingest(connection.key, dispatch, frames, self._host.now))

    def cancelled(self, connection: Connection, cancel: CancelLeg) -> None:
        """End the leg that a controller cancels."""
        self.driver.dirty = True  # there is something to report here too
        self.driver.apply(self.core.cancel(connection.key, cancel, self._host.now))

    def unread(self, leg: Leg) -> None:
        """End a leg without a reader, as the host found in the streams."""
        self.driver.apply(self.core.unread(leg, self._host.now))

    def steps(self) -> tuple[int, bool, int]:
        """Return (forward steps done, whether one is running, seq of the newest load), for a pong."""
        return self.runner.load().step, self.runner.busy, self.publisher.load_seq

    def recall(self, rid: str) -> tuple[TraceEvent, ...]:
        """Return the events of a request's legs here, for `pdbus trace`; empty: none is known."""
        return self.core.recall(rid, self.wall_s)

    def recorded(self, query: RecordQuery) -> RecordReply:
        """Record what this rank does for a while, and return what is recorded."""
        return self.core.recorder.asked(query, self._host.now, self.wall_s)

    def superseded(self, why: str) -> None:
        """Leave with the whole process, because a controller says that a later start of this rank has taken its
        place."""
        self._host.superseded(why)

    # --- life ---------------------------------------------------------------------------------------------------

    def drain(self, cause: str) -> None:
        """Take no new legs; the rank leaves when all have ended. Idempotent."""
        if self.state != "ready":
            return
        self.log.info("rank.draining", cause=cause, live=len(self.core))
        self._set_state("draining")
        self.core.drain()
        self.driver.dirty = True

    @property
    def bye_sent(self) -> bool:
        """True when the bus has carried our goodbye, and every controller's queue has taken it."""
        return self.on_the_bus == "gone" and not any(connection.owes for connection in self.connections)

    def abandon(self, code: Code = "shutting_down", message: str = "") -> None:
        """End what still runs now, with `code` and a sentence: there is no time to finish."""
        self.driver.apply(self.core.end_all(code, message, self._host.now))

    def _set_state(self, state: NodeState) -> None:
        self.state = state
        self._host.changed()
        self._host.publish(self.publisher.set_state(state, self._host.now))
        for connection in self.connections:
            if state == "gone":
                connection.send_bye()
            else:
                connection.send_hello()

    # --- from the bus and from peers ----------------------------------------------------------------------------

    def located(
        self, room: int, location: Location | None, attempt: int, code: Code, found_by: FoundBy, client: str
    ) -> None:
        """Take in the answer to a Locate of the core."""
        self.driver.apply(self.core.located(room, location, attempt, code, found_by, self._host.now, client))

    def pulled(self, peer: bytes, message: KvPull | KvDone) -> None:
        """Take in what a decode rank asks of a leg here: its KV cache, or its end."""
        self.driver.apply(self.core.pulled(peer, message, self._host.now))

    def kv_received(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview) -> None:
        """Take in what a prefill rank sent for a decode leg here."""
        self.driver.apply(self.core.kv_message(message, data, self._host.now))

    def from_bus(self, message: Message) -> None:
        """Take in a message of the broker for this rank, and publish what it asks for."""
        self._host.publish(self.publisher.on_message(message, self._host.now))

    def came_back(self, member: Member) -> None:
        """Handle our own `member` publication, as every subscriber gets it: it has passed the broker."""
        if (member.instance, member.epoch) == (self.instance, self.epoch) and member.state != self.on_the_bus:
            self.on_the_bus = member.state
            self._host.changed()

    # --- time ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due by time: of the runner, of deadlines, of reports, and of the connections. The host calls it
        many times a second."""
        now = self._host.now
        self.runner.tick(now)
        self.driver.apply(self.core.tick(now))
        if now - self._reported_at >= self._host.config.report_interval_s:
            self._report(now)  # an idle rank's report is as fresh as a busy one's
        self._host.publish(self.publisher.tick(now))
        for connection in self.connections:
            connection.tick()

    def turn(self) -> None:
        """Plan, then report. Call it after the inbox was read."""
        self.plan()
        self.report()

    def plan(self) -> None:
        """Let the runner plan its next step."""
        self.driver.dirty = False
        self.runner.turn(self._host.now)

    def report(self) -> None:
        """Publish the load as it is now, and send the controllers which legs began and ended. Call it after `plan`. A
        draining rank without legs leaves here."""
        now = self._host.now
        self._report(now)
        self._host.publish(self.publisher.flush(now))
        for owner, report in self.core.reports.take().items():
            self.connections[owner].progress(report.started, report.ended)
        if self.state == "draining" and not len(self.core):
            self._set_state("gone")
            self.drained_at = now
            self.log.info("rank.drained")

    def _report(self, now: float) -> None:
        self._reported_at = now
        self.publisher.report(self.core.load(), now)

    def _span_of(self, record: LegRecord) -> Span:
        return span_of(record, f"{self.instance}/{self.dp_rank}", self.runner.facts.model, self.wall_s)

    def _conflict(self, conflict: Conflict) -> None:
        other = conflict.other
        self.log.warning(
            "room.conflict", room=conflict.room, kept=conflict.kept, other=f"{other.instance}/{other.dp_rank}"
        )

    # --- actions that are not for the runner --------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        host, now = self._host, self._host.now
        match action:
            case SendBlock():
                data = cast(BlockRunner, self.runner).export(action.leg, action.index)
                self.core.kv_sent(host.kv.serve(action, data))
            case Send(message=KvPull() | KvDone() as message):
                host.kv.request(action.peer, message, self.kv_received)
            case Send():
                host.answer(action)
            case PublishFrames():
                for frames in action.messages:
                    host.publish_frames(frames)  # one that is dropped leaves a hole in the numbers: followers see it
            case Register():
                host.publish(self.publisher.register(action.room, action.attempt, now))
            case Unregister():
                host.publish(self.publisher.drop(action.room, action.attempt, action.code, now))
            case Locate():
                host.locate(self.dp_rank, action)
            case Unlocate():
                host.unlocate(self.dp_rank, action)
            case Over():
                if host.spans is not None:
                    host.spans.add(action.record, self._span_of)
            case Leave():
                host.runner_died(self.dp_rank, action.reason)
            case Note():
                getattr(self.log, action.level)(action.event, **action.fields)
