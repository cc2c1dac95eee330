"""The figures of a cluster over the last seconds, for `pdbus top`: rates, quantiles and news, computed from successive
statuses. A status is a controller's answer with its ranks, their loads and counters that only grow. Pure.

Asks no part itself: `History.add` takes each answer and its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from bus.histogram import since
from bus.wire.messages import BrokerStatus, Load, MemberKey, RankState, RankStatus, Status
from pdbus.fleet.formatting import age, name_of

WINDOW_S = 20.0
NEWS_KEPT = 200
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
    lines = [
        f"{name_of(rank)} is {rank.state}" + (f" for {age(rank.state_age_s)}" if rank.state_age_s >= 0 else "")
        for rank in status.ranks
        if rank.state in DEAD
    ]
    here = [rank for rank in status.ranks if rank.state != "gone"]
    served = {rank.role for rank in here if rank.state == "ready"}
    wanted = {each.role for each in status.wanted if not each.ready}
    unserved = ({rank.role for rank in here} | wanted) - served
    lines += [f"no {role} rank is ready" for role in sorted(unserved)]
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
    busy: float | None = None  # share of the time that its engine computed
    ttft: tuple[int, ...] = ()
    tpot: tuple[int, ...] = ()

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
        return load.kv_tokens / load.kv_capacity if load is not None and load.kv_capacity else None

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


@dataclass(frozen=True)
class News:
    """A change between two samples, as a line; `wall` is its time in seconds since 1970, `bad` marks trouble."""

    wall: float
    text: str
    bad: bool = False


class History:
    """The samples of the last `WINDOW_S` seconds, and in `news` the changes between them, the latest last."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self.news: deque[News] = deque(maxlen=NEWS_KEPT)

    def add(self, sample: Sample) -> None:
        """Add a sample, which must be newer than the last, and the news since the last; drop samples older than the
        window. After a restart of the controller the window begins again."""
        last = self._samples[-1] if self._samples else None
        if last is not None:
            self.news.extend(_news(last, sample))
            if last.status.epoch != sample.status.epoch:
                self._samples.clear()  # its counts start from 0
        self._samples.append(sample)
        while self._samples[0].at < sample.at - WINDOW_S:
            self._samples.popleft()

    def figures(self) -> Figures | None:
        """Return the figures over the window up to the last sample; None before the first sample. With one sample,
        rates are None."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        window_s = last.at - first.at
        counts, before = last.status.counts, first.status.counts
        done = counts.get("done", 0) - before.get("done", 0)
        return Figures(
            last,
            window_s,
            tuple(self._of(rank, window_s) for rank in last.status.ranks),
            done / window_s if window_s else None,
            _grown(last.failed, first.failed),
            _grown(last.refused, _refused_before(last, first)),
        )

    def series(self, key: MemberKey) -> list[RankStatus]:
        """Return the rank's status in all samples of the window that have it, the latest last."""
        return [rank for sample in self._samples if (rank := sample.by_key.get(key)) is not None]

    def _of(self, rank: RankStatus, window_s: float) -> RankFigures:
        key = rank.instance, rank.dp_rank
        first = self._samples[0].by_key.get(key)
        ended = rank.ended_total - first.ended_total if first is not None else rank.ended_total
        if ended < 0:  # the controller forgot it meanwhile, and its counts started from 0
            ended = rank.ended_total
        figures = RankFigures(
            rank,
            requests_s=ended / window_s if window_s else None,
            ttft=since(rank.ttft_counts, first.ttft_counts if first is not None else ()),
            tpot=since(rank.tpot_counts, first.tpot_counts if first is not None else ()),
        )
        began = next(  # only of this start of the rank: another start has its own counts
            (
                (sample.at, seen.load)
                for sample in self._samples
                if (seen := sample.by_key.get(key)) is not None and seen.epoch == rank.epoch and seen.load is not None
            ),
            None,
        )
        return figures if began is None or rank.load is None else _with_load(figures, *began, self._samples[-1].at)


def _with_load(figures: RankFigures, then: float, before: Load, now: float) -> RankFigures:
    load, elapsed_s = figures.rank.load, now - then
    assert load is not None
    if elapsed_s <= 0:
        return figures

    def rate(name: str) -> float:
        more: int = getattr(load, name) - getattr(before, name)
        return max(0, more) / elapsed_s

    prefills = figures.rank.role != "decode"
    # A rank that does not report admitted tokens counts prompts at their arrival; mixing both would be wrong.
    counts = bool(load.admitted_tokens_total)
    prompt_s, cached_s = rate("admitted_tokens_total" if counts else "prompt_tokens_total"), rate("cached_tokens_total")
    reports_hits = counts or load.cached_tokens_total > 0 or not load.prompt_tokens_total
    computed_s = rate("computed_tokens_total") if counts else max(0.0, prompt_s - cached_s)
    return replace(
        figures,
        prompt_s=prompt_s if prefills else None,
        cached_s=cached_s if prefills and reports_hits else None,
        computed_s=computed_s if prefills else None,
        output_s=rate("output_tokens_total"),
        busy=min(1.0, rate("busy_us_total") / 1e6) if load.busy_us_total else None,
    )


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


def _grown(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return each count in total and its growth since `before`; a count that restarted has not grown."""
    return {name: (count, max(0, count - before.get(name, 0))) for name, count in now.items()}


def _refused_before(now: Sample, before: Sample) -> dict[str, int]:
    """Return the earlier refusals. The counts of a broker that did not answer then are taken as the present ones."""
    unknown = {name: count for name, count in now.refused.items() if name.startswith("broker ")}
    return before.refused if before.broker is not None else unknown | before.refused


def _news(before: Sample, now: Sample) -> Iterator[News]:
    """Yield the changes between two samples that are worth a line."""
    if before.status.epoch != now.status.epoch:
        yield News(now.wall, f"{now.status.controller} was started again", bad=True)
    for key, rank in now.by_key.items():
        was = before.by_key.get(key)
        bad = rank.state in DEAD
        if was is None:
            yield News(now.wall, f"{name_of(rank)} joined, {rank.state}", bad)
        elif was.epoch != rank.epoch:
            yield News(now.wall, f"{name_of(rank)} was started again, {rank.state}", bad=True)
        elif was.state != rank.state:
            yield News(now.wall, f"{name_of(rank)}: {was.state} -> {rank.state}", bad)
    for key, rank in before.by_key.items():
        if key not in now.by_key:
            yield News(now.wall, f"{name_of(rank)} is forgotten")
    if (before.broker is None) != (now.broker is None):
        gone = now.broker is None
        yield News(now.wall, "no broker answers" if gone else "a broker answers again", bad=gone)
    elif before.broker is not None and now.broker is not None and before.broker.epoch != now.broker.epoch:
        yield News(now.wall, "the broker was started again", bad=True)
    for counts, earlier, what in (
        (now.failed, before.failed, "failed"),
        (now.refused, _refused_before(now, before), "refused"),
    ):
        more = {name: new for name, (_, new) in _grown(counts, earlier).items() if new > 0}
        if more and before.status.epoch == now.status.epoch:
            yield News(now.wall, f"{what}: " + ", ".join(f"{name} {new}" for name, new in more.items()), bad=True)
