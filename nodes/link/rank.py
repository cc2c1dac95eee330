"""One rank: its cores, its engine, its links to controllers. Carries out what the cores decide; decides nothing.

The shell calls `turn` after every turn of the loop in which something happened to this rank: work is planned, load and
acknowledgements are read at that one point, after the inbox, and leave with whatever else is published.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bus.actions import Note, Send
from bus.embed.publications import PublisherCore
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import get_logger
from bus.runtime.sockets import Sockets
from bus.wire.messages import (
    CancelLeg,
    Conflict,
    Dispatch,
    Hello,
    KvBlock,
    KvDone,
    KvFail,
    KvMeta,
    KvPull,
    Member,
    Message,
    NodeState,
    Pong,
    Welcome,
)
from nodes.link.actions import Action, ImportBlock, Locate, Register, Unlocate, Unregister
from nodes.link.connection import Link
from nodes.link.core import Legs
from nodes.link.sender import SendBlock
from nodes.own.blocks import BlockPool
from nodes.own.engines.base import Engine, StepResult
from nodes.own.kv_events import KvEventLog
from nodes.own.scheduler import Scheduler

if TYPE_CHECKING:
    from nodes.link.host import Node


class Rank:
    """Made by the shell, which owns the sockets that ranks share."""

    def __init__(self, node: Node, dp_rank: int, engine: Engine) -> None:
        config = node.config
        self.node = node
        self.engine = engine
        self.instance = config.instance
        self.dp_rank = dp_rank
        self.epoch = new_epoch()
        self.started_us = time.time_ns() // 1000
        self.state: NodeState = "ready"
        self.dirty = True
        self.log = get_logger("node").bind(dp_rank=dp_rank)
        spec = engine.spec
        pool = BlockPool(spec.blocks, spec.block_tokens, record_events=config.role != "decode")
        self.scheduler = Scheduler(pool, max_running=config.max_running, chunk_tokens=config.chunk_tokens)
        self.legs = Legs(
            config.role, dp_rank, self.epoch, spec, self.scheduler, node.streams, config.limits
        )  # fmt: skip
        self.publisher = PublisherCore(
            instance=config.instance,
            dp_rank=dp_rank,
            epoch=self.epoch,
            role=config.role,
            model=spec.model,
            dp_size=config.dp_size,
            endpoint=node.endpoint,
            interval_s=config.report_interval_s,
            room_ttl_s=config.room_ttl_s,
            state="ready",
            on_conflict=self._conflict,
        )
        self.kv_events = KvEventLog(config.instance, dp_rank, spec.block_tokens)
        self.links: list[Link] = []
        self._reported_at = float("-inf")
        self.drained_at: float | None = None
        self.on_the_bus: NodeState | None = None  # our state as subscribers hear it; None: not heard yet

    def add_link(self, sockets: Sockets, key: int, endpoint: str) -> None:
        """Connect to one more controller; `key` counts from 0."""
        assert key == len(self.links)
        node = self.node
        link = Link(sockets, self, key, endpoint, node.loop.clock, node.reject)
        self.links.append(link)
        node.loop.add(link.socket, link.receive)

    def close(self, *, linger_ms: int) -> None:
        self.engine.close()
        for link in self.links:
            link.close(linger_ms=linger_ms)

    # --- from controllers (LinkedRank) --------------------------------------------------------------------------

    def hello(self) -> Hello:
        config, spec = self.node.config, self.engine.spec
        return Hello(
            self.instance, self.dp_rank, self.epoch, config.role, spec.model, config.dp_size, self.state,
            self.node.endpoint, spec.max_context, spec.kv_capacity, config.max_running, spec.block_tokens,
            self.legs.live, self.started_us,
        )  # fmt: skip

    def welcomed(self, link: Link, welcome: Welcome, again: bool) -> None:
        self.log.info("controller.welcomed", controller=welcome.controller, again=again)
        self.dirty = True
        if again:
            self.legs.restate(link.key)
        follow = all(each.welcome is not None and each.welcome.follow_bootstrap_room for each in self.links)
        self.node.publish(self.publisher.set_follow(follow, self.node.now))

    def dispatched(self, link: Link, dispatch: Dispatch, frames: list[bytes]) -> None:
        self.do(self.legs.ingest(link.key, dispatch, frames, self.node.now))

    def cancelled(self, link: Link, cancel: CancelLeg) -> None:
        self.do(self.legs.cancel(link.key, cancel, self.node.now))

    def pong(self, n: int) -> Pong:
        return Pong(n, self.scheduler.step, self.scheduler.busy)

    def superseded(self, why: str) -> None:
        self.node.superseded(why)

    # --- life ---------------------------------------------------------------------------------------------------

    def drain(self, cause: str) -> None:
        """Take nothing new; `turn` says goodbye when all is finished. Idempotent."""
        if self.state != "ready":
            return
        self.log.info("rank.draining", cause=cause, live=len(self.legs))
        self._set_state("draining")
        self.legs.drain()
        self.dirty = True

    @property
    def said_goodbye(self) -> bool:
        """Whether the bus has carried our goodbye, and every controller's queue has taken it."""
        return self.on_the_bus == "gone" and not any(link.owes for link in self.links)

    def abandon(self) -> None:
        """There is no time to finish: what still runs is ended with `shutting_down`."""
        for rid, attempt in self.legs.live:
            self.do(self.legs.cancel(0, CancelLeg(rid, attempt, "shutting_down"), self.node.now))

    def _set_state(self, state: NodeState) -> None:
        self.state = state
        self.node.publish(self.publisher.set_state(state, self.node.now))
        for link in self.links:
            if state == "gone":
                link.say_bye()
            else:
                link.say_hello()

    # --- events -------------------------------------------------------------------------------------------------

    def pulled(self, peer: bytes, message: KvPull | KvDone) -> None:
        self.do(self.legs.pulled(peer, message, self.node.now))

    def kv_received(self, message: KvMeta | KvBlock | KvFail, data: bytes | memoryview) -> None:
        self.do(self.legs.kv_message(message, data, self.node.now))

    def from_bus(self, message: Message) -> None:
        self.node.publish(self.publisher.on_message(message, self.node.now))

    def came_back(self, member: Member) -> None:
        """A `member` as every subscriber gets it: ours has passed the broker."""
        if (member.instance, member.epoch) == (self.instance, self.epoch):
            self.on_the_bus = member.state

    def tick(self) -> None:
        now = self.node.now
        self.do(self.legs.tick(now), dirty=False)
        if now - self._reported_at >= self.node.config.report_interval_s:
            self._report(now)  # an idle rank's report is as fresh as a busy one's
        self.node.publish(self.publisher.tick(now))
        for link in self.links:
            link.tick()

    def turn(self) -> None:
        """After the inbox was read: plan, then report."""
        self.dirty = False
        now = self.node.now
        plan = self.legs.plan()
        if plan is not None:
            self.engine.submit(plan, self._stepped)
        self.do(self.legs.advance(now), dirty=False)
        self._report(now)
        self.node.publish(self.publisher.flush(now))
        if events := self.scheduler.pool.take_events():
            self.node.publish_kv_events(self.kv_events.messages(events, time.time()))
        for owner, report in self.legs.ledger.take().items():
            self.links[owner].progress(report.started, report.ended)
        if self.state == "draining" and not len(self.legs) and not len(self.scheduler):
            self._set_state("gone")
            self.drained_at = now
            self.log.info("rank.drained")

    def _report(self, now: float) -> None:
        self._reported_at = now
        self.publisher.report(self.legs.load(), now)

    def _stepped(self, result: StepResult) -> None:
        if result.error:
            self.log.error("step.failed", step=result.number, error=result.error)
        self.node.step_s.observe(result.duration_s)
        self.do(self.legs.stepped(result, self.node.now))

    def _conflict(self, conflict: Conflict) -> None:
        other = conflict.other
        self.log.warning(
            "room.conflict", room=conflict.room, kept=conflict.kept, other=f"{other.instance}/{other.dp_rank}"
        )

    # --- actions ------------------------------------------------------------------------------------------------

    def do(self, actions: list[Action], *, dirty: bool = True) -> None:
        self.dirty = self.dirty or dirty or bool(actions)
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        node, now = self.node, self.node.now
        match action:
            case Send(message=KvPull() | KvDone() as message):
                node.kv.request(action.peer, message, self.kv_received)
            case Send():
                node.answer(action)
            case SendBlock():
                node.kv.serve(action, self.engine.export_block(action.block))
            case ImportBlock():
                self.engine.import_block(action.block, action.data)
            case Register():
                node.publish(self.publisher.register(action.room, action.attempt, now))
            case Unregister():
                node.publish(self.publisher.drop(action.room, action.attempt, action.code, now))
            case Locate():
                node.locate(self, action)
            case Unlocate():
                node.unlocate(self, action.room)
            case Note():
                getattr(self.log, action.level)(action.event, cause=action.cause, **action.fields)
