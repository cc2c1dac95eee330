"""`RankLink`: the ranks of an engine that has a scheduler of its own, linked to controllers, clients and the bus. A leg
is what a rank runs of a request: its prefill, its decode, or both.

It owns a thread with the sockets, and the hand-over between that thread and the scheduler's: bounded, never blocking,
and raising only PartFailed into the scheduler's loop. The same cores decide as in a node of ours.

    with RankLink(bus, controllers=[controller], role="unified", instance="mine", facts=RankFacts(...)) as link:
        while not link.drained:
            for order in link.poll(timeout_s=0.01):
                ...                                    # Start: take the leg in; Cancel, Release: give it up
            link.output(leg, [token]); link.finish(leg, "length")      # as the scheduler's step gives them
            link.report(running=2, waiting=1, waiting_tokens=80)       # optional: else the legs are counted

Load and acknowledgements are of one moment: a `report` counts the legs that `poll` had returned when it was made
and that were not over, and the link adds the legs that have come, begun and ended since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import index
from typing import Literal, TypeAlias

from msgspec import Struct

from bus import defaults
from bus.errors import BusError, ConfigError, ProtocolError
from bus.runtime.intake import Mailbox
from bus.runtime.service import Service
from bus.wire.codec import decode, encode
from bus.wire.codes import Code
from bus.wire.messages import MAX_ROOM, NODE_TO_CONTROLLER, Role
from nodes.link.actions import Cancel, Release, Start
from nodes.link.config import Limits, LinkConfig
from nodes.link.host import Host
from nodes.link.leg import Leg
from nodes.link.logprobs import token_logprobs
from nodes.link.rank import hello_of
from nodes.link.runner import (
    FOR_EVER,
    OVER_THE_BUS,
    Began,
    Dead,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    RankFacts,
)
from nodes.link.threaded_runner import (
    FELL_BEHIND,
    QUEUE_MAX,
    LegAccounting,
    LegEvent,
    LoadUpdate,
    RunnerEvent,
    ThreadedRunner,
    event_of,
)


class Draining(Struct, frozen=True, gc=False):
    """An order: rank `dp_rank` gets no more legs; the link is `drained` when its legs are over."""

    dp_rank: int


Order: TypeAlias = Start | Cancel | Release | Draining


class RankLink(Service):
    """The ranks of one engine, linked on a thread of their own: `with RankLink(...) as link:`. `facts` describes the
    engine, `dp_ranks` are the ranks of this process among the `dp_size` of the instance, `data` is the address for
    peers and clients of this process: `ipc:///directory`, `tcp://host` (on any free port) or `tcp://host:port`.

    ConfigError for an invalid argument, StartError on entry where an endpoint is taken. `overflows` counts what the
    hand-over could not take (`queue_max` events wait at most), `invalid` the invalid calls; a leg that lost something
    by either fails, and is cancelled at the scheduler.
    """

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
        self.config = LinkConfig(
            role, instance, dp_size, tuple(dp_ranks), bus, tuple(controllers), data,
            report_interval_s=report_interval_s, room_ttl_s=room_ttl_s, limits=limits or Limits(), keys=keys,
        )  # fmt: skip
        if queue_max < 1:
            raise ConfigError(f"queue_max must be at least 1, not {queue_max}")
        if role != "unified" and facts.kv_transfer == OVER_THE_BUS:
            raise ConfigError(
                f"a {role} rank's KV caches need a connector of the engine's own: name it in RankFacts.kv_transfer"
            )
        try:
            decode(encode(hello_of(self.config, facts, 0, 1, "ready", "")), NODE_TO_CONTROLLER)
        except (ProtocolError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"rank link of {instance!r}: {error}") from None
        self.overflows = 0
        self.invalid = 0
        self._facts = facts
        self._queue_max = queue_max
        self._came = threading.Condition()  # guards all that both threads use
        self._drained = threading.Event()
        self._joined = threading.Event()
        self._renew()

    # --- life -----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        ranks = self.config.dp_ranks
        self._runners = {rank: ThreadedRunner(self._facts, self._order) for rank in ranks}
        self._inbox: dict[Leg | int, Order] = {}  # by leg, or by the dp_rank that drains; in order
        self._handed = {rank: LegAccounting() for rank in ranks}  # the scheduler's side of the books
        self._mailbox: Mailbox[tuple[int, RunnerEvent]] = Mailbox(self._queue_max)  # what finds no room spills its leg
        self._host: Host | None = None
        self._draining: set[int] = set()
        self._drained.clear()
        self._joined.clear()

    def _open(self, exits: ExitStack) -> None:
        self._host = host = Host(self.config, self.loop, self._runners, self._look)
        exits.callback(host.close)
        mailbox = self._mailbox
        mailbox.open(lambda: self.loop.call_threadsafe(self._take))
        exits.callback(mailbox.close)

    def _leave(self) -> None:
        """Stop without waiting: what still runs ends with `shutting_down`, and clients send it elsewhere. Call
        `drain` first to finish it."""
        assert self._host is not None
        self._take()
        self._host.drain("leave")
        for rank in self._host.ranks.values():
            rank.abandon()
            rank.turn()
        self._drained.set()
        self._wake()
        self.loop.stop()

    def _failed(self) -> None:
        self._joined.set()
        self._drained.set()
        self._wake()

    _ended = _failed

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the bus and every controller have answered, or `timeout_s` has passed: then return false. For
        start-up, not for a scheduler's loop."""
        self.raise_if_inherited()
        joined = self._joined.wait(timeout_s)
        self.raise_if_failed()
        return joined

    @property
    def left(self) -> BusError | None:
        """The reason why the link drains by itself: its ranks were started again elsewhere, or `die` was called. None:
        it does not."""
        return self._host.failure if self._host is not None else None

    @property
    def drained(self) -> bool:
        """True when all ranks have left and their output has been read (or its time is over), or when the link has
        stopped."""
        return self._drained.is_set()

    # --- for the scheduler, from any thread: nothing here blocks (but `poll`, for as long as it is told); PartFailed
    # once the link's thread has failed, and nothing else ----------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> list[Order]:
        """Return the orders since the last call; while there is none, wait for one up to `timeout_s` seconds. A leg's
        `dp_rank` is its rank. A Cancel may name a leg that the scheduler has just finished. A stopped link gives no
        orders: it is `drained`."""
        self.raise_if_inherited()
        with self._came:
            if not self._inbox and timeout_s > 0 and not self._drained.is_set():
                self._came.wait(timeout_s)
            orders = list(self._inbox.values())
            self._inbox.clear()
            for order in orders:
                if isinstance(order, Start):
                    self._handed[order.leg.dp_rank].start(order.leg)
                elif not isinstance(order, Draining):
                    self._handed[order.leg.dp_rank].end(order.leg)
        if not orders and not self.stopped:
            self.raise_if_failed()
        return orders

    def began(self, leg: Leg, cached_tokens: int = 0, written_tokens: int = 0) -> None:
        """Report that a leg's computation has begun; `cached_tokens` of its prompt came from the prefix cache, and
        `written_tokens` of the others are written to it. Optional: its first output implies it."""
        self._enqueue(leg, lambda: Began(leg, index(cached_tokens), index(written_tokens)))

    def output(
        self, leg: Leg, tokens: Sequence[int], logprobs: Sequence[tuple[float, Sequence[tuple[int, float]]]] = ()
    ) -> None:
        """Send a leg's next output tokens to its client. If `leg.params.logprobs` is not negative, `logprobs` has, for
        each token, its log probability (natural) and those of that many most likely tokens, the likeliest first."""
        self._enqueue(leg, lambda: Output(leg, tuple(map(index, tokens)), [token_logprobs(*each) for each in logprobs]))

    def finish(self, leg: Leg, reason: Literal["stop", "length"] = "length") -> None:
        """End a decode or unified leg that ended well: at a `stop` token, or at its full `length`."""
        self._enqueue(leg, lambda: Finished(leg, reason))

    def fail(self, leg: Leg, code: Code, message: str = "") -> None:
        """End a leg with a code, such as `engine_failed`, after which another rank may do better. `message` is a
        sentence for people."""
        self._enqueue(leg, lambda: LegFailed(leg, code, str(message)))

    def held(self, leg: Leg, first_token: int, handle: bytes, valid_s: float = FOR_EVER) -> None:
        """Report that a prefill leg's prompt is computed and its KV cache kept. `handle` goes to the decode rank
        unread, with `first_token`; after `valid_s` seconds the cache may be gone. A Release comes when it is not needed
        any more."""
        self._enqueue(leg, lambda: Held(leg, index(first_token), bytes(handle), float(valid_s)))

    def fetched(self, leg: Leg, seconds: float = 0.0) -> None:
        """Report that a decode leg's KV cache has been fetched, in so many `seconds`."""
        self._enqueue(leg, lambda: Fetched(leg, float(seconds)))

    def report(
        self, dp_rank: int | None = None, *, running: int, waiting: int, waiting_tokens: int,
        kv_tokens: int | None = None, step: int = 0, busy: bool = False,
    ) -> None:  # fmt: skip
        """Report the scheduler's own figures of one rank (None: the first of `dp_ranks`), for all legs that `poll` has
        returned and that are not over. `step`: forward steps done; while `busy`, a step count that does not rise is
        taken for a hang. `waiting_tokens`: prompt tokens still to be computed or fetched. `kv_tokens` None: as counted
        by the link."""
        self.raise_if_failed()
        with self._came:
            rank = next(iter(self._handed)) if dp_rank is None else dp_rank
            try:
                legs = self._handed[rank]
                load = LoadUpdate(
                    index(running) - legs.running,
                    index(waiting) - legs.waiting,
                    index(waiting_tokens) - legs.waiting_tokens,
                    0 if kv_tokens is None else index(kv_tokens) - legs.kv_tokens,
                    min(max(0, index(step)), MAX_ROOM),
                    bool(busy),
                )
            except (KeyError, TypeError, ValueError):
                self.invalid += 1
            else:
                self._hand_over(rank, load)

    def die(self, reason: str) -> None:
        """End every leg now, because the engine is dead for `reason`; the ranks leave."""
        self.raise_if_failed()
        with self._came:
            for rank in self._handed:
                self._hand_over(rank, Dead(str(reason)))

    def drain(self) -> None:
        """Take no new legs, finish those that run, and leave; then the link is `drained`. It returns at once."""
        self.raise_if_failed()
        if self._thread is not None:
            self.loop.call_threadsafe(partial(self._drain, "embedder"))

    def _enqueue(self, leg: Leg, make: Callable[[], LegEvent]) -> None:
        self.raise_if_failed()
        if type(leg) is not Leg:
            self.invalid += 1
            return
        event = event_of(leg, make)
        with self._came:
            self._handed[leg.dp_rank].note(event)
            self._hand_over(leg.dp_rank, event)

    def _hand_over(self, dp_rank: int, event: RunnerEvent) -> None:
        died = isinstance(event, Dead)  # which must arrive
        leg = None if isinstance(event, Dead | LoadUpdate) else event.leg  # of a lost load the next one will do
        self.overflows += not self._mailbox.put((dp_rank, event), spills=leg, always=died)

    # --- its own thread -------------------------------------------------------------------------------------------

    def _order(self, leg: Leg, order: Start | Cancel | Release) -> None:
        with self._came:
            if isinstance(order, Cancel) and isinstance(self._inbox.get(leg), Start):
                del self._inbox[leg]  # the scheduler never sees it
                return
            self._inbox[leg] = order
            self._came.notify_all()

    def _wake(self) -> None:
        with self._came:
            self._came.notify_all()

    def _take(self) -> None:
        with self._came:
            events, spilled = self._mailbox.take(), self._mailbox.spilled()
        for dp_rank, event in events:
            self.invalid += not self._runners[dp_rank].on_event(event)
        for leg in spilled:
            self._runners[leg.dp_rank].give_up(leg, FELL_BEHIND)

    def _drain(self, cause: str) -> None:
        assert self._host is not None
        self._host.drain(cause)

    def _look(self) -> None:
        """Check the state of the ranks, and pass changes to the scheduler."""
        host = self._host
        assert host is not None
        if not self._joined.is_set() and not host.missing():
            host.serving = True
            self._joined.set()
        for dp_rank, rank in host.ranks.items():
            if rank.state != "ready" and dp_rank not in self._draining:
                self._draining.add(dp_rank)
                with self._came:
                    self._inbox[dp_rank] = Draining(dp_rank)
                    self._came.notify_all()
        if host.drained():
            self._drained.set()
