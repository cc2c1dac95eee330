"""The losses of ranks, and dispatches that never reached one: what becomes of their requests. Pure.

This module owns what is known of ranks that died with requests (`controller.requests.unclear`, and each request's
`losses`). `controller.requests.life` decides whether a request that lost a leg is tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from bus.wire.codes import Code, Refusal
from bus.wire.messages import MAX_ATTEMPT, Attempt, CancelLeg, Dispatch, Rid
from controller.balancer import Balancer
from controller.config import ControllerConfig
from controller.events import Action, ToNode
from controller.members import Loss
from controller.rank import Rank
from controller.requests.attempts import Attempts, work_of
from controller.requests.request import LegRun, Request, State, blames, had_output
from controller.requests.table import RequestTable
from controller.requests.unclear import MAX_UNTOLD, Unclear

Failed: TypeAlias = Callable[[Request, LegRun, Code, str, float, list[Action]], None]


class Losses:
    """Handles lost ranks for the requests in `table`. It calls `failed` with a leg that has failed and the reason, and
    `again` with a leg whose request must be dispatched once more. Methods append messages to `out`."""

    def __init__(
        self, config: ControllerConfig, table: RequestTable, balancer: Balancer, attempts: Attempts,
        counts: Counter[str], failed: Failed, again: Failed,
    ) -> None:  # fmt: skip
        self._config = config
        self._table = table
        self._balancer = balancer
        self._attempts = attempts
        self._counts = counts
        self._failed = failed
        self._again = again
        self.unclear = Unclear()
        self._unqueued: dict[tuple[Any, Rid], CancelLeg] = {}  # by connection

    def reconfigure(self, config: ControllerConfig) -> None:
        """Apply new settings from now on."""
        self._config = config

    def lost(self, loss: Loss, now: float, out: list[Action]) -> None:
        """Handle work that is lost with a rank or its connection: each request is tried again, or fails."""
        rank = loss.rank
        if loss.died:
            rank.dead = True
            for rid, (offset, attempt) in self.unclear.settle(rank).items():
                self._table.blame(rid, offset, attempt, rank.process)
        if loss.work is None:
            self._may_have_died(loss)
        lost = rank.work if loss.work is None else loss.work
        for rid, (request, leg) in list(lost.items()):
            if work_of(rank, rid, request.attempt) is None or rank.work[rid][1] is not leg:
                continue  # it has ended, or is given up already
            self._counts["legs_lost"] += 1
            if loss.cancel:
                room = request.submit.bootstrap_room
                out.append(rank.cancels(CancelLeg(rid, request.attempt, "fenced", room=room)))
            else:
                self.unclear.untold(rid, request.attempt, request.submit.bootstrap_room)
            self._attempts.ended(leg, request)
            if loss.died:
                request.losses += blames(request, loss.of)
                request.lost_at = request.attempt
                self.unclear.passed(rid, request.attempt)
            elif loss.died is None:
                request.lost_at = 0
                self.unclear.lost(rank, rid, request.submit.offset, request.attempt)
            legs, attempt = request.legs, request.attempt
            self._failed(request, leg, "peer_lost", loss.why, now, out)
            if loss.died is not False:
                self._attempts.counts_once(rid, attempt, legs)

    def _may_have_died(self, loss: Loss) -> None:
        """Blame the rank's death also on requests that were given up there, where it has not said so."""
        newest = {rid: (offset, attempt) for (rid, attempt), offset in loss.rank.given_up.items()}  # it dies once
        for rid, (offset, attempt) in newest.items():
            if loss.died:
                self._table.blame(rid, offset, attempt, loss.of)
            elif loss.died is None:
                self.unclear.lost(loss.rank, rid, offset, attempt)
        loss.rank.given_up.clear()

    def unsent(self, rank: Rank, dispatch: Dispatch, now: float, out: list[Action]) -> None:
        """Take back a dispatch whose connection was gone: it never happened, counts as no try, and the request is
        dispatched again."""
        work = work_of(rank, dispatch.rid, dispatch.attempt)
        if work is None:
            return
        request, leg = work
        self._counts["undelivered"] += 1
        self._attempts.undo(leg, request)
        sentence = f"rank {rank.key[0]}/{rank.key[1]} lost its connection"
        if request.state is not State.RUNNING or request.attempt >= MAX_ATTEMPT:
            self._failed(request, leg, "peer_lost", sentence, now, out)
            return
        request.tries -= 1
        self._again(request, leg, "peer_lost", sentence, now, out)

    def unqueued(self, peer: Any, cancel: CancelLeg) -> None:
        """Remember a cancel that the queue of the connection `peer` did not take; `remind` sends it again."""
        if not cancel.if_unfetched and len(self._unqueued) < MAX_UNTOLD:
            self._unqueued[peer, cancel.rid] = cancel

    def remind(self, out: list[Action]) -> None:
        """Send the cancels again that no queue took, but of attempts that were submitted again meanwhile."""
        unqueued, self._unqueued = self._unqueued, {}
        for (peer, rid), cancel in unqueued.items():
            live = self._table.requests.get(rid)
            if live is None or live.attempt > cancel.attempt or live.submit.bootstrap_room != cancel.room:
                out.append(ToNode(peer, cancel))

    def returned(self, rank: Rank, running: Iterable[tuple[Rid, Attempt]], now: float, out: list[Action]) -> None:
        """Note that a start of a rank said hello, so it has not died; cancel what it runs and was given up. What it
        runs for a former controller can be adopted from now on, or ends, if the request was placed elsewhere by now."""
        rank.lives()
        self.unclear.settle(rank)
        given_up = {
            (rid, attempt): CancelLeg(rid, attempt, "fenced", room=room)
            for rid, attempt, room in self.unclear.given_up(running)
        }
        for rid, attempt in running:
            cancel = rank.cancelled.get((rid, attempt))  # lost with the connection, if the leg still runs
            if cancel is not None and work_of(rank, rid, attempt) is None:
                given_up[rid, attempt] = CancelLeg(rid, attempt, "fenced", client=cancel.client, room=cancel.room)
        out += [ToNode(rank.peer, given_up[leg]) for leg in running if leg in given_up]
        self._table.orphans.register(rank, now)
        for rid, _ in running:
            self._attempts.fence_late(rank, rid, out)

    def rank_lives(self, rank: Rank) -> None:
        """Note that a rank that is not ready has said something, so it has not died, also where it was lost."""
        rank.lives()
        self.unclear.settle(rank)

    def forget(self, rank: Rank) -> None:
        """Forget what a lost rank ran for a former controller: it cannot be adopted any more."""
        self._table.orphans.forget(rank)

    def undelivered(self, rank: Rank, dispatch: Dispatch, now: float, out: list[Action]) -> None:
        """Take back a dispatch that could not be queued for its node: it never happened, also if its leg was given up
        before it could be sent. The leg fails with the code `overloaded`."""
        self._counts["undelivered"] += 1
        work = work_of(rank, dispatch.rid, dispatch.attempt)
        if work is None:
            self._balancer.unsent_late(rank.load, dispatch.charge)
        else:
            request, leg = work
            self._attempts.undo(leg, request)
            sentence = f"rank {rank.key[0]}/{rank.key[1]} takes no more messages"
            self._failed(request, leg, "overloaded", sentence, now, out)

    def check(self, request: Request) -> None:
        """Mark a new request (`apart`) that may kill ranks. Raises Refusal for one that has killed too many, or may
        have: that is known within a lease (the time after which a silent rank is lost)."""
        self.unclear.begins(request.rid, request.attempt)
        self.unclear.resumes(request.rid, request.submit.offset)
        attempts = self._config.attempts
        if request.losses >= attempts:
            raise Refusal("poison", f"{request.losses} ranks were lost with it")
        if self.of(request) >= attempts:
            raise Refusal("peer_lost", "whether its ranks died of it is not known yet")
        request.apart = self.is_apart(request)

    def over(self, request: Request) -> None:
        """Note the end of a submit: a loss after which it had a token was not its last one."""
        if had_output(request):
            self.unclear.passed(request.rid, request.attempt)

    def of(self, request: Request) -> int:
        """Return how many ranks have died with the request, or may have. Where one more is one too many, that may be
        one which has not yet said the end of a leg that was given up there."""
        count = request.losses + self.unclear.count(request.rid, request.submit.offset, request.lost_with)
        return count + (count == self._config.attempts - 1 and self._attempts.unanswered(request.rid))

    def is_apart(self, request: Request) -> bool:
        """Return true if one more lost rank makes the request poison. Then it must not share a rank with another
        such request. The first loss does not count alone, or else all requests of one lost rank would wait."""
        return self.of(request) >= max(2, self._config.attempts - 1)
