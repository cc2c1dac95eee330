"""Choosers of a controller among the ranks of one role, in the lab's virtual time: the live policies over the live load
table, and baselines.

A chooser belongs to one controller and sees only the messages that reach it: its own dispatches, reports, counters of
other controllers, KV events. The oracles see the ranks themselves. Choosers must not move time or requests. `dp_rank`
is a rank's number, from 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bus.errors import BusError
from bus.wire.hashing import unpack_hashes
from bus.wire.kv_names import Removed, Stored
from bus.wire.messages import Ended, Hello, Load, Role, Sent, Submit
from controller.balancer import Balancer
from controller.costs import Costs
from controller.decisions import SHOWN, Candidate, Weighed
from controller.late import LateBinding
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.load.table import LoadTable
from controller.policies import Policy, PolicySettings, make_policy
from controller.policies.guard import overrides
from controller.policies.registry import find, unknown
from controller.requests.request import ROLES, LegRun
from pdbus.lab.config import LabConfig

EPOCH = 1  # of every virtual rank: none restarts


class Truth(Protocol):
    """The true state of ranks at this moment, for oracles alone."""

    def queued_tokens(self, dp_rank: int) -> int:
        """Return the prompt tokens that wait at the rank or are on their way to it."""

    def requests(self, dp_rank: int) -> int:
        """Return the requests at the rank and on their way to it."""

    def cached_tokens(self, dp_rank: int, hashes: Sequence[int]) -> int:
        """Return how many tokens of the prefix with these block hashes the rank has cached."""


class Chooser(Protocol):
    """Chooses among the ranks 0 .. n-1 of one role. The simulation calls it; `now` is the virtual time in seconds.
    `weighed` is what the last `pick` compared, once `explain` was called."""

    weighed: Weighed | None

    def explain(self, method: str, role: Role) -> None:
        """Keep what each `pick` compares from now on: the method is called so, and its ranks are of this role."""

    @property
    def predicted(self) -> tuple[float, float] | None:
        """The seconds until the first token that the last `prefills_here` compared: all at one rank, and as a pair;
        None: its policy compares none."""

    def pick(self, request: Submit, now: float, read: int = 0) -> tuple[int, int]:
        """Return the rank for `request`, and the tokens by which its estimated load was raised (0 for baselines without
        acknowledgements). `read`: the prompt tokens that this rank reads from a decode rank."""

    def takes(self, request: Submit) -> bool:
        """Return true if some rank can take `request` now; otherwise the request waits."""

    def prefills_here(self, request: Submit) -> bool:
        """Return true if the rank that `pick` would return is to do all of `request`, a pair."""

    def asked(self, request: Submit, now: float) -> RankLoad | None:
        """Return the record of the rank that `pick` would return; None: there is none."""

    def reads_back(self, request: Submit, prefill: RankLoad, now: float) -> int:
        """Return the tokens of the prompt that `prefill` need not compute, because the decode rank that `pick` would
        return has them and it is to read them there; 0: none."""

    def order(self, request: Submit, work: int, now: float) -> int:
        """Return the place of `request`, which begins to wait, in the policy's order."""

    def least_tokens(self) -> int:
        """Return the estimate of prompt tokens queued at the least loaded rank."""

    def work(self, request: Submit) -> int:
        """Return the prompt tokens of `request` that must be computed, at the rank with the longest cached prefix where
        the policy knows caches."""

    def first_token_s(self, work: int) -> float:
        """Return the seconds that `work` prompt tokens would take at the least loaded rank, by its reports."""

    def ended(self, dp_rank: int, ended: Ended, now: float) -> None:
        """Note that the leg of request `ended.rid` at this rank is over."""

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        """Note a load report of this rank, which came at `now`."""

    def sent(self) -> Sent | None:
        """Return this controller's counters of what it has dispatched, for the other controllers; None: it shares
        none."""

    def apply_sent(self, sent: Sent, now: float) -> None:
        """Note another controller's counters."""

    def kv_events(self, dp_rank: int, events: Sequence[Stored | Removed]) -> None:
        """Note changes of this rank's prefix cache."""


class BaseChooser:
    """A chooser that ignores all messages and always takes requests; the base of the others."""

    weighed: Weighed | None = None
    predicted: tuple[float, float] | None = None
    _explains: tuple[str, Role] | None = None

    def explain(self, method: str, role: Role) -> None:
        self._explains = method, role

    def _weigh(self, unit: str, costs: Sequence[float], chosen: int) -> None:
        """Keep that the rank `chosen` was picked by these costs of all ranks, if that is wanted."""
        if self._explains is not None:
            method, role = self._explains
            others = sorted([(cost, rank) for rank, cost in enumerate(costs) if rank != chosen])[: SHOWN - 1]
            shown = [Candidate((role, rank), cost, 0) for cost, rank in ((costs[chosen], chosen), *others)]
            self.weighed = Weighed(method, unit, len(costs), tuple(shown))

    def takes(self, request: Submit) -> bool:
        return True

    def prefills_here(self, request: Submit) -> bool:
        return False

    def asked(self, request: Submit, now: float) -> RankLoad | None:
        return None

    def reads_back(self, request: Submit, prefill: RankLoad, now: float) -> int:
        return 0

    def order(self, request: Submit, work: int, now: float) -> int:
        return 0

    def least_tokens(self) -> int:
        return 0

    def work(self, request: Submit) -> int:
        return request.prompt_tokens

    def first_token_s(self, work: int) -> float:
        return 0.0

    def ended(self, dp_rank: int, ended: Ended, now: float) -> None:
        pass

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        pass

    def sent(self) -> Sent | None:
        return None

    def apply_sent(self, sent: Sent, now: float) -> None:
        pass

    def kv_events(self, dp_rank: int, events: Sequence[Stored | Removed]) -> None:
        pass


class TableChooser(BaseChooser):
    """A live policy in a live balancer, for the ranks of one role. With `late` (late binding), `takes` is false until a
    rank is nearly idle. `controller` is this controller's number, from 0, and `costs` those of its ranks of all
    roles."""

    def __init__(
        self, policy: Policy, role: Role, ranks: int, controller: int, config: LabConfig, block_tokens: int,
        *, late: bool = False, costs: Costs | None = None,
    ) -> None:  # fmt: skip
        self._role: Role = role
        self._epoch = controller + 1
        self._seq = 0
        slo = config.queue_order == "slo"
        self._late = LateBinding(config.late_tokens, config.slo_tpot_s if slo and config.tpot_admission else 0.0)
        self.table = LoadTable(self._epoch, stale_s=config.stale_s)
        self._costs = costs or Costs()
        self.balancer = Balancer(self.table, {role: policy}, self._late if late else None, costs=self._costs)
        self._asked: tuple[Submit, RankLoad] | None = (
            None  # a request whose policy was asked about its rank; for `pick`
        )
        self._trip = config.trip
        memory = {"decode": config.decode_kv_tokens, "unified": config.unified_kv_tokens}.get(role, 0) if slo else 0
        self._live: dict[str, tuple[Submit, LegRun]] = {}  # by rid
        self._ranks = []
        for dp_rank in range(ranks):
            hello = Hello(
                instance=role, dp_rank=dp_rank, epoch=EPOCH, role=role, model="sim", dp_size=ranks, state="ready",
                endpoint="", max_context=0, kv_capacity=memory,  # 0: no matter
                max_running=0, block_tokens=block_tokens, prefills=role == "decode" and config.decode_prefills,
                reads_back=config.decode_cache and role in ROLES["pair"],
            )  # fmt: skip
            self._ranks.append(self.balancer.opened(hello, ready=True))
        self._group = self.table.group(role)

    def pick(self, request: Submit, now: float, read: int = 0) -> tuple[int, int]:
        """Pick by the policy and charge the rank. Raises BusError if the policy returns no rank."""
        self.balancer.tick(now)
        asked, self._asked = self._asked, None
        about, rank = asked if asked is not None and asked[0].rid == request.rid else (request, self._pick(request))
        if rank is None:  # which only a `fixed` one may say: ranks without stated limits are always candidates
            raise BusError(f"a policy has no rank for request {request.rid}, though all are there")
        if self._explains is not None:
            self.weighed = self.balancer.decisions.weighed(self._explains[0], about, rank, [*self._group])
        role: Role = "unified" if request.leg == "unified" else self._role
        (leg,) = self.balancer.charge(request, now, ((role, rank),), read)
        self._live[request.rid] = request, leg
        return rank.key[1], leg.charge

    def _pick(self, request: Submit) -> RankLoad | None:
        """The trace's requests are pairs; this is the one leg that goes to these ranks."""
        return self.balancer.pick(self._role, self._group, request)

    def takes(self, request: Submit) -> bool:
        rank = self._pick(request)
        if rank is not None and self.balancer.admits(self._role):
            self._asked = request, rank
        return rank is not None

    def prefills_here(self, request: Submit) -> bool:
        if not self.balancer.admits(self._role) or self._asked is None or self._asked[0].rid != request.rid:
            self._costs.undecided = request
            rank = self._pick(request)
            self._costs.undecided = None
            self._asked = None if rank is None else (request, rank)
        return self._asked is not None and self.balancer.prefills_here(self._asked[1], request)

    @property
    def predicted(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.balancer.policies[self._role].predicted

    def asked(self, request: Submit, now: float) -> RankLoad | None:
        if self._asked is None or self._asked[0].rid != request.rid:
            self.balancer.tick(now)
            rank = self._pick(request)
            self._asked = None if rank is None else (request, rank)
        return None if self._asked is None else self._asked[1]

    def reads_back(self, request: Submit, prefill: RankLoad, now: float) -> int:
        rank, costs = self.asked(request, now), self._costs
        known = 0 if rank is None else costs.readable(rank, request)
        if rank is None or known <= costs.cached(prefill, request):
            return 0
        return known if self._trip == "read_back" or self.balancer.read_back(rank, prefill, request) else 0

    def order(self, request: Submit, work: int, now: float) -> int:
        return self.balancer.order(request, work, now)

    def least_tokens(self) -> int:
        rank = self._group.least(Metric.TOKENS)
        assert rank is not None, "ranks without stated limits are always candidates"
        return rank.tokens

    def work(self, request: Submit) -> int:
        return self.balancer.policies[self._role].work(request)

    def first_token_s(self, work: int) -> float:
        return self._late.first_token_s(self._group.least(Metric.TOKENS), work)

    def ended(self, dp_rank: int, ended: Ended, now: float) -> None:
        request, leg = self._live.pop(ended.rid)
        self.balancer.ended(leg, request, ended, now)

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        self.balancer.report(self._ranks[dp_rank].key, EPOCH, load, now)

    def sent(self) -> Sent | None:
        self._seq += 1
        return Sent(f"controller-{self._epoch - 1}", self._epoch, self._seq, self.table.counters())

    def apply_sent(self, sent: Sent, now: float) -> None:
        self.table.apply_sent(sent, now)

    def kv_events(self, dp_rank: int, events: Sequence[Stored | Removed]) -> None:
        self.balancer.cache(self._ranks[dp_rank], events)


class PowerOfTwo(Policy):
    """A policy: the less loaded of two ranks drawn at random (Mitzenmacher 2001), by the same estimates as
    total_tokens."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._rng = random.Random((settings or PolicySettings()).seed)

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """Return the better of two; None if there is no candidate."""
        ranks = [*view]
        drawn = self._rng.sample(ranks, min(2, len(ranks)))
        return min(drawn, key=lambda rank: (rank.tokens, rank.requests, rank.last_turn), default=None)


class Overwrite(BaseChooser):
    """A baseline with reports that acknowledge nothing: each one overwrites the believed load, to which dispatches
    after it are added. `of_report` gives the load of a report, `of_dispatch` that of a prompt's tokens; `unit` is what
    both count, in the plural."""

    def __init__(
        self, ranks: int, of_report: Callable[[Load], int], of_dispatch: Callable[[int], int], unit: str
    ) -> None:
        self._unit = unit
        self._believed = [0] * ranks
        self._last_turn = [0] * ranks
        self._turn = 0
        self._of_report = of_report
        self._of_dispatch = of_dispatch

    def pick(self, request: Submit, now: float, read: int = 0) -> tuple[int, int]:
        """Return the rank with the least believed load, by turns among equals."""
        chosen = min(range(len(self._believed)), key=lambda rank: (self._believed[rank], self._last_turn[rank]))
        self._weigh(self._unit, self._believed, chosen)
        self._believed[chosen] += self._of_dispatch(request.prompt_tokens)
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen, 0

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        """Believe the report alone."""
        self._believed[dp_rank] = self._of_report(load)


class Oracle(BaseChooser):
    """A baseline that sees the true state of every rank, requests on their way included; with `cache`, it subtracts the
    prompt tokens that a rank has cached."""

    def __init__(self, truth: Truth, ranks: int, *, cache: bool) -> None:
        self._truth = truth
        self._cache = cache
        self._last_turn = [0] * ranks
        self._turn = 0

    def pick(self, request: Submit, now: float, read: int = 0) -> tuple[int, int]:
        """Return the rank with the fewest tokens, by turns among equals."""
        truth = self._truth
        hashes = unpack_hashes(request.block_hashes) if self._cache else []

        def cost(rank: int) -> tuple[int, int, int]:
            saved = truth.cached_tokens(rank, hashes) if hashes else 0
            return truth.queued_tokens(rank) - saved, truth.requests(rank), self._last_turn[rank]

        costs = [*map(cost, range(len(self._last_turn)))]
        chosen = min(range(len(costs)), key=costs.__getitem__)
        self._weigh("tokens", [each[0] for each in costs], chosen)
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen, 0


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the lab's table: a balancing method, and the reports and events that it needs."""

    about: str
    report_interval_s: float | None = None  # None: the lab's setting, and a report after each step
    before_ingest: bool = False
    kv_events: bool = False
    late: bool = False  # requests wait at the controller until a rank is about to run dry
    admits: bool = False  # requests wait at the controller until its policy admits them
    orders: bool = False  # its policy orders what waits
    prefills_here: bool = False  # its policy says where prompts are computed
    watches: bool = True  # loads decide, as reports say; else it needs none
    reads_back: bool = False  # its policy says which prompts prefill ranks read from decode ranks


METHODS: dict[str, Method] = {
    "round_robin": Method("each rank in turn", watches=False),
    "follow_bootstrap_room": Method("bootstrap_room % ranks", watches=False),
    "total_requests": Method("fewest requests, acknowledged reports"),
    "total_tokens": Method("fewest prompt tokens queued, acknowledged reports"),
    "cache_aware": Method("fewest tokens queued + to be computed, acknowledged reports", kv_events=True),
    "late_tokens": Method("total_tokens, bound late from a central queue", late=True),
    "late_cache": Method("cache_aware, bound late from a central queue", kv_events=True, late=True),
    "overwrite": Method("fewest tokens, plain reports each 20 ms, no acknowledgement", 0.02, before_ingest=True),
    "vllm_counts": Method("4 x waiting + running, plain reports each 100 ms, as vLLM", 0.1, before_ingest=True),
    "power_of_two": Method("better of two random ranks by tokens, acknowledged reports"),
    "oracle": Method("fewest tokens queued, perfect instant knowledge", watches=False),
    "oracle_cache": Method("fewest tokens queued + to be computed, perfect instant knowledge", watches=False),
}
LATE = {"late_tokens": "total_tokens", "late_cache": "cache_aware"}  # the policy that each binds late


def method_of(name: str) -> Method:
    """Return the row of METHODS, or one for a policy from outside (`module:Class`). Raises ConfigError for an unknown
    name."""
    if name in METHODS:
        return METHODS[name]
    if find(name) is None:
        raise unknown(f"method {name!r} for replay", name, METHODS)
    policy = make_policy(name)
    return Method(
        "a policy of yours",
        kv_events=policy.uses_hashes,
        **{hook: overrides(policy, hook[:-1]) for hook in ("admits", "orders")},
        prefills_here=overrides(policy, "prefill_here"),
        reads_back=overrides(policy, "read_back"),
    )


def check_method(name: str) -> str:
    """Return `name`. Raises ConfigError for an unknown one."""
    method_of(name)
    return name


def build_chooser(
    name: str, role: Role, ranks: int, controller: int, config: LabConfig, truth: Truth, block_tokens: int,
    costs: Costs | None = None,
) -> Chooser:  # fmt: skip
    """Return a new chooser by the method `name`, for controller number `controller` (from 0) and `ranks` ranks of
    `role`. `truth` is for oracles alone, `costs` for its policies of all roles."""
    if name in ("oracle", "oracle_cache"):
        return Oracle(truth, ranks, cache=name == "oracle_cache")
    if name == "overwrite":
        return Overwrite(ranks, lambda load: load.waiting_tokens, lambda tokens: tokens, "tokens")
    if name == "vllm_counts":
        return Overwrite(ranks, lambda load: 4 * load.waiting + load.running, lambda tokens: 4, "points")
    settings = PolicySettings(role, config.cache_weight, f"{config.seed}/{controller}")
    policy = PowerOfTwo(settings) if name == "power_of_two" else make_policy(LATE.get(name, name), settings)
    late = name in LATE or config.queue_order == "slo"
    return TableChooser(policy, role, ranks, controller, config, block_tokens, late=late, costs=costs)
