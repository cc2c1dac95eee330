"""An attempt (a try) of a request, from its placing to its withdrawal: its legs (a leg is one rank's share: prefill,
decode, or unified: both), and the messages to their ranks and its client.

This module owns the legs. `controller.balancer` chooses their ranks, and `controller.requests.life` decides what
becomes of the request. Pure: messages to send are appended to `out`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from bus.actions import Note
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_ATTEMPT,
    Accepted,
    Attempt,
    CancelLeg,
    Dispatch,
    Ended,
    Location,
    MemberKey,
    ReadBack,
    Rid,
    Role,
)
from controller.balancer import Balancer
from controller.events import Action, ToClient, ToNode
from controller.load.rank import RankLoad
from controller.rank import Rank
from controller.requests.lanes import Lane
from controller.requests.request import ROLES, LegRun, LegState, Request, State, about_of
from controller.requests.table import HeldLeg, RequestTable


class Attempts:
    """The attempts of the requests in `table`, at the `ranks` of `balancer`. Dispatches are numbered under `epoch`, the
    number of this controller's start. `by_tick`: waiting requests are dispatched with ticks alone; `trace`: each
    dispatch has a log line."""

    def __init__(
        self, epoch: int, table: RequestTable, balancer: Balancer, ranks: Mapping[RankLoad, Rank], counts: Counter[str]
    ) -> None:
        self._epoch = epoch
        self._ranks = ranks
        self._table = table
        self._balancer = balancer
        self._loads = balancer.table
        self._counts = counts
        self._apart: list[Request] = []  # dispatched as such; may be over
        self.by_tick = False  # what waits is dispatched with ticks alone
        self.trace = False  # a log line for each

    # --- begin ------------------------------------------------------------------------------------------------

    def known(self, keys: Iterable[MemberKey]) -> tuple[RankLoad, ...]:
        """Return the ranks with these keys, without those that are not here."""
        ranks = self._loads.ranks
        return tuple([ranks[key] for key in keys if key in ranks])

    def lane(self, request: Request) -> Lane:
        """Return the lane in which the request waits, if it waits."""
        lane = self._balancer.lane(request.submit, request.model, request.avoid)
        return lane._replace(apart=True) if request.apart else lane

    def place(self, request: Request, now: float, out: list[Action]) -> bool:
        """Dispatch `request` if its legs have ranks, and send its client Accepted with these; return false if it must
        wait. Raises Refusal where waiting does not help."""
        held = None
        if not request.tries and self._table.orphans and self._balancer.settled:
            held = self._table.orphans.of(request.rid, request.client)
            if held and self._adopt_orphans(request, held, now, out):
                return True
        queue = self._table.queue
        in_turn: Callable[[str], bool] | None = None
        if held or (queue.requests and request.lane is None):
            in_turn = partial(self._in_turn, request, held, out)
        barred: Container[RankLoad] = self._with_one_apart() if request.apart else ()
        request.model, legs, refusal, predicted, reasons = self._balancer.place(
            request.submit, now, request.model, request.avoid, barred, not request.tries, in_turn,
            request.first_due != inf,
        )  # fmt: skip
        if refusal is not None:
            raise refusal
        if legs:
            if predicted is not None:
                request.past += ((now, "trip", request.attempt, None, _trip_of(legs, *predicted)),)
                request.predicted_s = predicted[len(legs) - 1]
            request.step("dispatched")
            self._dispatch(request, legs, now, out)
            if reasons:
                request.past += tuple([(now, "weighed", request.attempt, role, why) for role, why in reasons])
                for leg in legs:
                    self._ranks[leg.rank].explain(request, leg)
            return True
        return False

    def _in_turn(self, request: Request, held: list[HeldLeg] | None, out: list[Action], model: str) -> bool:
        """Note that ranks of `model` can serve the request, and so end what nodes still run of it. Return true if no
        other waiting request goes before it."""
        request.model = model
        if held:
            self._fence_orphans(request, out)
        queue = self._table.queue
        return request.lane is not None or not queue.waits(self.lane(request), competing=self.by_tick)

    def _with_one_apart(self) -> set[RankLoad]:
        """Return the ranks with a request that is `apart` and has no token yet."""
        self._apart = [request for request in self._apart if request.state is State.RUNNING]
        return {leg.rank for request in self._apart for leg in request.legs if leg.state is LegState.RUNNING}

    def _dispatch(self, request: Request, legs: tuple[LegRun, ...], now: float, out: list[Action]) -> None:
        submit = request.submit
        if request.lane is not None:
            self._table.queue.remove(request, served=True)
        if request.apart:
            self._apart.append(request)
        request.tries += 1
        request.legs = legs
        prefill: Location | None = None
        for leg in legs:
            role, load = leg.role, leg.rank
            rank = self._ranks[load]
            rank.work[submit.rid] = request, leg
            frames = request.frames
            if role == "decode":
                if not load.info.wants_prompt:
                    frames = frames[1:]
                if submit.leg == "decode":
                    prefill = self._prefill_of(request)
            out.append(ToNode(rank.peer, self._header(request, leg, prefill, now), frames))
            if role == "prefill":
                prefill = load.location
        self._counts["redispatched" if request.dispatched else "dispatched"] += 1
        request.dispatched = True
        self.accept(request, out)
        if self.trace:
            out.append(Note("request.dispatched", "debug", about_of(request)))

    def reattach(self, request: Request, peer: Any, out: list[Action]) -> None:
        """Answer a repeated submit of a live request, which may come over another connection (`peer`), so that its
        client does not take this controller for dead."""
        self._counts["reattached"] += 1
        self._table.move(request, peer)
        self.accept(request, out)

    def accept(self, request: Request, out: list[Action]) -> None:
        """Send the client `Accepted`, with the ranks where the request runs; without ranks while it waits."""
        prefill = decode = None
        for leg in request.legs:
            if leg.role == "prefill":
                prefill = leg.rank.location
            else:
                decode = leg.rank.location
        accepted = Accepted(request.rid, request.attempt, request.submit.bootstrap_room, prefill, decode)
        out.append(ToClient(request.peer, accepted))

    def _header(self, request: Request, leg: LegRun, prefill: Location | None, now: float) -> Dispatch:
        """Return the dispatch of one leg. `prefill` is the place of its prefill for a decode leg; without it a lone
        decode leg gets the caller's fields, for the node to look up."""
        submit = request.submit
        lone = submit.leg == "decode"
        return Dispatch(
            submit.rid,
            request.attempt,
            leg.role,
            leg.rank.key[1],
            self._epoch,
            leg.number,
            leg.charge,
            submit.prompt_tokens,
            submit.max_tokens,
            submit.offset,
            submit.bootstrap_room,
            prefill,
            submit.prefill_instance if lone else "",
            submit.disagg_prefill_dp_rank if lone else None,
            0.0 if request.deadline_at is None else max(0.001, request.deadline_at - now),
            0 if request.client else submit.priority,  # a client's word, which counts among its own requests
            request.client,
            submit.continue_on_disconnect,
            request.trace,
            submit.pair_attempt,
            ReadBack(request.legs[-1].rank.location, leg.read) if leg.read else None,
        )

    def _prefill_of(self, request: Request) -> Location | None:
        """Return the place of a lone decode leg's prefill as the caller gave it, if this controller knows that rank."""
        submit = request.submit
        if submit.disagg_prefill_dp_rank is None:
            return None
        group = self._loads.group("prefill", request.model, submit.prefill_instance)
        names = group.names()
        if len(names) != 1:
            return None
        rank = next(iter(group.instances())).get(submit.disagg_prefill_dp_rank)
        return rank.location if rank is not None and rank.ready else None

    def _adopt_orphans(self, request: Request, held: list[HeldLeg], now: float, out: list[Action]) -> bool:
        """Take over a request that nodes still run since before this controller's restart: it goes on there in its
        newest attempt, so that it does not run twice. Return false, and take over nothing, if the request is a newer
        attempt than what runs, or if the ranks of these legs could not have got it. Whether these ranks have credit
        does not matter: they run it already."""
        submit = request.submit
        attempt = max([leg.attempt for leg in held])
        newest = {leg.rank.load.info.role: leg.rank.load for leg in held if leg.attempt == attempt}
        # a unified rank runs a pair too, if its policy wants that
        roles: tuple[Role, ...] = ("unified",) if submit.leg == "pair" and "unified" in newest else ROLES[submit.leg]
        legs = tuple([(role, newest[role]) for role in roles if role in newest])
        if not legs or legs[-1][0] != roles[-1] or attempt < request.attempt:
            return False
        model = legs[-1][1].info.model
        if not all(rank.info.model == model and self._balancer.may_run(role, submit, rank) for role, rank in legs):
            return False
        self._end_orphans(request, out, [rank for _, rank in legs])
        self._counts["adopted"] += 1
        request.attempt, request.model, request.came_at = attempt, model, inf
        request.step("dispatched")
        self._dispatch(request, self._balancer.charge(submit, now, legs), now, out)
        return True

    def _fence_orphans(self, request: Request, out: list[Action]) -> None:
        """Give up what nodes still run of the request: it runs again, under a higher attempt."""
        newest = self._end_orphans(request, out)
        request.attempt = max(request.attempt, min(newest + 1, MAX_ATTEMPT))

    def fence_late(self, rank: Rank, rid: Rid, out: list[Action]) -> None:
        """End what `rank` still runs of a live request that was placed elsewhere before the rank said hello: an older
        attempt, or the same one. The KV cache of the same attempt stays: what was taken over may fetch it."""
        request = self._table.requests.get(rid)
        if request is None or not request.tries:
            return
        newest = request.attempt - (rank.load.info.role == "prefill")
        for leg in self._table.orphans.overtaken(rank, rid, request.client, newest):
            room = request.submit.bootstrap_room
            out.append(rank.cancels(CancelLeg(rid, leg.attempt, "fenced", client=request.client, room=room)))

    def _end_orphans(self, request: Request, out: list[Action], but_at: Sequence[RankLoad] = ()) -> Attempt:
        """End what runs of the request, except at these ranks, unless it is another key's. Return the newest
        attempt."""
        newest, room = 0, request.submit.bootstrap_room
        for leg in self._table.orphans.claim(request.rid, request.client):
            newest = max(newest, leg.attempt)
            if leg.rank.load not in but_at:
                cancel = CancelLeg(request.rid, leg.attempt, "fenced", client=request.client, room=room)
                out.append(leg.rank.cancels(cancel))
        return newest

    # --- end --------------------------------------------------------------------------------------------------

    def ended(self, leg: LegRun, request: Request, end: Ended | None = None, now: float = 0.0) -> bool:
        """End a leg and take its charge back: `end` is its rank's report; None: it is lost, or withdrawn. Return true
        if it ended well. Sends nothing."""
        del self._ranks[leg.rank].work[request.rid]
        ok = self._balancer.ended(leg, request.submit, end, now)
        leg.step("done" if ok else "given up")
        return ok

    def undo(self, leg: LegRun, request: Request) -> None:
        """Take back a leg whose dispatch never left this process: its rank never got it."""
        leg.step("given up")
        del self._ranks[leg.rank].work[request.rid]
        self._balancer.unsent(leg, request.submit)

    def cancel(self, request: Request, code: Code, out: list[Action], *, if_unfetched: bool = False) -> None:
        """Send a cancel with the reason `code` to the ranks of the legs that still run; they stay counted until they
        end. `if_unfetched`: only where the KV cache was not fetched yet."""
        for leg in request.legs:
            if leg.state is LegState.RUNNING:
                room = request.submit.bootstrap_room
                cancel = CancelLeg(request.rid, request.attempt, code, if_unfetched=if_unfetched, room=room)
                out.append(self._ranks[leg.rank].cancels(cancel))

    def withdraw(self, request: Request, code: Code, out: list[Action]) -> None:
        """Cancel the legs that still run, and end them here at once."""
        self.cancel(request, code, out)
        for leg in request.legs:
            if leg.state is LegState.RUNNING:
                self._ranks[leg.rank].gives_up(request)
                self.ended(leg, request)

    def counts_once(self, rid: Rid, attempt: Attempt, legs: Iterable[LegRun]) -> None:
        """Note that this attempt of `rid`, which has lost a rank with one of its `legs`, kills none with another."""
        for leg in legs:
            if leg.rank in self._ranks:
                self._ranks[leg.rank].given_up.pop((rid, attempt), None)

    def unanswered(self, rid: Rid) -> bool:
        """Return true if a rank has not yet said the end of a leg of `rid` that was given up there. O(ranks)."""
        return any(rid == each for rank in self._ranks.values() for each, _ in rank.given_up)

    def validate(self, live: Iterable[Request]) -> None:
        """Check that ranks and requests agree on what runs (tests call this after each event)."""
        running = [(leg, r) for r in live for leg in r.legs if leg.state is LegState.RUNNING]
        assert all(self._ranks[leg.rank].work.get(request.rid) == (request, leg) for leg, request in running)
        for load, rank in self._ranks.items():
            mine = [leg for leg, _ in running if leg.rank is load]
            assert load.outstanding == len(mine) == len(rank.work), rank
            assert load.outstanding_tokens == sum(leg.charge for leg in mine), rank


def _trip_of(legs: tuple[LegRun, ...], here_s: float, pair_s: float) -> str:
    """Return how a pair's prompt travels, and the predictions (seconds until the first token) that decided it."""
    trip = "a pair" if len(legs) > 1 else "at decode"
    if legs and legs[0].read:
        trip += f" that reads {legs[0].read} tokens back"
    return f"{trip}; predicted: {here_s:.3f} s at decode, {pair_s:.3f} s as a pair"


def work_of(rank: Rank, rid: Rid, attempt: Attempt) -> tuple[Request, LegRun] | None:
    """Return the live leg of this attempt at `rank`, with its request; None: there is none."""
    work = rank.work.get(rid)
    return work if work is not None and work[0].attempt == attempt else None
