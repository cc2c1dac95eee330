"""The reasons why legs went to their ranks: what the request would have cost at the candidates, by the method's own
measure, and what the next report of the chosen rank says of it. For `pdbus trace --why`; nothing depends on it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import NamedTuple, TypeAlias
from zlib import crc32

from bus.wire.messages import MemberKey, Rid, Role, Submit
from controller.costs import Costs
from controller.load.groups import View
from controller.load.rank import RankLoad
from controller.placement import target_of
from controller.policies import Policy
from controller.rank import Rank
from controller.requests.request import LegState, Request

KINDS = ("weighed", "acknowledged")  # of events
SHOWN = 5  # candidates, the chosen one with them
COST_S = 2e-6  # of a candidate in an explanation, about
PART = 0.02  # of the controller's time
Reasons: TypeAlias = tuple[tuple[Role, str], ...]  # of each leg, in a sentence


class Candidate(NamedTuple):
    """A rank that a method compared: what the request costs there, and how many tokens of its prompt it caches."""

    rank: MemberKey
    cost: float
    cached: int


class Weighed(NamedTuple):
    """The comparison of costs, in `unit` (plural), by which `method` chose a leg's rank among so many `candidates`:
    `shown` has the chosen rank, then those with the next costs. It is empty where the method compares no costs; `room`
    is set where it computes the rank from the request's bootstrap room. Its text is a sentence."""

    method: str
    unit: str
    candidates: int
    shown: tuple[Candidate, ...] = ()
    room: int | None = None

    def __str__(self) -> str:
        if self.room is not None:
            return f"{self.method}: the rank of bootstrap_room {self.room}"
        if not self.shown:
            return f"{self.method}, of {self.candidates} candidates; it compares no costs"
        shown = ", ".join(map(_named, self.shown))
        return f"{self.method}, in {self.unit} at {self.candidates} candidates: {shown}"


class Decisions:
    """The explanations of decisions that `policies` make with `costs`; none before `explain`."""

    def __init__(self, policies: Mapping[Role, Policy], costs: Costs) -> None:
        self._policies = policies
        self._costs = costs
        self._methods: Mapping[Role, str] = {}
        self._one_in = 0
        self.due = inf  # before that none is wanted

    def explain(self, one_in: int, methods: Mapping[Role, str]) -> None:
        """Explain the decisions for one request in `one_in` (0: for none), chosen by its rid; fewer where these would
        take more than PART of the controller's time, unless it is each. `methods`: the name of each role's method."""
        self._one_in, self._methods = one_in, methods
        self.due = 0.0 if one_in else inf

    def wanted(self, rid: Rid) -> bool:
        """Return true if the decisions for this request are to be explained."""
        return self._one_in == 1 or not crc32(rid.encode()) % self._one_in

    def forget(self, request: Request) -> None:
        """Forget why the ranks of a request were chosen that has kept its SLO, unless its rid is among those chosen."""
        if not (self._one_in and self.wanted(request.rid)):
            request.past = tuple([event for event in request.past if event[1] not in KINDS])

    def why(
        self, submit: Submit, at: Iterable[tuple[Role, RankLoad]], views: Mapping[Role, View], now: float
    ) -> Reasons:
        """Return a sentence for each leg: it goes `at` this rank, which was picked in the view of the rank's role. Call
        it before the legs are charged. O(candidates)."""
        considered = {role: list(view) for role, view in views.items()}
        if self._one_in > 1:
            self.due = now + sum(map(len, considered.values())) * COST_S / PART
        return tuple([(role, self._sentence(role, submit, rank, considered.get(rank.info.role))) for role, rank in at])

    def _sentence(self, role: Role, submit: Submit, rank: RankLoad, candidates: list[RankLoad] | None) -> str:
        if target_of(role, submit)[1] is not None:
            return "named by the caller"
        return str(self.weighed(self._methods[rank.info.role], submit, rank, candidates))

    def weighed(self, method: str, submit: Submit, rank: RankLoad, candidates: Collection[RankLoad] | None) -> Weighed:
        """Return what the policy of `rank`, whose name is `method`, compared when it chose that one for `submit` among
        `candidates` (None: it was given none). Call it before the leg is charged. O(candidates)."""
        policy = self._policies[rank.info.role]
        if candidates is None or policy.fixed:
            return Weighed(method, policy.unit, 0, (), submit.bootstrap_room)
        mine = policy.cost(rank, submit)
        if mine is None:
            return Weighed(method, policy.unit, len(candidates))
        costs = [(cost, each) for each in candidates if (cost := policy.cost(each, submit)) is not None]
        others = sorted([(cost, each.key, each) for cost, each in costs if each is not rank])[: SHOWN - 1]
        cached = self._costs.cached
        shown = [Candidate(each.key, cost, cached(each, submit)) for cost, each in
                 ((mine, rank), *((cost, each) for cost, _, each in others))]  # fmt: skip
        return Weighed(method, policy.unit, len(candidates), tuple(shown))


def _named(candidate: Candidate) -> str:
    (instance, dp_rank), cost, cached = candidate
    figure = f"{cost:,.0f}" if cost >= 100 or cost == int(cost) else f"{cost:.3g}"
    return f"{instance}/{dp_rank} {figure}" + (f" ({cached:,} cached)" if cached else "")


def acknowledged(rank: Rank, ranks: Iterable[RankLoad], now: float) -> None:
    """Add to the requests whose decision for `rank` was explained, and which its last report has acknowledged, how much
    that had besides them, and how much the least loaded of `ranks` (all known) has that could take them now."""
    load, waiting = rank.load, []
    role, model = load.info.role, load.info.model
    best: RankLoad | None = None
    for request, leg in rank.explained:
        if leg.state is not LegState.RUNNING or not any(event[1] == "weighed" for event in request.past):
            continue
        if leg.number > load.acked + load.undone:
            waiting.append((request, leg))
            continue
        best = best or min(
            (each for each in ranks if each.candidate and (each.info.role, each.info.model) == (role, model)),
            key=lambda each: each.tokens, default=load,
        )  # fmt: skip
        before = max(0, load.base_tokens - load.newly_acked_tokens)
        text = f"by its next report {before:,} tokens besides this request"
        if best is not load:
            text += f"; the least loaded, {best.key[0]}/{best.key[1]}, {best.tokens:,}"
        request.past += ((now, "acknowledged", request.attempt, leg.role, text),)
    rank.explained[:] = waiting
