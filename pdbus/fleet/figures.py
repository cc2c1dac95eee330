"""The figures of a cluster at one time, and over the seconds before it (`pdbus.fleet.history` makes them); and what is
wrong by one status: a controller's answer with its ranks, their loads and counters that only grow. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from bus.wire.messages import BrokerStatus, MemberKey, RankState, RankStatus, Status
from pdbus.fleet.conditions import Condition, held_tokens
from pdbus.fleet.formatting import age, name_of

LEFT: frozenset[RankState] = frozenset({"draining", "gone"})  # ranks that shall not serve any more
DEAD: frozenset[RankState] = frozenset({"silent", "lost", "hung"})
FAILED = ("failed_",)
REFUSED = ("rejected_", "hello_", "peers_refused", "policy_faults", "clients_unreachable")
REFUSED_BY_BROKER = ("rejected_", "peers_refused", "members_", "topic_mismatches", "rooms_refused", "rooms_conflicts")


def trouble_of(status: Status) -> list[str]:
    """Return what is wrong with the cluster, one line each: ranks that should serve and do not, and roles without a
    ready rank; empty if all is well.

    A rank that was drained or has left should not serve, and a starting rank is no trouble while another one serves its
    role. A role is missing as long as its controller expects it, even if no rank of it is known any more.
    """
    return [dead_sentence(rank) for rank in status.ranks if rank.state in DEAD] + unserved_of(status)


def dead_sentence(rank: RankStatus) -> str:
    """Return that a rank does not serve, and for how long, as a sentence."""
    verb = f"has been {rank.state} for {age(rank.state_age_s)}" if rank.state_age_s >= 0 else f"is {rank.state}"
    return f"{name_of(rank)} {verb}"


def unserved_of(status: Status) -> list[str]:
    """Return the roles without a ready rank, a sentence each; see `trouble_of`."""
    here = [rank for rank in status.ranks if rank.state != "gone"]
    served = {rank.role for rank in here if rank.state == "ready"}
    wanted = {each.role for each in status.wanted if not each.ready}
    unserved = ({rank.role for rank in here} | wanted) - served
    lines = [f"no {role} rank is ready" for role in sorted(unserved)]
    lines += [
        f"no {each.role} rank of {each.model} is ready"
        for each in status.wanted
        if not each.ready and each.role not in unserved
    ]
    return lines if here else [*lines, "no rank has joined this controller"]


def slo_of(status: Status) -> dict[str, int]:
    """Return how many requests kept their SLO (limit) of the time to the first token, missed it, or were exempt, in
    total; empty if the controller does not order by SLO."""
    names = ("kept", "missed", "exempt")
    return {name: status.counts.get(f"ttft_slo_{name}", 0) for name in names} if "ttft_slo" in status.counts else {}


@dataclass(frozen=True)
class Sample:
    """The answers of controller and broker (None: it did not answer) at one time: `at` on a monotonic clock, for rates,
    and `wall` in seconds since 1970, to be shown."""

    at: float
    wall: float
    status: Status
    broker: BrokerStatus | None = None

    @cached_property
    def by_key(self) -> dict[MemberKey, RankStatus]:
        """The ranks by instance and number."""
        return {(rank.instance, rank.dp_rank): rank for rank in self.status.ranks}

    @cached_property
    def failed(self) -> dict[str, int]:
        """The total of failed requests by code; codes without failures are left out."""
        return _named(self.status.counts, FAILED)

    @cached_property
    def refused(self) -> dict[str, int]:
        """Totals of what controller and broker refused, by reason: messages, hellos, keys, rooms, failed picks. Counts
        of the broker begin with `broker `; they are missing where it did not answer."""
        broker = _named(self.broker.counts, REFUSED_BY_BROKER) if self.broker is not None else {}
        return _named(self.status.counts, REFUSED) | {f"broker {name}": count for name, count in broker.items()}


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank, now and over the window; rates are per second. None: not known. `ttft` and `tpot` are
    the counts of a latency histogram (`bus.histogram`) in the window: time to first token (for a prefill rank, its part
    of it) and time per further token."""

    rank: RankStatus
    requests_s: float | None = None  # requests ended a second
    prompt_s: float | None = None  # prompt tokens begun, without those whose KV cache it fetches
    cached_s: float | None = None  # of those, found in its prefix cache
    computed_s: float | None = None  # prompt tokens computed
    output_s: float | None = None  # output tokens
    busy: float | None = None  # share of the time that a prefill rank computed: others step while one request runs
    ttft: tuple[int, ...] = ()
    tpot: tuple[int, ...] = ()
    step_s: float | None = None  # seconds a forward step took lately
    median_step_s: float | None = None  # the median of its role and model
    conditions: tuple[Condition, ...] = ()  # what it does badly, if anything

    @property
    def slots(self) -> float | None:
        """The estimate of the rank's requests as a share of its run slots; more than 1 where some wait. None: not
        known."""
        load = self.rank.load
        return self.rank.estimate_requests / load.max_running if load is not None and load.max_running else None

    @property
    def kv(self) -> float | None:
        """The share of its KV memory in use. None: not known."""
        load = self.rank.load
        return held_tokens(self.rank, load) / load.kv_capacity if load is not None and load.kv_capacity else None

    @property
    def hits(self) -> float | None:
        """The share of its prompt tokens that its prefix cache had, in the window. None: not known, or no prompt."""
        return None if self.cached_s is None or not self.prompt_s else self.cached_s / self.prompt_s

    @property
    def tokens_s(self) -> float | None:
        """The rank's main rate a second: computed prompt tokens of a prefill rank, output tokens of others. None: not
        known."""
        if self.rank.role != "prefill":
            return self.output_s
        return self.computed_s


@dataclass(frozen=True)
class Figures:
    """The figures of the whole cluster at the time of `sample`, over the `window_s` before it. Rates (`_s`) are per
    second; `done_s` counts requests, and is None with one sample."""

    sample: Sample
    window_s: float
    ranks: tuple[RankFigures, ...]
    done_s: float | None
    failed: dict[str, tuple[int, int]]  # by code: total, and in the window
    refused: dict[str, tuple[int, int]]  # messages, hellos and picks by reason: total, and in the window

    @property
    def ttft(self) -> tuple[int, ...]:
        """The histogram counts of the time from the arrival of a submit to its first token, over all ranks but
        prefill."""
        return _sum(each.ttft for each in self.ranks if each.rank.role != "prefill")

    @property
    def tpot(self) -> tuple[int, ...]:
        """The histogram counts of the time per output token after the first, over all ranks."""
        return _sum(each.tpot for each in self.ranks)

    @property
    def prompt_s(self) -> float:
        """The prompt tokens begun a second; ranks that do not report count 0."""
        return sum(each.prompt_s or 0.0 for each in self.ranks)

    @property
    def cached_s(self) -> float:
        """The prompt tokens a second that were found in prefix caches."""
        return sum(each.cached_s or 0.0 for each in self.ranks)

    @property
    def hits(self) -> float | None:
        """The share of prompt tokens that prefix caches had, over ranks that report it. None: no such prompt in the
        window."""
        known = [each for each in self.ranks if each.cached_s is not None]
        prompt_s = sum(each.prompt_s or 0.0 for each in known)
        return sum(each.cached_s or 0.0 for each in known) / prompt_s if prompt_s else None

    @property
    def output_s(self) -> float:
        """The output tokens a second."""
        return sum(each.output_s or 0.0 for each in self.ranks)


def _sum(counts: Iterator[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _named(counts: Mapping[str, int], names: tuple[str, ...]) -> dict[str, int]:
    """Return the counts above 0 whose names begin with one of `names`, without the prefixes `failed_` and
    `rejected_`."""
    return {
        name.removeprefix("failed_").removeprefix("rejected_"): count
        for name, count in sorted(counts.items())
        if name.startswith(names) and count
    }
