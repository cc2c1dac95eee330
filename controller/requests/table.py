"""The table of live requests: by rid, by room and by client; their payload, the waiting ones, and their due times.

This module owns these maps and sums and the limits on them, and what is remembered of requests that are not alive
here. It sends, places and decides nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from bus.history import History
from bus.timer_slots import TimerSlots
from bus.wire.codes import Code, Refusal
from bus.wire.messages import MAX_ATTEMPT, Attempt, Rid, Role
from controller.config import ControllerConfig
from controller.rank import Rank
from controller.requests.lanes import Lane
from controller.requests.order import ArrivalOrder, PolicyOrder, SloOrder, Tally
from controller.requests.queue import CentralQueue
from controller.requests.record import RequestRecord, record_of
from controller.requests.request import Request, State, blames, had_output

INHERITED_S = 60.0
MAX_LOSSES = 4096
MAX_MADE = 16_384


class HeldLeg(NamedTuple):
    """A leg (share of a request) that `rank` still runs for the client with the key `client`; None: the rank does not
    state it."""

    rank: Rank
    attempt: Attempt
    client: str | None


class Losses(NamedTuple):
    """Losses of a failed request that had `offset` output tokens: how often a rank died under it, whether no token came
    after the last time, and the processes that those ranks were of."""

    offset: int
    times: int
    was_last: bool
    processes: tuple[Hashable, ...]


class RequestTable:
    """The table. `requests` by rid; `queue` holds those that wait; `payload_bytes` is the sum of all payloads;
    `orphans` is what nodes still run of a former controller's dispatches; `history` has the last requests that have
    ended."""

    def __init__(
        self, config: ControllerConfig, now: float, orders: Callable[[Role], bool] = lambda role: False
    ) -> None:
        self._config = config
        self._orders = orders
        self._rooms: dict[tuple[str, int, Role], Rid] = {}
        self._of_client: dict[Any, int] = {}
        self._losses: OrderedDict[Rid, Losses] = OrderedDict()
        # of requests that failed of late, were tried again here, or were cancelled as inherited ones: the last attempt
        self._made: dict[Rid, Attempt] = {}
        self._due: TimerSlots[Rid | Rank] = TimerSlots(now)
        self.requests: dict[Rid, Request] = {}
        self.queue = CentralQueue(
            max_requests=config.queue_requests,
            max_bytes=config.queue_bytes,
            order=self._order,
        )
        self.orphans = OrphanedLegs(self._due)
        self.payload_bytes = 0
        self.history: History[RequestRecord] = History(RequestRecord, config.trace_bytes)

    def reconfigure(self, config: ControllerConfig) -> None:
        """Apply new settings. Requests that wait already stay."""
        self._config = config
        self.queue.max_requests = config.queue_requests
        self.history.limit(config.trace_bytes)

    def check(self, request: Request, live: Request | None) -> None:
        """Raise Refusal when `request` does not fit beside what is alive; `live` is the one that it would replace."""
        for place in request.places:
            holder = self._rooms.get(place)
            if holder is not None and holder != request.rid:
                raise Refusal("duplicate_room", f"bootstrap_room {place[1]} belongs to a live request")
        config = self._config
        kept = self.payload_bytes - (0 if live is None else live.frames_bytes)
        if kept + request.frames_bytes > config.payload_bytes:
            raise Refusal("overloaded", "the prompts that wait here take all the memory there is for them")
        owner = request.client or request.peer
        one_more = live is None or (live.client or live.peer) != owner
        if one_more and self._of_client.get(owner, 0) >= config.client_requests:
            raise Refusal("too_many", f"this client has {config.client_requests} requests outstanding")
        if live is None and len(self.requests) >= config.max_requests:
            raise Refusal("overloaded", f"{config.max_requests} requests are alive here")

    def add(self, request: Request) -> None:
        """Add a request. Where a request with its rid failed here of late, or was tried again, this one begins with a
        new attempt number, also if it is the same one that its client says again: ranks remember what became of an
        attempt, and say so if it comes again. Its client need not know how many were made here."""
        rid = request.rid
        self.requests[rid] = request
        if rid in self._made:
            request.attempt = max(request.attempt, min(self._made[rid] + 1, MAX_ATTEMPT))
        for place in request.places:
            self._rooms[place] = rid
        self._enter(request)
        self.payload_bytes += request.frames_bytes
        if request.deadline_at is not None:
            self._due.add(rid, request.deadline_at)
        if rid in self._losses:
            losses = self._losses.pop(rid)
            if losses.offset == request.submit.offset:  # no token since: it may be what kills them
                request.losses, request.lost_with = losses.times, losses.processes
            elif losses.offset < request.submit.offset:  # its last rank died after its last token
                request.losses = int(losses.was_last)

    def move(self, request: Request, peer: Any) -> None:
        """Move a request to its client's new connection."""
        self._leave(request)
        request.peer = peer
        self._enter(request)

    def release_payload(self, request: Request) -> None:
        """Drop the request's payload, which is not needed again."""
        self.payload_bytes -= request.frames_bytes
        request.frames, request.frames_bytes = (), 0

    def remove(
        self, request: Request, now: float, code: Code = "ok", why: str = "", *, failed: bool = False
    ) -> RequestRecord:
        """Remove a request that ended with `code`, and return its record, which stays. If it `failed`, the ranks
        that it lost are remembered, in case its client sends it again, as are those of one that its client sends again
        while it lives; so are tries that a client of its rid may not know."""
        if request.lane is not None:
            self.queue.remove(request)
        request.step("over")
        del self.requests[request.rid]
        for place in request.places:
            del self._rooms[place]
        self._leave(request)
        if request.frames:
            self.release_payload(request)
        if request.deadline_at is not None:
            self._due.remove(request.rid, request.deadline_at)
        if failed or request.attempt > request.submit.attempt or request.rid in self._made:
            self._remember(request, code)
        record = record_of(request, now, code, why)
        self.history.add(record)
        return record

    def gave_up(self, rid: Rid, attempt: Attempt) -> None:
        """Note that this attempt of `rid` is over, or is to end, while its rank may still speak of it."""
        attempt = max(attempt, self._made.pop(rid, 0))
        self._made[rid] = attempt  # at the end of the order
        if len(self._made) > MAX_MADE:
            del self._made[next(iter(self._made))]

    def blame(self, rid: Rid, offset: int, attempt: Attempt, process: Hashable) -> None:
        """Record that a rank of `process` has died with this attempt of `rid`, which may have ended: that counts for
        this `offset`. 0: a token may have come since."""
        request = self.requests.get(rid)
        if request is not None:
            if request.submit.offset == offset:
                request.losses += blames(request, process)
                request.lost_at = attempt or request.lost_at
            return
        before = self._losses.get(rid)
        if before is None or before.offset != offset:
            before = Losses(offset, 0, False, ())
        if process not in before.processes:
            last, processes = attempt > 0 or before.was_last, (*before.processes, process)
            self._keep_losses(rid, Losses(offset, before.times + 1, last, processes))

    def records(self, rid: Rid) -> list[RequestRecord]:
        """Return the records of the request with this rid, the oldest first: those that are kept, and the live one."""
        live = self.requests.get(rid)
        return self.history.of(rid) + ([record_of(live)] if live is not None else [])

    def named(self, beginning: str, most: int) -> list[Rid]:
        """Return at most `most` rids that begin with `beginning`: the live ones first, and the newest first."""
        live = [rid for rid in reversed(self.requests) if rid.startswith(beginning)]
        return list(dict.fromkeys(live + self.history.named(beginning, most)))[:most]

    def kept(self, now: float) -> tuple[int, float]:
        """Return the number of records of ended requests, and the seconds since the oldest of these ended (0: there is
        none)."""
        oldest = self.history.oldest
        return len(self.history), max(0.0, now - oldest.ended_at) if oldest is not None else 0.0

    def overdue(self, now: float) -> list[Request]:
        """Return the requests past their deadline, each once; they are not removed. Also forget inherited work that was
        not asked for in time."""
        requests = []
        for key in self._due.take(now):
            if isinstance(key, Rank):
                self.orphans.forget(key)
            else:
                request = self.requests[key]
                request.deadline_at = None  # it is not among the due times any more
                requests.append(request)
        return requests

    def validate(self) -> None:
        """Check that every sum and map follows its definition (tests call this after each event)."""
        self.queue.validate()
        live = self.requests.values()
        assert {request.rid for request in self.queue} == {r.rid for r in live if r.state is State.QUEUED}
        assert self.payload_bytes == sum(request.frames_bytes for request in live)
        assert self._of_client == Counter(request.client or request.peer for request in live)
        assert len(self._due) == sum(request.deadline_at is not None for request in live) + self.orphans.ranks
        assert self._rooms == {place: request.rid for request in live for place in request.places}

    def _order(self, lane: Lane, tally: Tally) -> ArrivalOrder[Request]:
        """Return the order of what will wait in a lane."""
        if self._orders(lane.roles[0]):
            return PolicyOrder(self._config.overtake_tokens, tally)
        if self._config.queue_order == "slo":
            return SloOrder(self._config.overtake_tokens, tally)
        return ArrivalOrder(tally)

    def _remember(self, request: Request, code: Code) -> None:
        """Keep what a later submit under this rid has to know of the request, which is over."""
        if request.tries:
            self.gave_up(request.rid, request.attempt)
        if request.losses and code != "ok":
            last = request.lost_at > 0 and (request.lost_at == request.attempt or not had_output(request))
            losses = Losses(request.submit.offset, request.losses, last, request.lost_with)
            self._keep_losses(request.rid, losses)

    def _keep_losses(self, rid: Rid, losses: Losses) -> None:
        self._losses[rid] = losses
        if len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)

    def _enter(self, request: Request) -> None:
        """Count the request for the limits: by key, over all its connections, or without keys by connection."""
        client = request.client or request.peer
        self._of_client[client] = self._of_client.get(client, 0) + 1

    def _leave(self, request: Request) -> None:
        client = request.client or request.peer
        left = self._of_client[client] - 1
        if left:
            self._of_client[client] = left
        else:
            del self._of_client[client]


class OrphanedLegs:
    """The legs that nodes still run of a former controller's dispatches, by rid, so that a resubmit does not run twice.

    It is filled by the first hello of each start of a rank, and emptied by resubmits, cancels, time, and lost ranks.
    """

    def __init__(self, due: TimerSlots[Rid | Rank]) -> None:
        self._due = due
        self._held: dict[Rid, list[HeldLeg]] = {}
        self._of_rank: dict[Rank, tuple[float, tuple[tuple[Rid, Attempt], ...]]] = {}  # until when, and what

    def __len__(self) -> int:
        return len(self._held)

    @property
    def ranks(self) -> int:
        """The number of ranks with inherited work."""
        return len(self._of_rank)

    def register(self, rank: Rank, now: float) -> None:
        """Record what `rank` ran when it introduced itself; a later hello may list work that I dispatched."""
        running, rank.inherited = rank.inherited, ()
        if not running:
            return
        until = now + INHERITED_S
        self._of_rank[rank] = until, running
        self._due.add(rank, until)
        whose: list[str | None] = []
        for client, count in rank.load.info.clients:
            whose += [client] * min(count, len(running) - len(whose))
        whose += [None] * (len(running) - len(whose))
        for at, (rid, attempt) in enumerate(running):
            self._held.setdefault(rid, []).append(HeldLeg(rank, attempt, whose[at]))

    def of(self, rid: Rid, client: str) -> list[HeldLeg]:
        """Return what runs under `rid` and may be this client's; empty: nothing. Raises Refusal where all of it belongs
        to other clients."""
        held = self._held.get(rid)
        if held is None:
            return []
        mine = [leg for leg in held if leg.client in (None, client)]
        if not mine:
            raise Refusal("duplicate_rid", "the rid belongs to another live request")
        return mine

    def claim(self, rid: Rid, client: str | None) -> list[HeldLeg]:
        """Return what runs under `rid` and may be this client's (None: of every client), and forget it."""
        held = self._held.pop(rid, [])
        others = [leg for leg in held if client is not None and leg.client not in (None, client)]
        if others:
            self._held[rid] = others
        return [leg for leg in held if leg not in others]

    def overtaken(self, rank: Rank, rid: Rid, client: str, attempt: Attempt) -> list[HeldLeg]:
        """Return what `rank` runs under `rid` in `attempt` or an older one and may be this client's, and forget it."""
        held = self._held.get(rid, [])
        legs = [leg for leg in held if leg.rank is rank and leg.attempt <= attempt and leg.client in (None, client)]
        if legs:
            left = [leg for leg in held if leg not in legs]
            if left:
                self._held[rid] = left
            else:
                del self._held[rid]
        return legs

    def forget(self, rank: Rank) -> None:
        """Forget what the rank ran: it is lost, or was not asked for."""
        until, running = self._of_rank.pop(rank, (0.0, ()))
        if running:
            self._due.remove(rank, until)
        for rid, _ in running:
            left = [leg for leg in self._held.pop(rid, []) if leg.rank is not rank]
            if left:
                self._held[rid] = left
