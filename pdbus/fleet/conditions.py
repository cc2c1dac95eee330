"""The conditions of ranks that serve and yet do badly: *slow*, *full*, *link* (slow) and *cold* (cache). `pdbus
status`, `pdbus top` and pages say the same, by `Watch.conditions`. Pure.

A rank is slow when each of its steps has taken more than twice the median of the ranks of its role and model for ten
seconds: with an even number of these the lower of the two in the middle, so of two ranks one can be slow. It is full
when more than 95 % of its KV memory is in use; or when all of its run slots are, and requests wait there, or have for
two seconds in the queue for ranks of its kind (slots alone that are all in use are just good use); or when requests
have waited there for ten seconds and none was taken; at a decode rank the last counts only beside running requests,
because a request waits there for its prompt too. An engine that does not report what is needed is never slow, or never
found to take none.

Its link is slow when the KV caches that it fetches have taken more than three times the median of its kind, of three
ranks or more, both a fetch and a token: one that fetches long prompts takes longer a fetch, one that fetches short ones
longer a token, and only where bytes come slowly it is both. Its cache is cold when it began less than ten minutes ago
and found in its prefix cache less than a quarter of the median share of its kind. Both are over the last 15 to 30
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from bus.wire.messages import Load, QueueStatus, RankStatus
from pdbus.fleet.formatting import age, name_of, seconds

SLOW_TIMES = 2.0
HOLDS_S = 10.0
FULL = 0.95  # of the KV memory
WAITS_S = 2.0  # a queue counts once its first request has waited for this long
COUNTED_S = 15.0  # fetches and prompts are counted over once to twice this time
KIND = 3  # ranks of a kind, at least, for its median of fetches and hits
LINK_TIMES = 3.0
FETCHES, FETCH_S = 5, 0.02  # fewer, or quicker ones, say nothing
COLD_SHARE, COLD_S = 0.25, 600.0
PROMPT_TOKENS, HITS = 1000, 0.2  # fewer prompt tokens, or a lower share of the kind, say nothing

WORDS = {  # of a condition: of one rank, of one for some time, of several, and of one where it is over
    "slow": ("is slow", "has been slow", "are slow", "is no longer slow"),
    "full": ("is full", "has been full", "are full", "is no longer full"),
    "link": ("has a slow link", "has had a slow link", "have slow links", "has a slow link no longer"),
    "cold": ("has a cold cache", "has had a cold cache", "have cold caches", "has a cold cache no longer"),
}


class Condition(NamedTuple):
    """A condition of a rank, and the reason as a part of a sentence. Of two ranks with the same condition the one with
    more `worse` is worse off. `for_s`: the seconds for which it was seen."""

    what: Literal["slow", "full", "link", "cold"]
    why: str
    worse: float = 0.0
    for_s: float = 0.0


class _Counts(NamedTuple):
    at: float
    fetches: int
    fetch_us: int
    fetched_tokens: int
    prompt_tokens: int
    cached_tokens: int


class Watch:
    """The signs of one rank over time. `step_s`: seconds a forward step took, between the last two reports with steps
    between them; `fetch_s`: seconds a fetch and seconds a fetched token; `hits`: the share of prompt tokens that its
    cache had; `median_s`, `median_fetch_s` (of a fetch), `median_hits`: the medians of its kind. None: not known.
    `full_why`: why it is full; empty: it is not."""

    __slots__ = (
        "_began", "_cold_why", "_counts", "_epoch", "_link_why", "_load", "_slow_since", "_stepped_at",
        "_untaken_since", "fetch_s", "full_why", "hits", "median_fetch_s", "median_hits", "median_s", "step_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.median_s: float | None = None
        self.fetch_s: tuple[float, float] | None = None
        self.hits: float | None = None
        self.median_fetch_s: float | None = None
        self.median_hits: float | None = None
        self.full_why = self._link_why = self._cold_why = ""
        self._counts: tuple[_Counts, _Counts] | None = None  # from when on it counts, and will next
        self._began = ""
        self._load: Load | None = None
        self._epoch = 0
        self._stepped_at = 0.0
        self._slow_since: float | None = None
        self._untaken_since: float | None = None

    def see(self, rank: RankStatus, at: float, queued: bool) -> None:
        """Take in the rank's status at `at` seconds; `queued`: requests wait in the queue for ranks of its kind."""
        load, before = rank.load, self._load
        if rank.epoch != self._epoch or load is None or before is None:
            self._epoch, self.step_s, self._slow_since, self._untaken_since = rank.epoch, None, None, None
            self._counts = self.fetch_s = self.hits = None
        elif load is not before:
            steps, busy_us = load.step - before.step, load.busy_us_total - before.busy_us_total
            if steps > 0 and busy_us > 0:
                self.step_s, self._stepped_at = busy_us / steps / 1e6, at
            reports = load.admitted_tokens_total > 0
            took = load.admitted_tokens_total > before.admitted_tokens_total
            if not reports or took or not load.waiting or (rank.role == "decode" and not load.running):
                self._untaken_since = None
            elif self._untaken_since is None:
                self._untaken_since = at
        if self.step_s is not None and at - self._stepped_at > HOLDS_S:
            self.step_s = None
        self._load = load
        if load is not None and (load.fetches_total or load.admitted_tokens_total):
            self._count(load, at)
        began = "was started again" if rank.restarts else "began"
        self._began = f"{began} {age(rank.epoch_age_s)} ago" if 0 <= rank.epoch_age_s < COLD_S else ""
        self.full_why = "" if load is None or rank.state != "ready" else self._full_by(rank, load, at, queued)

    def _count(self, load: Load, at: float) -> None:
        now = _Counts(
            at, load.fetches_total, load.fetch_us_total, load.fetched_tokens_total, load.admitted_tokens_total,
            load.cached_tokens_total,
        )  # fmt: skip
        since, following = self._counts or (now, now)
        if at - following.at >= COUNTED_S:
            since, following = following, now
        self._counts = since, following
        if at - since.at < COUNTED_S:
            return
        fetches, tokens = now.fetches - since.fetches, now.fetched_tokens - since.fetched_tokens
        took_s = (now.fetch_us - since.fetch_us) / 1e6
        self.fetch_s = (took_s / fetches, took_s / tokens) if fetches >= FETCHES and tokens > 0 else None
        prompt = now.prompt_tokens - since.prompt_tokens
        self.hits = (now.cached_tokens - since.cached_tokens) / prompt if prompt >= PROMPT_TOKENS else None

    def compare_link(self, median_s: tuple[float, float] | None) -> None:
        """Compare what its fetches take with the medians of its kind; None: there are too few to say."""
        self._link_why = ""
        self.median_fetch_s = median_s[0] if median_s is not None else None
        if self.fetch_s is None or median_s is None or self.fetch_s[0] < FETCH_S:
            return
        if all(mine > LINK_TIMES * median for mine, median in zip(self.fetch_s, median_s, strict=True)):
            self._link_why = f"{seconds(self.fetch_s[0])} to fetch a KV cache, and {seconds(median_s[0])} is the median"

    def compare_hits(self, median: float | None) -> None:
        """Compare its share of hits with the median of its kind; None: there are too few to say."""
        self._cold_why = ""
        self.median_hits = median
        if self.hits is None or median is None or median < HITS or not self._began:
            return
        if self.hits < COLD_SHARE * median:
            hits = f"{self.hits:.0%} of its prompt tokens were in its prefix cache, and {median:.0%} is the median"
            self._cold_why = f"it {self._began}; {hits}"

    def compare(self, median_s: float | None, at: float) -> None:
        """Compare its step time with the median of its kind; None: no step time is known of it."""
        self.median_s = median_s
        if self.step_s is None or median_s is None or self.step_s <= SLOW_TIMES * median_s:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = at

    def is_slow(self, at: float) -> bool:
        """Return true if it has been slow for long enough."""
        return self._slow_since is not None and at - self._slow_since >= HOLDS_S

    def conditions(self, rank: RankStatus, at: float) -> tuple[Condition, ...]:
        """Return what is to be said of the rank now; empty: it does well, or it does not serve."""
        found, load = [], rank.load
        if self.full_why and load is not None:
            found.append(Condition("full", self.full_why, load.waiting + (taken(rank) or 0.0)))
        if rank.state == "ready" and self.is_slow(at) and self.step_s is not None:
            median = f"{seconds(self.median_s)} is the median of {rank.role} ranks of {rank.model}"
            found.insert(0, Condition("slow", f"{seconds(self.step_s)} a step, and {median}", self.step_s))
        if rank.state == "ready":
            kind = f"of {rank.role} ranks of {rank.model}"
            if self._link_why and self.fetch_s is not None:
                found.append(Condition("link", f"{self._link_why} {kind}", self.fetch_s[0]))
            if self._cold_why and self.hits is not None:
                found.append(Condition("cold", f"{self._cold_why} {kind}", -self.hits))
        return tuple(found)

    def _full_by(self, rank: RankStatus, load: Load, at: float, queued: bool) -> str:
        if load.kv_capacity and (held := held_tokens(rank, load)) > FULL * load.kv_capacity:
            why = f"{held / load.kv_capacity:.0%} of its KV memory is in use"
            return f"{why}, {load.kv_pinned / load.kv_capacity:.0%} is kept for other ranks" if load.kv_pinned else why
        if 0 < load.max_running <= load.running and (load.waiting or queued):
            waits = _waiting(load.waiting) if load.waiting else "requests wait at the controller for such a rank"
            return f"{load.running} of {load.max_running} run slots are in use, and {waits}"
        if self._untaken_since is not None and at - self._untaken_since >= HOLDS_S:
            return f"{_waiting(load.waiting)}, and none was taken for {seconds(at - self._untaken_since)}"
        return ""


def _waiting(number: int) -> str:
    return "1 request waits" if number == 1 else f"{number} requests wait"


def sentence_of(rank: RankStatus, condition: Condition) -> str:
    """Return a condition as a sentence."""
    now, for_some_time, *_ = WORDS[condition.what]
    verb = f"{for_some_time} for {age(condition.for_s)}" if condition.for_s >= 1.0 else now
    return f"{name_of(rank)} {verb}: {condition.why}"


def held_tokens(rank: RankStatus, load: Load) -> int:
    """Return the tokens of KV memory that are neither free nor reclaimable: with those that a decode rank lends."""
    return load.kv_tokens + (load.kv_pinned or 0 if rank.role == "decode" else 0)


def taken(rank: RankStatus) -> float | None:
    """Return the share of a rank's room that is taken, 1 at most: of its run slots by the requests that the controller
    believes to be there, or of its KV memory by live and awaited tokens, whichever is more. None: not known."""
    load = rank.load
    if load is None or not (load.max_running or load.kv_capacity):
        return None
    tokens = held_tokens(rank, load) + load.waiting_tokens + rank.in_flight_tokens
    slots = max(rank.estimate_requests, load.running) / load.max_running if load.max_running else 0.0
    return min(1.0, max(slots, tokens / load.kv_capacity if load.kv_capacity else 0.0))


def watch_all(ranks: Iterable[tuple[RankStatus, Watch]], at: float, queue: QueueStatus | None = None) -> None:
    """Take in the status of all ranks at `at` seconds and what waits in the queue, and compare each rank with its
    kind."""
    waits = queue.kinds if queue is not None and queue.oldest_s >= WAITS_S else ()
    wanted = {(role, kind.model) for kind in waits if not kind.pinned for role in kind.roles}
    kinds: dict[tuple[str, str], list[Watch]] = {}
    for rank, watch in ranks:
        watch.see(rank, at, bool(wanted) and not wanted.isdisjoint(((rank.role, rank.model), (rank.role, ""))))
        if rank.state == "ready":
            kinds.setdefault((rank.role, rank.model), []).append(watch)
        elif watch._slow_since is not None:
            watch._slow_since = None
    for watches in kinds.values():
        steps = sorted([watch.step_s for watch in watches if watch.step_s is not None])
        fetches = [watch.fetch_s for watch in watches if watch.fetch_s is not None]
        hits = sorted([watch.hits for watch in watches if watch.hits is not None])
        fetch_s: tuple[float, float] | None = None
        if len(fetches) >= KIND:
            a_fetch, a_token = (_median(sorted(column)) for column in zip(*fetches, strict=True))
            fetch_s = a_fetch, a_token
        of_hits = _median(hits) if len(hits) >= KIND else None
        for watch in watches:
            watch.compare(_median(steps) if steps else None, at)
            watch.compare_link(fetch_s)
            watch.compare_hits(of_hits)


def _median(ordered: list[float]) -> float:
    return ordered[(len(ordered) - 1) // 2]
