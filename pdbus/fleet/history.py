"""A fleet over time: what `pdbus top`, `pdbus status --watch` and pages show of a cluster, from successive statuses.
Pure.

Asks no part itself: `History.add` takes each answer and its time. Rates are computed from marks: the counters of all
ranks now and then in the last WINDOW_S seconds. Of the last fifteen minutes there are a row of the fleet a second, and
a row of each rank each ten seconds, as packed numbers: for 4,096 ranks all of it takes less than 64 MB.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bus.histogram import BOUNDS_S, quantile, since
from bus.wire.messages import ControllerEvent, MemberKey, RankStatus
from pdbus.fleet.conditions import Condition, Watch, sentence_of, watch_all
from pdbus.fleet.figures import DEAD, Figures, RankFigures, Sample, slo_of

WINDOW_S = 20.0
SPAN_S = 900.0  # of the rows
ROW_S, RANK_ROW_S = 1.0, 10.0
JITTER_S = 0.1  # samples come a little sooner or later than each second
NEWS_KEPT = 1000
LATENCY_ROWS = 10  # over which a row's quantiles are
MANY_RANKS = 1024  # more of them have fewer marks
COUNTERS = (
    "step", "busy_us_total", "prompt_tokens_total", "admitted_tokens_total", "cached_tokens_total",
    "computed_tokens_total", "output_tokens_total", "kv_sent_bytes_total", "kv_received_bytes_total",
)  # fmt: skip
ENDED = len(COUNTERS)  # where `RankStatus.ended_total` is among a mark's numbers
PLACE = {name: place for place, name in enumerate(COUNTERS)}
UNKNOWN = -1
SLOS_S = 60.0  # over which first tokens with an SLO are counted
ABOUT = {  # what a controller's event of no rank alone is about, in a word
    "failed": "requests", "adopted": "requests", "unreachable": "clients", "refused": "refusals", "drain_ordered":
    "order", "reloaded": "order", "policy_failed": "method", "key_revoked": "keys", "started": "controller",
}  # fmt: skip
WORDS = {  # the verb of a rank's event; others have their own word
    "joined": "joined", "restarted": "was started again", "forgotten": "is forgotten", "suspect": "may be lost",
    "drain_ordered": "shall drain", "draining": "drains",
}  # fmt: skip


class FleetRow(NamedTuple):
    """The fleet at one moment: `at` is in seconds on the sampler's monotonic clock, `wall` in seconds since 1970. Rates
    (`_s`) are since the row before, quantiles (seconds, NaN: none) over the last ten rows; KV figures are tokens."""

    at: float
    wall: float
    ranks: int
    ready: int
    requests: int  # live at the controller
    queued: int
    done_s: float
    failed_s: float
    prompt_s: float
    cached_s: float
    output_s: float
    kv_sent_bytes_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    kv_tokens: int
    kv_capacity: int
    slow: int
    full: int


class RankRow(NamedTuple):
    """One rank at one moment, single precision; NaN: not said, or not known. Rates (`_s`, and `busy`, a share) are
    since the row before. `at` is in seconds on the sampler's clock since the history's first sample."""

    at: float
    running: float
    waiting: float
    waiting_tokens: float
    kv_tokens: float
    kv_pinned: float
    kv_cached: float
    estimate_requests: float
    estimate_tokens: float
    step_s: float  # seconds a forward step
    requests_s: float
    prompt_s: float
    output_s: float
    kv_sent_bytes_s: float
    kv_received_bytes_s: float
    busy: float


RANK_ROWS = round(SPAN_S / RANK_ROW_S)
WIDTH = len(RankRow._fields)


@dataclass(frozen=True)
class News:
    """An event as a line; `about` names what it is of in a word, `wall` is its time in seconds since 1970, `bad` marks
    trouble. `event`: the controller's, None where the watcher saw it itself."""

    wall: float
    about: str
    text: str
    bad: bool = False
    event: ControllerEvent | None = None


class _RankMark(NamedTuple):
    epoch: int
    reported: bool  # there was a load; else all counters but ENDED are 0
    numbers: array[int]
    ttft: array[int]  # histogram counts
    tpot: array[int]


class _Mark(NamedTuple):
    at: float
    done: int
    failed: Mapping[str, int]
    refused: Mapping[str, int]
    broker: bool
    ranks: Mapping[MemberKey, _RankMark]


class _Track:
    """One rank over time."""

    __slots__ = ("now", "rows", "then", "watch")

    def __init__(self, now: RankStatus) -> None:
        self.now = now
        self.watch = Watch()
        self.rows: array[float] = array("f")
        self.then: tuple[float, int, array[int]] | None = None  # at its last row: when, epoch, numbers


class History:
    """The history of one fleet. `news` has the events, the latest last; `rows` those of the fleet. `next_event` is the
    number from which the controller's events have to be asked for."""

    def __init__(self) -> None:
        self.news: deque[News] = deque(maxlen=NEWS_KEPT)
        self.rows: deque[FleetRow] = deque(maxlen=round(SPAN_S / ROW_S))
        self.next_event = 0
        self._last: Sample | None = None
        self._marks: deque[_Mark] = deque()
        self._ranks: dict[MemberKey, _Track] = {}
        self._began: float | None = None
        self._grown = dict.fromkeys(("prompt", "cached", "output", "sent"), 0)  # since the last row
        self._latencies: deque[tuple[list[int], list[int]]] = deque(maxlen=LATENCY_ROWS)
        self._fresh = [0] * (len(BOUNDS_S) + 1), [0] * (len(BOUNDS_S) + 1)  # ttft and tpot since the last row
        self._counts_then: dict[str, int] = {}
        self._slos: deque[tuple[float, int, int]] = (
            deque()
        )  # of first tokens: when, and how many kept and missed theirs
        self._rank_row_at = -math.inf

    # --- samples come -------------------------------------------------------------------------------------------

    def add(self, sample: Sample) -> None:
        """Add a sample, which must be newer than the last, with its events. After a restart of the controller, whose
        counts begin at 0 again, the window begins again too."""
        last, at = self._last, sample.at
        self._began = at if self._began is None else self._began
        restarted = last is not None and last.status.epoch != sample.status.epoch
        self._take_news(last, sample, restarted)
        if restarted:
            self._marks.clear()
            self._slos.clear()
            self._counts_then = {}
        self._last = sample
        self._follow(sample, restarted)
        self._mark(sample)
        slo = slo_of(sample.status)
        self._slos.append((at, slo.get("kept", 0), slo.get("missed", 0)))
        while self._slos[0][0] < at - SLOS_S:
            self._slos.popleft()
        watch_all(((track.now, track.watch) for track in self._ranks.values()), at, sample.status.queue)
        if not self.rows or at - self.rows[-1].at >= ROW_S - JITTER_S:
            self._add_row(sample)
        if at - self._rank_row_at >= RANK_ROW_S - JITTER_S:
            self._rank_row_at = at
            for track in self._ranks.values():
                self._add_rank_row(track, at)

    def _take_news(self, last: Sample | None, sample: Sample, restarted: bool) -> None:
        status = sample.status
        if restarted:
            self.news.append(News(sample.wall, "controller", f"{status.controller} was started again", bad=True))
            self.next_event = 0  # its numbers begin again; what it says of those asked for is said then
            events: tuple[ControllerEvent, ...] = ()
        else:
            events = tuple(each for each in status.events or () if each.number >= self.next_event)
        for event in events:
            self.next_event = event.number + 1
            self.news.append(News(event.at_us / 1e6, about(event), text_of(event), event.bad, event))
        if last is None or status.epoch != last.status.epoch:
            return
        if (last.broker is None) != (sample.broker is None):
            gone = sample.broker is None
            text = "no broker answers" if gone else "a broker answers again"
            self.news.append(News(sample.wall, "broker", text, bad=gone))
        elif last.broker is not None and sample.broker is not None and last.broker.epoch == sample.broker.epoch:
            grown = _grown(sample.refused, last.refused).items()
            more = [f"{name} {new}" for name, (_, new) in grown if new and name.startswith("broker ")]
            if more:
                self.news.append(News(sample.wall, "refusals", f"refused: {', '.join(more)}", bad=True))

    def _follow(self, sample: Sample, restarted: bool) -> None:
        """Take in each rank's new status, and add up what has grown since the last."""
        ranks, grown = self._ranks, self._grown
        for rank in sample.status.ranks:
            key = rank.instance, rank.dp_rank
            track = ranks.get(key)
            if track is None:
                ranks[key] = _Track(rank)
                continue
            before, track.now = track.now, rank
            if not restarted:
                if rank.role != "prefill" and rank.ttft_counts != before.ttft_counts:
                    _add_to(self._fresh[0], since(rank.ttft_counts, before.ttft_counts))
                if rank.tpot_counts != before.tpot_counts:
                    _add_to(self._fresh[1], since(rank.tpot_counts, before.tpot_counts))
            load, was = rank.load, before.load
            if load is None or was is None or load is was or rank.epoch != before.epoch:
                continue
            if rank.role != "decode":
                prompt = load.admitted_tokens_total - was.admitted_tokens_total
                if not load.admitted_tokens_total:
                    prompt = load.prompt_tokens_total - was.prompt_tokens_total
                grown["prompt"] += max(0, prompt)
                grown["cached"] += max(0, load.cached_tokens_total - was.cached_tokens_total)
            grown["output"] += max(0, load.output_tokens_total - was.output_tokens_total)
            grown["sent"] += max(0, (load.kv_sent_bytes_total or 0) - (was.kv_sent_bytes_total or 0))
        if len(ranks) > len(sample.status.ranks):
            here = sample.by_key
            for key in [key for key in ranks if key not in here]:
                del ranks[key]

    def _mark(self, sample: Sample) -> None:
        marks, ranks = self._marks, self._ranks
        interval_s = WINDOW_S / (20 if len(ranks) <= MANY_RANKS else 4)
        if not marks or sample.at - marks[-1].at >= interval_s - JITTER_S:
            of = {key: _rank_mark(track.now) for key, track in ranks.items()}
            done = sample.status.counts.get("done", 0)
            marks.append(_Mark(sample.at, done, sample.failed, sample.refused, sample.broker is not None, of))
        while marks[0].at < sample.at - WINDOW_S and len(marks) > 1:
            marks.popleft()

    def _add_row(self, sample: Sample) -> None:
        counts, then = sample.status.counts, self._counts_then
        elapsed_s = sample.at - self.rows[-1].at if self.rows else 0.0

        def rate(more: float) -> float:
            return max(0.0, more) / elapsed_s if elapsed_s > 0 else math.nan

        def since_then(name: str) -> float:
            return rate(counts.get(name, 0) - then.get(name, 0)) if then else math.nan

        self._latencies.append(self._fresh)
        self._fresh = [0] * (len(BOUNDS_S) + 1), [0] * (len(BOUNDS_S) + 1)
        latencies = [
            value if (value := quantile([sum(bucket) for bucket in zip(*of, strict=True)], q)) is not None else math.nan
            for of in zip(*self._latencies, strict=True)
            for q in (0.5, 0.99)
        ]
        tracks = self._ranks.values()
        loads = [track.now.load for track in tracks if track.now.load is not None and track.now.state not in DEAD]
        prompt_s, cached_s, output_s, sent_s = map(rate, self._grown.values())
        ttft_p50_s, ttft_p99_s, tpot_p50_s, tpot_p99_s = latencies
        self.rows.append(
            FleetRow(
                at=sample.at, wall=sample.wall, ranks=len(tracks),
                ready=sum(track.now.state == "ready" for track in tracks), requests=counts.get("requests", 0),
                queued=counts.get("queue_requests", 0), done_s=since_then("done"), failed_s=since_then("failed"),
                prompt_s=prompt_s, cached_s=cached_s, output_s=output_s, kv_sent_bytes_s=sent_s, ttft_p50_s=ttft_p50_s,
                ttft_p99_s=ttft_p99_s, tpot_p50_s=tpot_p50_s, tpot_p99_s=tpot_p99_s,
                kv_tokens=sum(load.kv_tokens for load in loads), kv_capacity=sum(load.kv_capacity for load in loads),
                slow=sum(track.watch.is_slow(sample.at) for track in tracks),
                full=sum(bool(track.watch.full_why) for track in tracks),
            )
        )  # fmt: skip
        self._grown = dict.fromkeys(self._grown, 0)
        self._counts_then = {"done": counts.get("done", 0), "failed": counts.get("failed", 0)}

    def _add_rank_row(self, track: _Track, at: float) -> None:
        rank, load, numbers = track.now, track.now.load, _numbers(track.now)
        then, track.then = track.then, (at, rank.epoch, numbers)
        rates = {}
        if then is not None and then[1] == rank.epoch and at > then[0]:
            for place, (now, before) in enumerate(zip(numbers, then[2], strict=True)):
                if now != UNKNOWN and before != UNKNOWN:
                    rates[place] = max(0, now - before) / (at - then[0])
        nan = math.nan

        def rate(name: str) -> float:
            return rates.get(PLACE[name], nan)

        prompts = "admitted_tokens_total" if load is not None and load.admitted_tokens_total else "prompt_tokens_total"
        rows = track.rows
        rows.extend(
            (
                at - (self._began or 0.0),
                *((nan,) * 6 if load is None else (
                    load.running, load.waiting, load.waiting_tokens, load.kv_tokens,
                    nan if load.kv_pinned is None else load.kv_pinned,
                    nan if load.kv_cached is None else load.kv_cached,
                )),
                rank.estimate_requests, rank.estimate_tokens,
                nan if track.watch.step_s is None else track.watch.step_s, rates.get(ENDED, nan), rate(prompts),
                rate("output_tokens_total"), rate("kv_sent_bytes_total"), rate("kv_received_bytes_total"),
                rate("busy_us_total") / 1e6 if load is not None and load.busy_us_total else nan,
            )
        )  # fmt: skip
        if len(rows) > RANK_ROWS * WIDTH:
            del rows[:WIDTH]

    # --- what is shown ------------------------------------------------------------------------------------------

    def series(self, key: MemberKey) -> list[RankRow]:
        """Return the rows of a rank, the latest last; empty: it is unknown."""
        track = self._ranks.get(key)
        rows = track.rows if track is not None else array("f")
        return [RankRow(*rows[at : at + WIDTH]) for at in range(0, len(rows), WIDTH)]

    @property
    def last(self) -> Sample | None:
        """The last sample; None before the first."""
        return self._last

    def failed_lately(self) -> tuple[dict[str, int], int]:
        """Return how many requests failed in the window, by code, and how many were done in it."""
        if self._last is None:
            return {}, 0
        first = self._marks[0]
        failed = {code: new for code, (_, new) in _grown(self._last.failed, first.failed).items() if new}
        return failed, max(0, self._last.status.counts.get("done", 0) - first.done)

    def slos_lately(self) -> tuple[int, int]:
        """Return how many first tokens kept their SLO in the last minute, and how many missed it."""
        (_, kept, missed), (_, kept_now, missed_now) = (
            (self._slos[0], self._slos[-1]) if self._slos else ((0.0, 0, 0),) * 2
        )
        return max(0, kept_now - kept), max(0, missed_now - missed)

    def latest(self, key: MemberKey) -> RankRow | None:
        """Return the last row of a rank; None: there is none yet."""
        track = self._ranks.get(key)
        return RankRow(*track.rows[-WIDTH:]) if track is not None and track.rows else None

    def step_s(self, key: MemberKey) -> float | None:
        """Return the seconds that a forward step of a rank took lately; None: not known."""
        track = self._ranks.get(key)
        return track.watch.step_s if track is not None else None

    def medians_s(self) -> list[tuple[str, str, float]]:
        """Return the median seconds of a forward step of each role and model, where they are known."""
        ready = (track for track in self._ranks.values() if track.now.state == "ready")
        found = {(track.now.role, track.now.model): track.watch.median_s for track in ready}
        return [(*kind, median_s) for kind, median_s in found.items() if median_s is not None]

    def figures_of(self, rank: RankStatus) -> RankFigures:
        """Return the figures of one rank of the last status, without its conditions. Raises KeyError for any other."""
        assert self._last is not None
        return self._of(rank, self._last.at - self._marks[0].at, {})

    def conditions(self) -> dict[MemberKey, tuple[Condition, ...]]:
        """Return which ranks serve badly at the last sample, and why; see `pdbus.fleet.conditions`."""
        at = self._last.at if self._last is not None else 0.0
        found = {key: track.watch.conditions(track.now, at) for key, track in self._ranks.items()}
        return {key: each for key, each in found.items() if each}

    def sentences(self) -> list[str]:
        """Return `conditions` as sentences, in the order of the last status."""
        found, status = self.conditions(), self._last.status if self._last is not None else None
        ranks = [(rank, found.get((rank.instance, rank.dp_rank), ())) for rank in (status.ranks if status else ())]
        return [sentence_of(rank, each) for rank, some in ranks for each in some]

    def figures(self) -> Figures | None:
        """Return the figures over the window up to the last sample; None before the first sample. With one sample,
        rates are None."""
        last = self._last
        if last is None:
            return None
        first = self._marks[0]
        window_s = last.at - first.at
        done = last.status.counts.get("done", 0) - first.done
        unknown = {name: count for name, count in last.refused.items() if name.startswith("broker ")}
        refused_before = first.refused if first.broker else unknown | dict(first.refused)
        conditions = self.conditions()
        return Figures(
            last,
            window_s,
            tuple(self._of(rank, window_s, conditions) for rank in last.status.ranks),
            done / window_s if window_s else None,
            _grown(last.failed, first.failed),
            _grown(last.refused, refused_before),
        )

    def _of(
        self, rank: RankStatus, window_s: float, conditions: Mapping[MemberKey, tuple[Condition, ...]]
    ) -> RankFigures:
        assert self._last is not None
        key = rank.instance, rank.dp_rank
        first = self._marks[0].ranks.get(key)
        ended = rank.ended_total - (first.numbers[ENDED] if first is not None else 0)
        if ended < 0:  # the controller forgot it meanwhile, and its counts started from 0
            ended = rank.ended_total
        figures = RankFigures(
            rank,
            requests_s=ended / window_s if window_s else None,
            ttft=since(rank.ttft_counts, first.ttft if first is not None else ()),
            tpot=since(rank.tpot_counts, first.tpot if first is not None else ()),
            step_s=self._ranks[key].watch.step_s,
            median_step_s=self._ranks[key].watch.median_s,
            conditions=conditions.get(key, ()),
        )
        began = next(  # only of this start of the rank: another start has its own counts
            (
                (mark.at, seen.numbers)
                for mark in self._marks
                if (seen := mark.ranks.get(key)) is not None and seen.epoch == rank.epoch and seen.reported
            ),
            None,
        )
        return figures if began is None or rank.load is None else _with_load(figures, *began, self._last.at)


def about(event: ControllerEvent) -> str:
    """Return what an event is about, in a word."""
    if event.what.startswith("broker_"):
        return "broker"
    return ABOUT.get(event.what) or ("rank" if event.instance else "cluster")


def text_of(event: ControllerEvent) -> str:
    """Return an event of a controller as a line."""
    what = event.what.replace("_", " ")
    if event.instance:
        verb = WORDS.get(event.what, f"is {what}")
        return f"{event.instance}/{event.dp_rank} {verb}" + (f": {event.phrase}" if event.phrase else "")
    code = f" {event.code}" if event.code else ""
    return f"{what}{code}: {event.phrase}" if event.phrase else f"{what}{code}"


def _numbers(rank: RankStatus) -> array[int]:
    load = rank.load
    if load is None:
        return array("q", [0] * len(COUNTERS) + [rank.ended_total])
    sent, received = load.kv_sent_bytes_total, load.kv_received_bytes_total
    return array("q", (
        load.step, load.busy_us_total, load.prompt_tokens_total, load.admitted_tokens_total, load.cached_tokens_total,
        load.computed_tokens_total, load.output_tokens_total, UNKNOWN if sent is None else sent,
        UNKNOWN if received is None else received, rank.ended_total,
    ))  # fmt: skip


def _rank_mark(rank: RankStatus) -> _RankMark:
    return _RankMark(
        rank.epoch, rank.load is not None, _numbers(rank), _packed(rank.ttft_counts), _packed(rank.tpot_counts)
    )  # fmt: skip


def _packed(counts: Sequence[int]) -> array[int]:
    return array("I" if max(counts, default=0) < 2**32 else "Q", counts)


def _add_to(sums: list[int], counts: Iterable[int]) -> None:
    for place, count in enumerate(counts):
        if count and place < len(sums):
            sums[place] += count


def _with_load(figures: RankFigures, then: float, before: array[int], now: float) -> RankFigures:
    load, elapsed_s = figures.rank.load, now - then
    assert load is not None
    if elapsed_s <= 0:
        return figures

    def rate(name: str) -> float:
        more: int = getattr(load, name) - before[PLACE[name]]
        return max(0, more) / elapsed_s

    role = figures.rank.role
    prefills = role != "decode"
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
        busy=min(1.0, rate("busy_us_total") / 1e6) if load.busy_us_total and role == "prefill" else None,
    )


def _grown(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return each count in total and its growth since `before`; a count that restarted has not grown."""
    return {name: (count, max(0, count - before.get(name, 0))) for name, count in now.items()}
