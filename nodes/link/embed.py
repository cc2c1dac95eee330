"""`RankLink`: the ranks of an engine that has a scheduler of its own, linked to controllers, clients and the bus.

Owns a thread with the sockets and the hand-over between it and the scheduler's: bounded, never blocking, never raising
into the scheduler's loop but PartFailed. What is to be decided, the same cores decide as in a node of ours.

    with RankLink(bus, controllers=[controller], role="unified", instance="mine", facts=RankFacts(...)) as link:
        while not link.drained:
            for order in link.poll(timeout_s=0.01):
                ...                                    # Start: take the leg in; Cancel, Release: give it up
            link.output(leg, [token]); link.finish(leg, "length")      # as the scheduler's step gives them
            link.report(running=2, waiting=1, waiting_tokens=80)       # optional: else the legs are counted

Load and acknowledgements are of one moment: a `report` speaks of the legs that `poll` had handed over when it was made,
and the link adds those that came since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec.structs import replace

from bus import defaults
from bus.errors import BusError, ConfigError
from bus.runtime.service import Service
from bus.wire.messages import Code, Role
from nodes.link.actions import Cancel, Release, Start
from nodes.link.core import Limits
from nodes.link.host import Host
from nodes.link.leg import Leg
from nodes.link.rank import LinkConfig
from nodes.link.runner import (
    FOR_EVER,
    OVER_THE_BUS,
    Began,
    CacheChanged,
    Dead,
    Event,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    RankFacts,
    RunnerLoad,
    Stepped,
    Tell,
)

CHECK_S = 0.25
QUEUE_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Draining:
    """Nothing more will come for this rank; the link is `drained` when its legs are over."""

    dp_rank: int


Order: TypeAlias = Start | Cancel | Release | Draining


@dataclass(frozen=True, slots=True)
class _Report:
    """Figures of the legs among the first `taken` that the scheduler was handed."""

    load: RunnerLoad
    taken: int


class _Runner:
    """One rank's runner, whose legs run on the scheduler's thread; this object lives on the link's."""

    def __init__(self, link: RankLink, dp_rank: int, facts: RankFacts) -> None:
        self.facts = facts
        self._link = link
        self._dp_rank = dp_rank
        self._legs: OrderedDict[int, tuple[Leg, int]] = OrderedDict()  # by seq: (leg, how many were started by then)
        self._began: set[int] = set()  # of these, those that run
        self._running_tokens = 0
        self._waiting_tokens = 0
        self._started = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._outputs = 0  # stands for steps where the scheduler does not report them
        self._report: _Report | None = None

    def attach(self, tell: Tell) -> None:
        self._tell = tell

    def start(self, leg: Leg) -> None:
        self._started += 1
        self._legs[leg.seq] = leg, self._started
        self._waiting_tokens += leg.prompt_tokens
        self._prompt_tokens += leg.prompt_tokens
        self._link._order(self._dp_rank, Start(leg))

    def cancel(self, leg: Leg) -> None:
        self._forget(leg)
        self._link._order(self._dp_rank, Cancel(leg))

    def release(self, leg: Leg) -> None:
        self._forget(leg)
        self._link._order(self._dp_rank, Release(leg))

    def load(self) -> RunnerLoad:
        """What the scheduler last said, and the legs that it had not been handed then; without a report, the count."""
        counted = RunnerLoad(
            running=len(self._began),
            waiting=len(self._legs) - len(self._began),
            waiting_tokens=self._waiting_tokens,
            kv_tokens=self._running_tokens,
            step=self._outputs,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
        )
        if self._report is None:
            return counted
        waiting, waiting_tokens = self._report.load.waiting, self._report.load.waiting_tokens
        for leg, number in reversed(self._legs.values()):
            if number <= self._report.taken:
                break
            waiting += 1
            waiting_tokens += leg.prompt_tokens
        said = self._report.load
        return replace(
            said,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            step=said.step or self._outputs,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
        )

    def turn(self, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass

    # --- from the scheduler, on the link's thread ---------------------------------------------------------------

    def report(self, report: _Report) -> None:
        self._report = report
        self._tell(Stepped())

    def say(self, event: Event) -> None:
        if isinstance(event, Dead | Stepped | CacheChanged):
            self._tell(event)
            return
        leg = event.leg
        if leg.seq in self._legs:
            if isinstance(event, Began | Output | Held) and leg.seq not in self._began:
                self._began.add(leg.seq)
                self._waiting_tokens -= leg.prompt_tokens
                self._running_tokens += leg.prompt_tokens
            if isinstance(event, Began):
                self._cached_tokens += event.cached_tokens
            elif isinstance(event, Output):
                self._outputs += 1
            elif isinstance(event, Finished | LegFailed):
                self._forget(leg)
        self._tell(event)

    def give_up(self, leg: Leg) -> None:
        """Something that the scheduler said of it is lost: it can't go on."""
        if leg.seq in self._legs:
            self.cancel(leg)
            self._tell(LegFailed(leg, "engine_failed", "the link to the rank's scheduler fell behind"))

    def _forget(self, leg: Leg) -> None:
        if self._legs.pop(leg.seq, None) is None:
            return
        if leg.seq in self._began:
            self._began.remove(leg.seq)
            self._running_tokens -= leg.prompt_tokens
        else:
            self._waiting_tokens -= leg.prompt_tokens


class RankLink(Service):
    """`data` is where peers and clients reach this process: `ipc:///directory` or `tcp://host`. ConfigError on a bad
    argument, StartError on entry where an endpoint is taken. `overflows` counts what the hand-over could not take."""

    part = "rank_link"

    def __init__(
        self,
        bus: str,
        *,
        controllers: Sequence[str],
        role: Role,
        instance: str,
        facts: RankFacts,
        data: str,
        dp_ranks: Sequence[int] = (0,),
        dp_size: int = 1,
        report_interval_s: float = defaults.REPORT_INTERVAL_S,
        room_ttl_s: float = defaults.ROOM_TTL_S,
        limits: Limits | None = None,
        keys: str = "",
        queue_max: int = QUEUE_MAX,
    ) -> None:
        if role != "unified" and facts.kv_transfer == OVER_THE_BUS:
            raise ConfigError(
                f"a {role} rank's KV caches need a connector of the engine's own: name it in RankFacts.kv_transfer"
            )
        if not dp_ranks or any(not 0 <= rank < dp_size for rank in dp_ranks):
            raise ConfigError(f"dp_ranks {tuple(dp_ranks)} do not lie in 0..{dp_size - 1}")
        self.config = LinkConfig(
            role=role, instance=instance, dp_size=dp_size, bus=bus, controllers=tuple(controllers), data=data,
            report_interval_s=report_interval_s, room_ttl_s=room_ttl_s, limits=limits or Limits(), keys=keys,
        )  # fmt: skip
        self.overflows = 0
        self._runners = {rank: _Runner(self, rank, facts) for rank in dp_ranks}
        self._queue_max = queue_max
        self._inbox: deque[tuple[int, Order]] = deque()
        self._came = threading.Condition()
        self._outbox: deque[tuple[int, Event | _Report]] = deque()
        self._spilled: dict[Leg, None] = {}  # legs of which something was said that found no room
        self._taken = dict.fromkeys(dp_ranks, 0)  # legs handed over by `poll`
        self._woken = False
        self._drained = threading.Event()
        self._joined = threading.Event()
        self._draining: set[int] = set()

    # --- life -----------------------------------------------------------------------------------------------------

    def _open(self, exits: ExitStack) -> None:
        self._host = Host(self.config, self.loop, self._runners)
        exits.callback(self._host.close)
        self.loop.call_every(CHECK_S, self._check)
        self.loop.call_threadsafe(self._take)  # what was said before the start

    def leave(self) -> None:
        """Without `drain` first: what still runs ends with `shutting_down`, which clients send elsewhere."""
        self._take()
        self._host.drain("leave")
        for rank in self._host.ranks.values():
            rank.abandon()
            rank.turn()
        self.loop.stop()

    def _failed(self) -> None:
        self._joined.set()
        self._drained.set()
        with self._came:
            self._came.notify_all()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until bus and controllers have been heard. For start-up, not for a scheduler's loop."""
        joined = self._joined.wait(timeout_s)
        self.raise_if_failed()
        return joined

    @property
    def left(self) -> BusError | None:
        """Why the link drains by itself, if it does: its ranks were started again elsewhere, or `die` was called."""
        return self._host.failure

    @property
    def drained(self) -> bool:
        """All ranks have said goodbye, and what they produced has been read (or had its time)."""
        return self._drained.is_set()

    # --- for the scheduler's loop: nothing here blocks (but `poll`, for as long as it is told); PartFailed once the
    # thread has failed, and nothing else --------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> list[Order]:
        """What has come since the last call. A leg's `dp_rank` says whose it is."""
        with self._came:
            if not self._inbox and timeout_s > 0 and self.failure is None:
                self._came.wait(timeout_s)
            orders: list[Order] = []
            while self._inbox:
                dp_rank, order = self._inbox.popleft()
                if isinstance(order, Start):
                    self._taken[dp_rank] += 1
                orders.append(order)
        if not orders:
            self.raise_if_failed()
        return orders

    def began(self, leg: Leg, cached_tokens: int = 0) -> None:
        """It left the queue: its computation has begun. Optional; the first output says so too."""
        self._say(Began(leg, cached_tokens))

    def output(self, leg: Leg, tokens: Sequence[int]) -> None:
        """Its next output tokens."""
        self._say(Output(leg, tuple(tokens)))

    def finish(self, leg: Leg, reason: Literal["stop", "length"] = "length") -> None:
        """A decode or unified leg is over and well."""
        self._say(Finished(leg, reason))

    def fail(self, leg: Leg, code: Code, message: str = "") -> None:
        """A leg is over, and why: `engine_failed`, where another rank may do better."""
        self._say(LegFailed(leg, code, message))

    def held(self, leg: Leg, first_token: int, handle: bytes, valid_s: float = FOR_EVER) -> None:
        """A prefill leg's prompt is computed and its KV cache kept; `Release` says when nobody needs it any more."""
        self._say(Held(leg, first_token, handle, valid_s))

    def fetched(self, leg: Leg, seconds: float = 0.0) -> None:
        """A decode leg's KV cache is here."""
        self._say(Fetched(leg, seconds))

    def report(
        self, dp_rank: int = -1, *, running: int, waiting: int, waiting_tokens: int, kv_tokens: int = 0, step: int = 0,
        busy: bool = False,
    ) -> None:  # fmt: skip
        """The scheduler's own figures, of all legs that `poll` has handed over and that are not over."""
        rank = dp_rank if dp_rank >= 0 else next(iter(self._runners))
        load = RunnerLoad(running, waiting, waiting_tokens, kv_tokens, step, busy)
        self._hand_over(rank, _Report(load, self._taken[rank]))

    def die(self, reason: str) -> None:
        """The engine is gone for good: every leg ends now, and the ranks say goodbye."""
        for rank in self._runners:
            self._hand_over(rank, Dead(reason))

    def drain(self) -> None:
        """Take nothing new, finish what runs, say goodbye; then `drained`."""
        self.raise_if_failed()
        if self._thread is not None:
            self.loop.call_threadsafe(lambda: self._host.drain("embedder"))

    def _say(self, event: Began | Output | Held | Fetched | Finished | LegFailed) -> None:
        self._hand_over(event.leg.dp_rank, event)

    def _hand_over(self, dp_rank: int, what: Event | _Report) -> None:
        self.raise_if_failed()
        if len(self._outbox) < self._queue_max:
            self._outbox.append((dp_rank, what))
        else:
            self.overflows += 1
            leg = getattr(what, "leg", None)
            if leg is not None:
                self._spilled[leg] = None
        if not self._woken and self._thread is not None:
            self._woken = True
            self.loop.call_threadsafe(self._take)

    # --- its own thread -------------------------------------------------------------------------------------------

    def _order(self, dp_rank: int, order: Order) -> None:
        with self._came:
            self._inbox.append((dp_rank, order))
            self._came.notify()

    def _take(self) -> None:
        self._woken = False
        for _ in range(len(self._outbox)):
            dp_rank, what = self._outbox.popleft()
            runner = self._runners[dp_rank]
            if isinstance(what, _Report):
                runner.report(what)
            else:
                runner.say(what)
        while self._spilled:
            leg, _ = self._spilled.popitem()
            self._runners[leg.dp_rank].give_up(leg)

    def _check(self) -> None:
        if not self._joined.is_set() and not self._host.missing():
            self._host.serving = True
            self._joined.set()
        for dp_rank, rank in self._host.ranks.items():
            if rank.state != "ready" and dp_rank not in self._draining:
                self._draining.add(dp_rank)
                self._order(dp_rank, Draining(dp_rank))
        if self._host.drained():
            self._drained.set()
