"""An attempt of a request, from its placing to its withdrawal: which ranks get its legs, and what they are told.

Owns the legs and what is charged for them; what becomes of a request, and what its client hears, is for
`controller.requests.life`. Pure: what must be sent is appended to `out`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from math import inf

from bus.wire.codes import Code
from bus.wire.messages import Attempt, CancelLeg, Dispatch, Ended, Location, MemberKey, Rid, Role
from controller.events import Action, ToNode
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.placement import Placement
from controller.requests.lanes import Lane
from controller.requests.request import MAX_ATTEMPT, ROLES, LegRun, LegState, Request, State
from controller.requests.table import HeldLeg, RequestTable


class Attempts:
    """Of the requests in `table`, at the ranks of `loads`. Dispatches are numbered under `epoch`."""

    def __init__(
        self, epoch: int, table: RequestTable, loads: LoadTable, placement: Placement, counts: Counter[str]
    ) -> None:
        self._epoch = epoch
        self._table = table
        self._loads = loads
        self._placement = placement
        self._learns = placement.learns
        self._counts = counts
        self._apart: list[Request] = []  # dispatched as such; may be over
        self.by_tick = False  # what waits is dispatched with ticks alone

    # --- begin ------------------------------------------------------------------------------------------------

    def known(self, keys: Iterable[MemberKey]) -> tuple[RankLoad, ...]:
        """The ranks that are meant, those that are not here left out."""
        ranks = self._loads.ranks
        return tuple([ranks[key] for key in keys if key in ranks])

    def lane(self, request: Request) -> Lane:
        """Where it waits, if it does."""
        lane = self._placement.lane(request.submit, request.model, request.avoid)
        return lane._replace(apart=True) if request.apart else lane

    def place(self, request: Request, now: float, out: list[Action]) -> bool:
        """Dispatch `request` if its legs have ranks; False: it waits. Raises Refusal where waiting does not help."""
        submit = request.submit
        roles = ROLES[submit.leg]
        if not request.tries:
            held = self._table.inherited.of(submit.rid, request.client)
            if held and self._adopt(request, held, now, out):
                return True
            for role in roles:
                request.model = self._placement.check(role, submit, request.model)
            if held:
                self._disown(request, out)
        queue = self._table.queue
        if queue.requests and request.lane is None and queue.waits(self.lane(request), competing=self.by_tick):
            return False
        chosen: list[tuple[Role, RankLoad]] = []
        prefill: RankLoad | None = None
        barred: Container[RankLoad] = self._with_one_apart() if request.apart else ()
        for role in roles:
            rank = self._placement.place(role, submit, request.avoid, request.model, prefill, barred)
            if rank is None:
                return False
            chosen.append((role, rank))
            prefill = rank
        self._dispatch(request, chosen, now, out)
        return True

    def _with_one_apart(self) -> set[RankLoad]:
        """The ranks with a request that is `apart` and has no token yet."""
        self._apart = [request for request in self._apart if request.state is State.RUNNING]
        return {leg.rank for request in self._apart for leg in request.legs if leg.state is LegState.RUNNING}

    def _dispatch(self, request: Request, chosen: list[tuple[Role, RankLoad]], now: float, out: list[Action]) -> None:
        submit = request.submit
        if request.lane is not None:
            self._table.queue.remove(request, served=True)
        request.step("dispatched")
        request.tries += 1
        if request.apart:
            self._apart.append(request)
        last = chosen[-1][0]
        prefill: Location | None = None
        for role, rank in chosen:
            charge = self._placement.charge(role, rank, submit)
            leg = LegRun(role, rank, charge, now, role == last)
            request.legs += (leg,)
            rank.work[submit.rid] = request, leg
            number = self._loads.charge(rank, charge)
            self._placement.dispatched(role, rank, submit, now)
            frames = request.frames
            if role == "decode":
                if not rank.info.wants_prompt:
                    frames = frames[1:]
                if submit.leg == "decode":
                    prefill = self._prefill_of(request)
            out.append(ToNode(rank.peer, self._header(request, leg, number, prefill, now), frames))
            if role == "prefill":
                prefill = rank.location
        self._counts["redispatched" if request.dispatched else "dispatched"] += 1
        request.dispatched = True

    def _header(self, request: Request, leg: LegRun, number: int, prefill: Location | None, now: float) -> Dispatch:
        """Of one leg. `prefill` tells a decode leg where its prefill is; without it a lone decode leg gets what its
        caller said, for the node to look up."""
        submit = request.submit
        lone = submit.leg == "decode"
        return Dispatch(
            submit.rid,
            request.attempt,
            leg.role,
            leg.rank.key[1],
            self._epoch,
            number,
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
        )

    def _prefill_of(self, request: Request) -> Location | None:
        """Where the caller says a lone decode leg's prefill ran, if this controller knows that rank."""
        submit = request.submit
        if submit.disagg_prefill_dp_rank is None:
            return None
        group = self._loads.group("prefill", request.model, submit.prefill_instance)
        names = group.names()
        if len(names) != 1:
            return None
        rank = next(iter(group.instances())).get(submit.disagg_prefill_dp_rank)
        return rank.location if rank is not None and rank.ready else None

    def _adopt(self, request: Request, held: list[HeldLeg], now: float, out: list[Action]) -> bool:
        """After my restart: a request that nodes still run goes on there in its newest attempt, rather than being run
        twice, unless it is not what they run: a newer attempt, or one that its legs' ranks could not have been given.
        Their load counts for nothing here: they need not have reported it."""
        submit = request.submit
        attempt = max([leg.attempt for leg in held])
        roles = ROLES[submit.leg]
        newest = {leg.rank.info.role: leg.rank for leg in held if leg.attempt == attempt}
        legs = [(role, newest[role]) for role in roles if role in newest]
        if not legs or legs[-1][0] != roles[-1] or attempt < request.attempt:
            return False
        model = legs[-1][1].info.model
        if not all(rank.info.model == model and self._placement.may_run(role, submit, rank) for role, rank in legs):
            return False
        self._end_inherited(request, out, [rank for _, rank in legs])
        self._counts["adopted"] += 1
        request.attempt, request.model, request.came_at = attempt, model, inf
        self._dispatch(request, legs, now, out)
        return True

    def _disown(self, request: Request, out: list[Action]) -> None:
        """What nodes still run of it is given up: it is run anew, under a higher attempt."""
        newest = self._end_inherited(request, out)
        request.attempt = max(request.attempt, min(newest + 1, MAX_ATTEMPT))

    def _end_inherited(self, request: Request, out: list[Action], but_at: Sequence[RankLoad] = ()) -> Attempt:
        """What runs of it, but at these ranks, is told to end, unless it is another key's. The newest attempt."""
        newest, room = 0, request.submit.bootstrap_room
        for leg in self._table.inherited.take(request.rid, request.client):
            newest = max(newest, leg.attempt)
            if leg.rank not in but_at:
                cancel = CancelLeg(request.rid, leg.attempt, "fenced", client=request.client, room=room)
                out.append(ToNode(leg.rank.peer, cancel))
        return newest

    # --- end --------------------------------------------------------------------------------------------------

    def over(self, leg: LegRun, request: Request, ended: Ended | None = None, now: float = 0.0) -> None:
        """`ended` is what its rank said; None: it is given up."""
        ok = ended is not None and ended.code == "ok"
        if ok:
            leg.step("done")
            leg.ended = ended
        else:
            leg.step("given up")
        del leg.rank.work[request.rid]
        self._loads.end(leg.rank, leg.charge, ok=ok)
        if self._learns:
            self._learn(leg, request, ended, now)

    def undo(self, leg: LegRun, request: Request, now: float) -> None:
        """Its dispatch never left this process."""
        self._loads.undo(leg.rank, leg.charge)
        leg.step("given up")
        del leg.rank.work[request.rid]
        self._learn(leg, request, None, now)

    def cancel(self, request: Request, code: Code, out: list[Action], *, if_unfetched: bool = False) -> None:
        """Tell the ranks of the legs that still run."""
        for leg in request.legs:
            if leg.state is LegState.RUNNING:
                room = request.submit.bootstrap_room
                cancel = CancelLeg(request.rid, request.attempt, code, if_unfetched=if_unfetched, room=room)
                out.append(ToNode(leg.rank.peer, cancel))

    def withdraw(self, request: Request, code: Code, out: list[Action]) -> None:
        """Cancel the legs that still run, and count them no more."""
        self.cancel(request, code, out)
        for leg in request.legs:
            if leg.state is LegState.RUNNING:
                self.over(leg, request)

    def validate(self, live: Iterable[Request]) -> None:
        """Ranks and requests agree on what runs (tests call this after each event)."""
        running = [(leg, r) for r in live for leg in r.legs if leg.state is LegState.RUNNING]
        assert all(leg.rank.work.get(request.rid) == (request, leg) for leg, request in running)
        for rank in self._loads.ranks.values():
            mine = [leg for leg, _ in running if leg.rank is rank]
            assert rank.outstanding == len(mine) == len(rank.work), rank
            assert rank.outstanding_tokens == sum(leg.charge for leg in mine), rank

    def _learn(self, leg: LegRun, request: Request, ended: Ended | None, now: float) -> None:
        policy = self._learns.get(leg.role)
        if policy is not None:
            policy.ended(leg.rank, request.submit, ended, 0.0 if ended is None else now - leg.began)


def work_of(rank: RankLoad, rid: Rid, attempt: Attempt) -> tuple[Request, LegRun] | None:
    """What of this attempt is live at `rank`."""
    work: tuple[Request, LegRun] | None = rank.work.get(rid)
    return work if work is not None and work[0].attempt == attempt else None
