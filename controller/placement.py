"""The rank for a leg (a rank's share of a request: prefill, decode, or unified: both): the caller's choice, else the
method's. Pure; it charges nothing. `controller.balancer` uses it.

`place` returns a rank, or None when the leg should wait for credit (until a rank's limits allow more), or raises
Refusal. Credit belongs to a rank, not to a request: one request may exceed it, and the node queues what does not fit
yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping
from typing import TypeAlias, get_args

from bus.wire.codes import Code, Refusal
from bus.wire.messages import Role, Submit
from controller.late import LateBinding
from controller.load.groups import Group, Metric, Subset, View, exchange
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Policy
from controller.policies.guard import overrides
from controller.requests.lanes import Lane
from controller.requests.request import ROLES

# What must be equal at ranks of a pair, for sentences; NIXL insists on the model's path, too.
_EQUAL = "with vLLM both have the model at the same path, and one revision, dtype, block size, version and backend"
Suits: TypeAlias = Callable[[RankLoad], bool]  # whether a rank can do what a leg wants, apart from being large enough


class Placement:
    """The choice by `policies` among the ranks of `table`. `late` None: a request goes to a rank at once. `admits`: the
    policies that say when, by role."""

    def __init__(self, table: LoadTable, policies: Mapping[Role, Policy], late: LateBinding | None = None) -> None:
        self._table = table
        self._late = late  # None: at once
        self._policies = policies
        self.admits = {role: each for role, each in policies.items() if overrides(each, "admit")}
        self._at_once = late is None and not self.admits
        self.considered: dict[Role, View] | None = None  # by role, where ranks were picked; None: it is not noted

    def check(self, role: Role, submit: Submit, group: Group, dp_rank: int | None) -> Group:
        """Return the ranks of the model that this leg will run: `group`, which has the ranks that the caller named, or
        those of the only live model. Raises Refusal when the leg can run nowhere, whichever rank is alive and however
        long it waits, and when several models are live. `dp_rank` is the caller's choice; None: there is none."""
        facts, meant = group.facts(), group
        largest, models = facts.largest, facts.models
        if not models:
            self._nobody(role, submit, group.model, group.instance)
        if dp_rank is not None:
            rank = self._pinned(group, role, dp_rank)
            meant, largest = self._table.group(role, rank.info.model, group.instance), rank.largest
        elif not group.model:
            if len(models) == 1:
                (model,) = models
                meant = self._table.group(role, model, group.instance)
            else:
                meant = self._table.group(role, self._live_model(submit), group.instance)
                largest = meant.facts().largest
        _check_length(role, submit, largest)
        if submit.needs and not facts.params.issuperset(submit.needs):
            self._check_needs(role, submit, group)
        return meant

    def place(
        self, role: Role, submit: Submit, group: Group, dp_rank: int | None, other: Group | None = None,
        prefill: RankLoad | None = None, avoid: tuple[RankLoad, ...] = (), barred: Container[RankLoad] = (),
    ) -> RankLoad | None:  # fmt: skip
        """Return the rank for a leg; None: it waits. `group` has the ranks of its model, and `other` those of the
        decode leg where this is one of a pair, whose prefill leg goes to `prefill`. `avoid` names ranks to avoid while
        there are others; the method does not get those that are `barred`. Raises Refusal where no ready rank can take
        it."""
        if dp_rank is not None:
            return self._of_caller(role, submit, group, dp_rank, self._suits(submit, group, other, prefill))
        if not group.ready:
            raise Refusal("no_rank", f"no live {role} rank{_of(group.model)} can take this now")
        policy = self._policies[role]
        if policy.fixed:
            return self._of_room(role, submit, group, self._suits(submit, group, other, prefill))
        wants = other is not None or submit.needs  # more of a rank than that it is large enough
        suits = self._suits(submit, group, other, prefill) if wants else None
        plain = not avoid and suits is None and not barred
        chosen = self.pick(role, group, submit) if plain else None
        if not plain or (chosen is not None and context_of(role, submit) > chosen.largest):
            chosen = self.pick(role, self._some(role, submit, group, suits, avoid, barred), submit)
        if chosen is None and submit.leg == "decode":
            return self._idle(submit, group, suits, avoid, barred)
        return chosen

    def pick(self, role: Role, view: View, submit: Submit) -> RankLoad | None:
        """Return the policy's choice in `view`; None: no candidate, or it is better to keep the request in the
        queue."""
        if self.considered is not None:
            self.considered[role] = view
        if self._at_once:
            return self._policies[role].pick(view, submit, submit.prompt_tokens)
        rank = self._bind(role, view, submit)
        if rank is None or not rank.requests or role not in self.admits or self.admits[role].admit(rank, submit):
            return rank
        return None

    def _bind(self, role: Role, view: View, submit: Submit) -> RankLoad | None:
        """Return the policy's choice, if late binding lets a request go there now."""
        late, policy = self._late, self._policies[role]
        if late is None:
            return policy.pick(view, submit, submit.prompt_tokens)
        late.held_by_wish = False
        if role == "decode":
            return late.decoding(view, policy.pick(view, submit, submit.prompt_tokens), submit)
        if late.open(view.least(Metric.TOKENS)):
            return policy.pick(view, submit, submit.prompt_tokens)
        if role == "prefill":
            return None
        rank = policy.pick(view, submit, submit.prompt_tokens)  # of unified ranks, the least loaded may be another one
        return rank if late.open(rank) else None

    def lane(self, submit: Submit, model: str, avoid: tuple[RankLoad, ...]) -> Lane:
        """Return the lane in which the submit waits, by the model that it runs, whether the caller or the controller
        chose that. Requests that only larger ranks can hold, or that avoid a rank, wait for fewer ranks than the
        others, and so separately."""
        roles = ROLES[submit.leg]
        targets = [target_of(role, submit) for role in roles]
        too_small = tuple(
            [
                bisect_left(self._table.group(role, model, instance).facts().sizes, context_of(role, submit))
                for role, (instance, _) in zip(roles, targets, strict=True)
            ]
        )
        shunned = None
        for rank in avoid[-1:]:
            if sum(self._table.group(rank.info.role, model).ready.values()) > rank.ready:  # there are others
                shunned = rank.key
        ranks = (*targets, submit.prefill_instance, submit.needs, shunned, too_small)
        return Lane(model, roles, ranks, all(dp_rank is not None for _, dp_rank in targets))

    def _of_caller(self, role: Role, submit: Submit, group: Group, dp_rank: int, suits: Suits | None) -> RankLoad:
        """Return the rank that the caller named, with credit or without."""
        rank = self._pinned(group, role, dp_rank)
        if not rank.ready:
            raise Refusal("rank_unavailable", f"rank {rank.key[0]}/{dp_rank} is not ready: it takes nothing now")
        if suits is not None and not suits(rank):
            raise Refusal("bad_rank", f"rank {rank.key[0]}/{dp_rank} {_lacks(rank, submit)}")
        return _bounded(rank)

    def _of_room(self, role: Role, submit: Submit, group: Group, suits: Suits | None) -> RankLoad:
        """Return the only rank that a fixed policy has for the request, with credit or without."""
        if submit.bootstrap_room is None:
            raise Refusal("bad_room", f"{role} ranks are picked by bootstrap_room here; the request has none")
        rank = self._policies[role].pick(group, submit, submit.prompt_tokens)
        if rank is None:
            raise Refusal("no_rank", f"the {role} rank of bootstrap_room {submit.bootstrap_room} is not there now")
        _check_length(role, submit, rank.largest)
        if suits is not None and not suits(rank):
            raise Refusal("no_rank", f"the {role} rank of the room {_lacks(rank, submit)}")
        return _bounded(rank)

    def _idle(
        self, submit: Submit, group: Group, suits: Suits | None, avoid: tuple[RankLoad, ...],
        barred: Container[RankLoad],
    ) -> RankLoad | None:  # fmt: skip
        """Return the least loaded decode rank that computes nothing, beyond its credit, for a lone decode leg; None:
        there is none. What such a rank has waits for KV caches; the prefill leg of this one, which another controller
        dispatched, may hold the memory that theirs wait for."""
        if self._late is not None and self._late.held_by_wish:
            return None
        idle = [
            rank
            for rank in group.members
            if rank is not None
            and rank.ready
            and not rank.stale
            and rank.load is not None
            and not (rank.load.running or rank.load.kv_tokens or rank.slow or rank.full)
            and holds(rank, "decode", submit)
            and rank not in avoid
            and rank not in barred
            and (suits is None or suits(rank))
        ]
        return min(idle, key=lambda rank: rank.requests, default=None)

    @staticmethod
    def _some(
        role: Role, submit: Submit, group: Group, suits: Suits | None, avoid: tuple[RankLoad, ...],
        barred: Container[RankLoad],
    ) -> Subset:  # fmt: skip
        """Return the ranks of `group` that are ready, large enough and suitable, without those to avoid if there are
        others, and then without those that are barred."""
        large = [rank for rank in group.members if rank is not None and rank.ready and holds(rank, role, submit)]
        if not large:
            raise Refusal("no_rank", f"no live {role} rank is large enough for {submit.prompt_tokens} prompt tokens")
        able = large if suits is None else [rank for rank in large if suits(rank)]
        if not able:
            raise Refusal("no_rank", f"no live {role} rank {_wanted(submit)}")
        able = [rank for rank in able if rank not in avoid] or able
        return Subset([rank for rank in able if rank not in barred])

    def may_run(self, role: Role, submit: Submit, rank: RankLoad) -> bool:
        """Return true if `place` could have chosen `rank`, where a leg runs already, apart from credit and state."""
        instance, dp_rank = target_of(role, submit)
        info, policy = rank.info, self._policies[role]
        return (
            instance in ("", info.instance)
            and dp_rank in (None, info.dp_rank)
            and submit.model in ("", info.model)
            and holds(rank, role, submit)
            and rank.params.issuperset(submit.needs)
            and (dp_rank is not None or not policy.fixed or policy.pick(Subset([rank]), submit, 0) is rank)
        )

    # --- what not every rank can do ---------------------------------------------------------------------------

    @staticmethod
    def _suits(submit: Submit, group: Group, other: Group | None, prefill: RankLoad | None) -> Suits | None:
        """Return the further condition on ranks for this leg, apart from size; None, nearly always: all of `group`
        meet it."""
        facts, needs = group.facts(), submit.needs
        kinds = facts.kv_kinds
        if other is not None:
            kinds = other.facts().kv_kinds if prefill is None else frozenset((prefill.kv_kind,))
        if kinds == facts.kv_kinds and len(kinds) == 1 and (not needs or facts.params.issuperset(needs)):
            return None
        # Prefill goes where some decode rank can follow, at once if there is one.
        if other is not None and prefill is None:
            ranks = [rank for rank in other.members if rank is not None and rank.ready]
            kinds = frozenset(rank.kv_kind for rank in [rank for rank in ranks if rank.candidate] or ranks) or kinds
        return lambda rank: (
            rank.params.issuperset(needs) and (other is None or any(exchange(rank.kv_kind, kind) for kind in kinds))
        )

    @staticmethod
    def _check_needs(role: Role, submit: Submit, group: Group) -> None:
        """Raise Refusal when no rank knows all needed parameters: waiting does not help."""
        params_of = group.facts().params_of
        if not any(params.issuperset(submit.needs) for params in params_of):
            known = frozenset[str]().union(*params_of)
            unknown = sorted(set(submit.needs) - known)
            what = f"knows {', '.join(unknown)}" if unknown else f"knows all of {', '.join(submit.needs)}"
            raise Refusal("bad_request", f"no {role} rank {what}")

    # --- the caller's rank ------------------------------------------------------------------------------------

    @staticmethod
    def _pinned(group: Group, role: Role, dp_rank: int) -> RankLoad:
        instances = list(group.instances())
        if len(instances) > 1:  # one that is gone, or on its way out, is not meant
            instances = [ranks for ranks in instances if any(rank.ready for rank in ranks.values())] or instances
        infos = [next(iter(ranks.values())).info for ranks in instances]
        if len(infos) != 1:
            names = ", ".join(info.instance for info in infos)
            raise Refusal("bad_rank", f"dp_rank {dp_rank} of which {role} instance? name one of {names}")
        (ranks,), (info,) = instances, infos
        if not 0 <= dp_rank < info.dp_size:
            raise Refusal("bad_rank", f"dp_rank {dp_rank} is outside 0..{info.dp_size - 1} of {info.instance}")
        if dp_rank not in ranks:
            raise Refusal("rank_unavailable", f"rank {info.instance}/{dp_rank} has not joined")
        return ranks[dp_rank]

    def _live_model(self, submit: Submit) -> str:
        """Return the only model that ready ranks serve for every leg of `submit`, which names none. Where there are
        several or none, waiting may help: so it is while the ranks change from one model to another."""
        roles = ROLES[submit.leg]
        live = [self._table.group(role, "", target_of(role, submit)[0]).ready for role in roles]
        common = set(live[0]).intersection(*live)
        if len(common) == 1:
            return common.pop()
        if common:
            raise Refusal("no_rank", f"name the model: {', '.join(sorted(common))} are served")
        for role, models in zip(roles, live, strict=True):
            if not models:
                raise Refusal("no_rank", f"no live {role} rank can take this now")
        served = "; ".join(f"{role}: {', '.join(sorted(models))}" for role, models in zip(roles, live, strict=True))
        raise Refusal("no_rank", f"no model is served by both roles now ({served})")

    def _nobody(self, role: Role, submit: Submit, model: str, instance: str) -> None:
        """Return the refusal for a leg that no rank serves, with the part of the submit that is to blame."""
        if instance:
            groups = [self._table.group(each) for each in get_args(Role)]
            ranks = [rank for group in groups for rank in group.ranks_of(instance).values()]
            if not ranks:
                raise Refusal("bad_rank", f"no instance {instance} is known here")
            info = ranks[0].info
            # A model that only follows from the leg before may be on its way there.
            code: Code = "bad_rank" if submit.model or info.role != role else "no_rank"
            raise Refusal(code, f"instance {instance} is {info.role} of {info.model}, not {role}{_of(model)}")
        if submit.model and (models := self._table.group(role).ready):
            raise Refusal("bad_request", f"model {submit.model} is not served; {', '.join(sorted(models))} is")
        raise Refusal("no_rank", f"no {role} rank{_of(model)} has joined")


def target_of(role: Role, submit: Submit) -> tuple[str, int | None]:
    """Return the instance (empty: any) and the rank's number (None: any) that the caller chose for a leg."""
    if role == "prefill" and submit.leg == "pair":
        return submit.prefill_instance, submit.disagg_prefill_dp_rank
    return submit.instance, submit.routed_dp_rank


def context_of(role: Role, submit: Submit) -> int:
    """Return the tokens of context that a leg needs: a prefill leg adds one token to the prompt, the others all that
    they may produce."""
    return submit.prompt_tokens + (1 if role == "prefill" else submit.max_tokens)


def _check_length(role: Role, submit: Submit, largest: int) -> None:
    context = context_of(role, submit)
    if context > largest:
        raise Refusal("too_long", f"{context} tokens exceed the {largest} that context and KV capacity allow")


def _of(model: str) -> str:
    """Return ` of MODEL`, for sentences about ranks, or an empty string."""
    return f" of {model}" if model else ""


def _wanted(submit: Submit) -> str:
    """Return the roles and names that a submit wants, for sentences about missing ranks."""
    knows = f"knows {', '.join(submit.needs)}" if submit.needs else ""
    pairs = f"can exchange KV caches with the other role's ({_EQUAL})" if submit.leg == "pair" else ""
    return " and ".join(filter(None, (knows, pairs)))


def _lacks(rank: RankLoad, submit: Submit) -> str:
    unknown = sorted(set(submit.needs) - rank.params)
    if unknown:
        return f"does not know {', '.join(unknown)}"
    transfer, layout = rank.kv_kind
    return f"exchanges KV caches by {transfer!r} of {layout!r} only ({_EQUAL})"


def holds(rank: RankLoad, role: Role, submit: Submit) -> bool:
    """Return true if the request fits in the rank's context and KV memory at all."""
    return context_of(role, submit) <= rank.largest


def _bounded(rank: RankLoad) -> RankLoad:
    """Return the rank, which no wait could replace by another, unless its queue is full (up to a bound)."""
    if rank.full:
        raise Refusal("overloaded", f"rank {rank.key[0]}/{rank.key[1]} has {rank.requests} requests")
    return rank
