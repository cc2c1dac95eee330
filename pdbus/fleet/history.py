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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from bus.histogram import BOUNDS_S, quantile, since
from bus.wire.codes import MEANINGS
from bus.wire.messages import ControllerEvent, MemberKey, RankStatus
from pdbus.fleet.conditions import WAITS_S, WORDS, Condition, Watch, held_tokens, sentence_of, watch_all
from pdbus.fleet.figures import DEAD, Figures, RankFigures, Sample, slo_of
from pdbus.fleet.formatting import by_number
from pdbus.fleet.spells import SETTLE_S, Spells

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
LOST_SHARE, FEW = 0.01, 10  # fewer failures, of all that ended or in all, are not worth a sentence
FOLDED, FOLDED_S = 3, 2.0  # so many joins within so many seconds are one event
ABOUT = {  # what a controller's event of no rank alone is about, in a word
    "failed": "requests", "adopted": "requests", "unreachable": "clients", "refused": "refusals", "drain_ordered":
    "order", "reloaded": "order", "policy_failed": "method", "key_revoked": "keys", "started": "controller",
}  # fmt: skip
VERBS = {  # of a rank's event; others have their own word
    "joined": "joined", "restarted": "was started again", "forgotten": "is forgotten", "suspect": "may be lost",
    "drain_ordered": "shall drain", "draining": "drains",
}  # fmt: skip


class FleetRow(NamedTuple):
    """The fleet at one moment: `at` is in seconds on the sampler's monotonic clock, `wall` in seconds since 1970. Rates
    (`_s`) are since the row before, quantiles (seconds, NaN: none) over the last ten rows. `kv_`: the share of a role's
    KV memory that is in use; `prefill_busy`: the share of the time that prefill ranks computed; NaN: not known."""

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
    kv_prefill: float
    kv_decode: float
    kv_unified: float
    prefill_busy: float
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


Spell: TypeAlias = tuple[str, MemberKey | None]  # a condition of a rank, or what is of the fleet
OF_FLEET = {  # what is of the fleet, where it begins, and where it is over
    "queue": ("requests wait at the controller", "requests no longer wait at the controller"),
    "failing": ("requests fail or are refused", "requests no longer fail"),
}  # fmt: skip
RECOVERIES = frozenset({"joined", "restarted", "ready"})  # no trouble, though the controller marks one after a loss
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


class Losses(NamedTuple):
    """The requests that were refused for want of room, and those that failed, by code, and how many were done, in
    `window_s` seconds."""

    refused: Mapping[str, int]
    failed: Mapping[str, int]
    done: int
    window_s: float


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
        self._grown = dict.fromkeys(("prompt", "cached", "output", "sent", "busy_us"), 0)  # since the last row
        self._latencies: deque[tuple[list[int], list[int]]] = deque(maxlen=LATENCY_ROWS)
        self._fresh = [0] * (len(BOUNDS_S) + 1), [0] * (len(BOUNDS_S) + 1)  # ttft and tpot since the last row
        self._counts_then: dict[str, int] = {}
        self._slos: deque[tuple[float, int, int]] = (
            deque()
        )  # of first tokens: when, and how many kept and missed theirs
        self._rank_row_at = -math.inf
        self._found: dict[MemberKey, tuple[Condition, ...]] = {}
        self._spells: Spells[Spell] = Spells()
        self._suspects: list[ControllerEvent] = []  # that are shown with the next sample, unless that has their loss

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
        found = ((key, track.watch.conditions(track.now, at)) for key, track in self._ranks.items())
        self._found = {key: each for key, each in found if each}
        self._follow_spells(sample)
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
        if events:
            self.next_event = events[-1].number + 1
        lost = {(event.instance, event.dp_rank) for event in events if event.what == "lost"}
        before = [event for event in self._suspects if (event.instance, event.dp_rank) not in lost]
        self._suspects = [event for event in events if event.what == "suspect"]
        self.news.extend(_news_of([*before, *(event for event in events if event.what != "suspect")]))
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

    def _follow_spells(self, sample: Sample) -> None:
        """Take in what holds now, and make events of what began or ended some seconds ago."""
        queue = sample.status.queue
        holding: list[Spell] = [(each.what, key) for key, some in self._found.items() for each in some]
        holding += [("queue", None)] if queue is not None and queue.oldest_s >= WAITS_S else []
        holding += [("failing", None)] if self.losses() is not None else []
        fresh, ended = self._spells.see(holding, sample.at)
        ended = [each for each in ended if each[1] is None or self._serves(each[1])]
        for over, spells in ((False, fresh), (True, ended)):
            for what in dict.fromkeys(what for what, _ in spells):
                keys = sorted((key for its, key in spells if its == what and key is not None), key=by_number)
                text = _spell_text(what, keys, over)
                bad = what == "failing" and not over
                self.news.append(News(sample.wall - SETTLE_S, "rank" if keys else "requests", text, bad))

    def _serves(self, key: MemberKey) -> bool:
        track = self._ranks.get(key)
        return track is not None and track.now.state == "ready"

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
            if rank.role == "prefill":
                grown["busy_us"] += max(0, load.busy_us_total - was.busy_us_total)
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
        alive = [track.now for track in tracks if track.now.load is not None and track.now.state not in DEAD]
        kv = _kv_shares(alive)
        computing = sum(
            rank.role == "prefill" and rank.load is not None and rank.load.busy_us_total > 0 for rank in alive
        )
        prompt_s, cached_s, output_s, sent_s, busy_us_s = map(rate, self._grown.values())
        ttft_p50_s, ttft_p99_s, tpot_p50_s, tpot_p99_s = latencies
        self.rows.append(
            FleetRow(
                at=sample.at, wall=sample.wall, ranks=len(tracks),
                ready=sum(track.now.state == "ready" for track in tracks), requests=counts.get("requests", 0),
                queued=counts.get("queue_requests", 0), done_s=since_then("done"), failed_s=since_then("failed"),
                prompt_s=prompt_s, cached_s=cached_s, output_s=output_s, kv_sent_bytes_s=sent_s, ttft_p50_s=ttft_p50_s,
                ttft_p99_s=ttft_p99_s, tpot_p50_s=tpot_p50_s, tpot_p99_s=tpot_p99_s,
                kv_prefill=kv["prefill"], kv_decode=kv["decode"], kv_unified=kv["unified"],
                prefill_busy=busy_us_s / 1e6 / computing if computing else math.nan,
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

    def losses(self) -> Losses | None:
        """Return the requests that were lost in the window, without those that clients caused; None: too few to say."""
        if self._last is None:
            return None
        first = self._marks[0]
        grown = {code: new for code, (_, new) in _grown(self._last.failed, first.failed).items() if new}
        refused = {code: new for code, new in grown.items() if _is_refusal(code)}
        failed = {code: new for code, new in grown.items() if code not in refused and not _of_client(code)}
        done = max(0, self._last.status.counts.get("done", 0) - first.done)
        lost = sum(refused.values()) + sum(failed.values())
        if lost < FEW or lost <= LOST_SHARE * (lost + done):
            return None
        return Losses(refused, failed, done, self._last.at - first.at)

    def prefill_busy(self) -> float | None:
        """Return the share of the last ten seconds in which prefill ranks computed; None: not known."""
        rows = (self.rows[-back] for back in range(1, min(LATENCY_ROWS, len(self.rows)) + 1))
        known = [row.prefill_busy for row in rows if not math.isnan(row.prefill_busy)]
        return min(1.0, sum(known) / len(known)) if known else None

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

    def fetch_s(self, key: MemberKey) -> float | None:
        """Return the seconds that a fetch of a KV cache took a rank lately; None: not known."""
        track = self._ranks.get(key)
        return track.watch.fetch_s[0] if track is not None and track.watch.fetch_s is not None else None

    def hits(self, key: MemberKey) -> float | None:
        """Return the share of a rank's prompt tokens that its prefix cache had lately; None: not known."""
        track = self._ranks.get(key)
        return track.watch.hits if track is not None else None

    def medians(self) -> list[tuple[str, str, float | None, float | None, float | None]]:
        """Return the medians of each role and model: seconds a forward step and a fetch of a KV cache, and the share of
        hits; None: not known."""
        ready = (track for track in self._ranks.values() if track.now.state == "ready")
        watches = {(track.now.role, track.now.model): track.watch for track in ready}
        return [(*kind, its.median_s, its.median_fetch_s, its.median_hits) for kind, its in watches.items()]

    def figures_of(self, rank: RankStatus) -> RankFigures:
        """Return the figures of one rank of the last status, without its conditions. Raises KeyError for any other."""
        assert self._last is not None
        return self._of(rank, self._last.at - self._marks[0].at, {})

    def conditions(self) -> dict[MemberKey, tuple[Condition, ...]]:
        """Return which ranks serve badly at the last sample, and why; see `pdbus.fleet.conditions`."""
        return {
            key: tuple(each._replace(for_s=self.lasted_s(each.what, key) or 0.0) for each in some)
            for key, some in self._found.items()
        }

    def lasted_s(self, what: str, key: MemberKey | None = None) -> float | None:
        """Return for how many seconds a condition of a rank was seen; or, without a rank, that requests wait (`queue`),
        or that they are lost (`failing`). None: it is not there."""
        began = self._spells.began((what, key))
        return self._last.at - began if began is not None and self._last is not None else None

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
        verb = VERBS.get(event.what, f"is {what}")
        return f"{event.instance}/{event.dp_rank} {verb}" + (f": {event.phrase}" if event.phrase else "")
    code = f" {event.code}" if event.code else ""
    return f"{what}{code}: {event.phrase}" if event.phrase else f"{what}{code}"


def _news_of(events: Sequence[ControllerEvent]) -> Iterator[News]:
    """Give the events as lines: joins of one kind that came within a moment are one."""
    joins: list[ControllerEvent] = []
    for event in events:
        if joins and (event.what != "joined" or event.phrase != joins[0].phrase or _apart(event, joins[0])):
            yield from _joins(joins)
            joins = []
        if event.what == "joined":
            joins.append(event)
        else:
            yield _news(event, text_of(event))
    yield from _joins(joins)


def _joins(events: list[ControllerEvent]) -> Iterator[News]:
    if len(events) < FOLDED:
        return (_news(event, text_of(event)) for event in events)
    role, _, of_model = events[0].phrase.partition(" ")
    return iter([_news(events[-1], f"{len(events)} {role} ranks {of_model} joined")])


def _apart(one: ControllerEvent, other: ControllerEvent) -> bool:
    return abs(one.at_us - other.at_us) > FOLDED_S * 1e6


def _news(event: ControllerEvent, text: str) -> News:
    return News(event.at_us / 1e6, about(event), text, event.bad and event.what not in RECOVERIES, event)


def _spell_text(what: str, keys: list[MemberKey], over: bool) -> str:
    """Return what began, or is over, of the fleet or of ranks, as an event."""
    if not keys:
        return OF_FLEET[what][over]
    names = [f"{instance}/{dp_rank}" for instance, dp_rank in keys]
    one, _, several, no_longer = WORDS[what]
    if len(names) < FOLDED:
        return ", ".join(f"{name} {no_longer if over else one}" for name in names)
    return f"{names[0]} and {len(names) - 1} more {several}{' no longer' if over else ''}"


def _kv_shares(ranks: Iterable[RankStatus]) -> dict[str, float]:
    """Return the share of the KV memory in use by role, NaN where it is not known."""
    sums = {role: [0, 0] for role in ("prefill", "decode", "unified")}
    for rank in ranks:
        if rank.load is not None and rank.role in sums:
            its = sums[rank.role]
            its[0] += held_tokens(rank, rank.load)
            its[1] += rank.load.kv_capacity
    return {role: held / capacity if capacity else math.nan for role, (held, capacity) in sums.items()}


def _is_refusal(code: str) -> bool:
    """Return true if the request was one too many."""
    return code in MEANINGS and MEANINGS[code].status == 429


def _of_client(code: str) -> bool:
    """Return true if the client asked for what was wrong, or for the end."""
    return code in MEANINGS and MEANINGS[code].severity == "debug"


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
