"""The balancer: it chooses the ranks of all legs of a submit at once, and keeps everything that the choice depends on.
A submit is a client's request; a leg is a rank's share of it (prefill, decode, or unified: both).

It is the way from requests, load reports and caches to load table, policies and late binding. Controller, lab and the
SGLang plugin use it. It owns the order of these calls, and the charge of a leg (the tokens by which its rank's
estimated load rises); `controller.placement` knows which ranks may run a leg. Pure: time is an argument in seconds.
Requests wait elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from bus.wire.codes import MEANINGS, Refusal
from bus.wire.kv_names import Cleared, Removed, Stored
from bus.wire.messages import Ended, Hello, Load, MemberKey, Role, Submit
from controller.costs import Costs
from controller.decisions import Decisions, Reasons
from controller.late import LateBinding
from controller.load.groups import Group, Metric, View
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.placement import Placement, target_of
from controller.policies import Policy
from controller.policies.guard import overrides
from controller.requests.request import ROLES, LegRun
from controller.speeds import Speeds

Ranks: TypeAlias = tuple[tuple[Role, RankLoad], ...]  # the ranks of a request's legs


class Placed(NamedTuple):
    """The answer to a submit: all of its legs, charged, in the order of `ROLES`. Without legs the submit waits
    (`refusal` None), or is refused. `model` is the one that all its attempts run, empty while that is open.
    `predicted`: `Policy.predicted` of the decision where its prompt is computed. `reasons`: why the legs went to these
    ranks, if that is wanted of this request."""

    model: str
    legs: tuple[LegRun, ...] = ()
    refusal: Refusal | None = None
    predicted: tuple[float, float] | None = None
    reasons: Reasons = ()


class Balancer:
    """The balancer over the ranks of `table`, with one policy for each role. `late` None: requests go to ranks at once.
    `costs`: where its policies look for costs; None: at its own ranks alone. `prefill_at`: where a pair's prompt is
    computed if its decode rank could do that too: as the policy of decode ranks says, or always there.
    While not `settled` everything waits, because the ranks are not all known. While `young`, a refusal that depends on
    the known ranks is not final, since some may be missing. `suspects` are ranks that may come back at any moment: a
    request that one of them could take waits."""

    def __init__(
        self, table: LoadTable, policies: Mapping[Role, Policy], late: LateBinding | None = None, now: float = 0.0,
        costs: Costs | None = None, prefill_at: Literal["auto", "prefill", "decode"] = "auto",
    ) -> None:  # fmt: skip
        self.table = table
        self.policies = policies
        self.late = late  # None: requests go to ranks at once
        self.settled = True
        self.young = False
        self.suspects: Collection[RankLoad] = ()
        self._placement = Placement(table, policies, late)
        self.lane = self._placement.lane
        self.may_run = self._placement.may_run
        self.pick = self._placement.pick
        self._charges = _overriding("charge", policies)
        self._watches = _overriding("dispatched", policies)
        self._learns = _overriding("ended", policies)
        self._orders = _overriding("order", policies)
        self._prefills_here = _overriding("prefill_here", policies)
        self._reads_back = _overriding("read_back", policies)
        self._asks_decode = prefill_at == "decode" or (prefill_at == "auto" and "decode" in self._prefills_here)
        self._always_at_decode = prefill_at == "decode"
        self._chosen: tuple[Submit, RankLoad | None] | None = None  # the prefill rank of the pair that is placed now
        self._predicted: tuple[float, float] | None = None  # of the last trip
        self._speeds = None if late is None else late.speeds  # None: not asked for yet
        self._costs = costs = costs or Costs()
        self.decisions = Decisions(policies, costs)
        for role, policy in policies.items():
            if role != "prefill" and policy.counts_queue_only:
                table.count_queue_only(role)
            costs.add(role, table, policy.prefixes, self.speeds, partial(self._choice, role))
            policy.begin(costs)
        self.tick(now)  # what a policy expects for a while is counted from this time on

    # --- requests ---------------------------------------------------------------------------------------------

    def place(
        self, submit: Submit, now: float, model: str = "", avoid: tuple[RankLoad, ...] = (),
        barred: Container[RankLoad] = (), check: bool = True, in_turn: Callable[[str], bool] | None = None,
        explain: bool = False,
    ) -> Placed:  # fmt: skip
        """Choose and charge the ranks of all legs of `submit`, or of none. `model` is that of its earlier attempts,
        which were checked, so `check` may be False. `avoid` names ranks to avoid while there are others; the policy
        does not get those that are `barred`. `in_turn` is called before ranks are chosen, with the model that the
        request runs: False lets it wait. With `explain` its decisions are explained if there is time for any. It sends
        nothing: the caller dispatches the legs."""
        if not self.settled:
            return Placed(model)
        placement, roles, decode, decode_rank = self._placement, ROLES[submit.leg], None, None
        role, decisions, predicted, alone = roles[0], self.decisions, None, None
        views: dict[Role, View] | None = None
        if now >= decisions.due and (explain or decisions.wanted(submit.rid)):
            views = {}
        placement.considered = views
        try:
            instance, dp_rank = target_of(role, submit)
            group = self.table.group(role, model or submit.model, instance)
            if check:
                group = placement.check(role, submit, group, dp_rank)
            model = group.model
            if submit.leg == "pair":
                instance, decode_rank = target_of("decode", submit)
                decode = self.table.group("decode", model, instance)
                if check:
                    decode = placement.check("decode", submit, decode, decode_rank)
            if in_turn is not None and not in_turn(model):
                return Placed(model)
            if decode is not None and "unified" in self._prefills_here:
                alone = self._alone(submit, model, avoid, barred)
            if alone is not None:
                at: Ranks = (("unified", alone),)
            elif decode is not None and self._asks_decode and self._may_do_both(submit, decode):
                at = self._trip(submit, group, decode, avoid, barred)
                predicted = self._predicted
                if not at:
                    return Placed(model)
            else:
                first = placement.place(role, submit, group, dp_rank, decode, None, avoid, barred)
                if first is None:
                    return Placed(model)
                at = ((role, first),)
                if decode is not None:
                    second = placement.place("decode", submit, decode, decode_rank, decode, first, avoid, barred)
                    if second is None:
                        return Placed(model)
                    at = ((role, first), ("decode", second))
        except Refusal as refusal:
            return Placed(model, (), self._stands(refusal, roles))
        read = self._read_of(submit, at) if self._reads_back else 0
        if views is None:
            return Placed(model, self.charge(submit, now, at, read), None, predicted)
        reasons = decisions.why(submit, at, views, now)
        return Placed(model, self.charge(submit, now, at, read), None, predicted, reasons)

    def charge(self, submit: Submit, now: float, at: Ranks, read: int = 0) -> tuple[LegRun, ...]:
        """Charge the legs of `submit` to the ranks `at`, as `place` does after its choice, and return them. `read`: the
        prompt tokens that the prefill rank need not compute, because it reads them from the decode rank."""
        legs: tuple[LegRun, ...] = ()
        routed = submit.routed_dp_rank is not None or submit.disagg_prefill_dp_rank is not None
        for role, rank in at:
            of = rank.info.role  # whose policy it is: a decode rank runs unified legs too
            tokens = self._charges[of].charge(rank, submit) if of in self._charges else submit.prompt_tokens
            if read and role == "prefill":
                tokens = min(tokens, max(1, submit.prompt_tokens - read))
            number = self.table.charge(rank, tokens, fetches=role == "decode")
            legs += (LegRun(role, rank, tokens, number, now, role != "prefill" or submit.leg == "prefill"),)
            if routed:
                rank.routed_total += target_of(role, submit)[1] is not None
            if of in self._watches:
                self._watches[of].dispatched(rank, submit, now)
        if read:
            legs[0].read = read
        return legs

    def ended(self, leg: LegRun, submit: Submit, end: Ended | None = None, now: float = 0.0) -> bool:
        """Take the charge of a leg back at its end: `end` is its rank's report; None: it was given up. Return true if
        it ended well. The policy learns of it."""
        ok = end is not None and end.code == "ok"
        self.table.end(leg.rank, leg.charge, fetches=leg.role == "decode", ok=ok)
        of = leg.rank.info.role
        if of in self._learns:
            self._learns[of].ended(leg.rank, submit, end, 0.0 if end is None else now - leg.began)
        return ok

    def unsent(self, leg: LegRun, submit: Submit) -> None:
        """Take back the charge of a dispatch that never left this process."""
        self.table.undo(leg.rank, leg.charge, fetches=leg.role == "decode")
        of = leg.rank.info.role
        if of in self._learns:
            self._learns[of].ended(leg.rank, submit, None, 0.0)

    def unsent_late(self, rank: RankLoad, charge: int) -> None:
        """Take back the same for a leg that was ended already (`ended`) when the dispatch turned out to be unsent."""
        self.table.undo(rank, charge, given_up=True)

    def work(self, submit: Submit) -> int:
        """Return the prompt tokens that the first leg's rank must compute, as far as is known."""
        return self.policies[ROLES[submit.leg][0]].work(submit)

    def orders(self, role: Role) -> bool:
        """Return true if the policy of `role` has an order of its own for requests whose first leg has that role."""
        return role in self._orders

    def admits(self, role: Role) -> bool:
        """Return true if the policy of `role` says when a request may go to a rank."""
        return role in self._placement.admits

    def order(self, submit: Submit, work: int, now: float) -> int:
        """Return the place of a request with `work` tokens to compute in its policy's order: the least goes first."""
        return self._orders[ROLES[submit.leg][0]].order(submit, work, now)

    def prefills_here(self, rank: RankLoad, submit: Submit) -> bool:
        """Return true if the policy of `rank`, which can do both legs of a pair, wants it to."""
        role = rank.info.role
        if role == "decode" and (self._always_at_decode or not rank.info.prefills):
            return rank.info.prefills
        policy = self._prefills_here.get(role)
        return policy is not None and policy.prefill_here(rank, submit)

    def read_back(self, rank: RankLoad, prefill: RankLoad, submit: Submit) -> bool:
        """Return true if the policy of `rank`, a decode rank, wants `prefill` to read from it what it caches."""
        policy = self._reads_back.get(rank.info.role)
        return policy is not None and policy.read_back(rank, prefill, submit)

    def first_token_s(self, submit: Submit, model: str, work: int) -> float:
        """Return the seconds until the first token of a prompt with `work` tokens to compute, if it went to the least
        loaded rank now; 0 without late binding, or where nothing is known."""
        role = ROLES[submit.leg][0]
        if self.late is None or role == "decode":
            return 0.0
        group = self.table.group(role, model, target_of(role, submit)[0])
        return self.late.first_token_s(group.least(Metric.TOKENS), work)

    @property
    def held_by_wish(self) -> bool:
        """True if the request of the last `place` waits only for its wanted time per token."""
        return self.late is not None and self.late.held_by_wish

    # --- ranks ------------------------------------------------------------------------------------------------

    def opened(self, info: Hello, *, ready: bool = False) -> RankLoad:
        """Add a start of a rank, by its hello. Return its record, which replaces that of an earlier start. With
        `ready`, it may get requests at once."""
        earlier = self.table.ranks.get((info.instance, info.dp_rank))
        if earlier is not None:
            self.emptied(earlier)
        rank = self.table.open(info)
        if ready:
            self.table.set_ready(rank, True)
        return rank

    def closed(self, rank: RankLoad) -> None:
        """Remove a rank that is gone for good."""
        self.emptied(rank)
        self.table.close(rank)

    def emptied(self, rank: RankLoad) -> None:
        """Note that a rank's cache is gone, as far as is known."""
        self.policies[rank.info.role].forgotten(rank)

    def report(self, key: MemberKey, epoch: int, load: Load, now: float) -> RankLoad | None:
        """Apply a rank's load report and return its record; None for an unknown rank, another start, or an old report
        (`LoadTable.apply`)."""
        if self._speeds is not None and (rank := self.table.ranks.get(key)) is not None and rank.epoch == epoch:
            self._speeds.observe(rank, load, now)
        return self.table.apply(key, epoch, load, now)

    def speeds(self) -> Speeds:
        """Return the speeds that reports show: without late binding of those from the first call on."""
        if self._speeds is None:
            self._speeds = Speeds()
        return self._speeds

    def overwrite(self, rank: RankLoad, load: Load, now: float) -> Load:
        """Apply the load of an engine that acknowledges nothing: all that was sent there counts as ingested. Return the
        load with its number here."""
        self.table.reconnected(rank)
        rank.load_from_engine = True
        load = replace(load, seq=rank.load.seq + 1 if rank.load is not None else 1)
        self.table.apply(rank.key, rank.epoch, load, now)
        return load

    def cache(self, rank: RankLoad, changes: Sequence[Stored | Removed | Cleared]) -> None:
        """Pass changes of a rank's prefix cache to its policy."""
        policy = self.policies[rank.info.role]
        for change in changes:
            if isinstance(change, Stored):
                policy.stored(rank, change.hashes)
            elif isinstance(change, Removed):
                policy.removed(rank, change.hashes)
            else:
                policy.forgotten(rank)

    def tick(self, now: float) -> None:
        """Let time pass: reports grow old, and policies forget. Call it several times a second."""
        self.table.age(now)
        for policy in self.policies.values():
            policy.tick(now)

    # --- inside -----------------------------------------------------------------------------------------------

    @staticmethod
    def _may_do_both(submit: Submit, decode: Group) -> bool:
        """Return true if a decode rank may compute the prompt of `submit`, a pair, too: one of them can, and the caller
        names no rank."""
        return decode.facts().prefills and all(target_of(role, submit) == ("", None) for role in ROLES["pair"])

    def _trip(
        self, submit: Submit, group: Group, decode: Group, avoid: tuple[RankLoad, ...], barred: Container[RankLoad]
    ) -> Ranks:
        """Return the ranks of a pair whose decode rank may do both legs, none if it waits. Without a prefill rank the
        decode rank does both."""
        placement, refusal = self._placement, None
        try:
            first = placement.place("prefill", submit, group, None, decode, None, avoid, barred)
        except Refusal as why:
            first, refusal = None, why
        other = None if first is None else decode
        self._chosen, self._predicted = (submit, first), None
        self._costs.undecided = None if self._always_at_decode else submit
        try:
            second = placement.place("decode", submit, decode, None, other, first, avoid, barred)
            here = second is not None and self.prefills_here(second, submit)
        finally:
            self._chosen = self._costs.undecided = None
        if not self._always_at_decode:
            self._predicted = self.policies["decode"].predicted
        if here and second is not None:
            return (("unified", second),)
        if refusal is not None:
            raise refusal
        return () if first is None or second is None else (("prefill", first), ("decode", second))

    def _read_of(self, submit: Submit, at: Ranks) -> int:
        """Return the prompt tokens that a pair's prefill rank reads from its decode rank before it computes the rest:
        0 if it reads nothing."""
        if len(at) < 2:
            return 0
        (_, first), (_, second) = at
        if not (first.info.reads_back and second.info.reads_back):
            return 0
        known = self._costs.readable(second, submit)
        more = known > self._costs.cached(first, submit)
        return known if more and self.read_back(second, first, submit) else 0

    def _choice(self, role: Role, submit: Submit) -> RankLoad | None:
        """Return the rank that the policy of `role` chooses for the request now; None: it waits, or there is none."""
        if role == "prefill" and self._chosen is not None and self._chosen[0] is submit:
            return self._chosen[1]
        return self.policies[role].pick(self.table.group(role, submit.model), submit, submit.prompt_tokens)

    def _alone(
        self, submit: Submit, model: str, avoid: tuple[RankLoad, ...], barred: Container[RankLoad]
    ) -> RankLoad | None:
        """Return the unified rank that does both legs of a pair, by its policy's wish; None: there is none."""
        if any(target_of(role, submit) != ("", None) for role in ROLES[submit.leg]):
            return None
        group = self.table.group("unified", model)
        try:
            rank = self._placement.place("unified", submit, group, None, None, None, avoid, barred)
        except Refusal:
            return None
        return rank if rank is not None and self.prefills_here(rank, submit) else None

    def _stands(self, refusal: Refusal, roles: tuple[Role, ...]) -> Refusal | None:
        """Return the final refusal, or None where the request waits because a suspect could take it."""
        meaning = MEANINGS[refusal.code]
        if meaning.rank_may_return and any(rank.info.role in roles for rank in self.suspects):
            return None
        if self.young and meaning.needs_all_ranks:
            sentence = f"{refusal.sentence}; but this controller has just begun, and ranks may be missing"
            return Refusal("no_rank", sentence)
        return refusal


def _overriding(hook: str, policies: Mapping[Role, Policy]) -> dict[Role, Policy]:
    """Return those with a `hook` of their own: the others need no call at every request."""
    return {role: each for role, each in policies.items() if overrides(each, hook)}
