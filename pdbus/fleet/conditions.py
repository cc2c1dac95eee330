"""The conditions of ranks that serve and yet do badly: *slow* and *full*. `pdbus status`, `pdbus top` and pages say the
same, by `Watch.conditions`. Pure.

A rank is slow when each of its steps has taken more than twice the median of the ranks of its role and model for ten
seconds: with an even number of these the lower of the two in the middle, so of two ranks one can be slow. It is full
when its KV memory or its run slots are in use by more than 95 %, or when requests have waited there for ten seconds and
none was taken; at a decode rank the last counts only beside running requests, because a request waits there for its
prompt too. An engine that does not report what is needed is never slow, or never found to take none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from bus.wire.messages import Load, RankStatus
from pdbus.fleet.formatting import name_of, seconds

SLOW_TIMES = 2.0
HOLDS_S = 10.0
FULL = 0.95


class Condition(NamedTuple):
    """A condition of a rank, and the reason as a part of a sentence."""

    what: Literal["slow", "full"]
    why: str


class Watch:
    """The signs of one rank over time. `step_s`: seconds a forward step took, between the last two reports with steps
    between them; None: not known. `full_why`: why it is full; empty: it is not."""

    __slots__ = ("_epoch", "_load", "_median_s", "_slow_since", "_stepped_at", "_untaken_since", "full_why", "step_s")

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.full_why = ""
        self._load: Load | None = None
        self._epoch = 0
        self._stepped_at = 0.0
        self._slow_since: float | None = None
        self._median_s = 0.0
        self._untaken_since: float | None = None

    def see(self, rank: RankStatus, at: float) -> None:
        """Take in the rank's status at `at` seconds."""
        load, before = rank.load, self._load
        if rank.epoch != self._epoch or load is None or before is None:
            self._epoch, self.step_s, self._slow_since, self._untaken_since = rank.epoch, None, None, None
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
        self.full_why = "" if load is None or rank.state != "ready" else self._full_by(rank, load, at)

    def compare(self, median_s: float, at: float) -> None:
        """Compare its step time with the median of its kind."""
        if self.step_s is None or self.step_s <= SLOW_TIMES * median_s:
            self._slow_since = None
        else:
            self._slow_since, self._median_s = at if self._slow_since is None else self._slow_since, median_s

    def is_slow(self, at: float) -> bool:
        """Return true if it has been slow for long enough."""
        return self._slow_since is not None and at - self._slow_since >= HOLDS_S

    def conditions(self, rank: RankStatus, at: float) -> tuple[Condition, ...]:
        """Return what is to be said of the rank now; empty: it does well, or it does not serve."""
        found = [Condition("full", self.full_why)] if self.full_why else []
        if rank.state == "ready" and self.is_slow(at) and self.step_s is not None:
            median = f"{seconds(self._median_s)} is the median of {rank.role} ranks of {rank.model}"
            found.insert(0, Condition("slow", f"{seconds(self.step_s)} a step, and {median}"))
        return tuple(found)

    def _full_by(self, rank: RankStatus, load: Load, at: float) -> str:
        if load.kv_capacity and (held := held_tokens(rank, load)) > FULL * load.kv_capacity:
            why = f"{held / load.kv_capacity:.0%} of its KV memory is in use"
            return f"{why}, {load.kv_pinned / load.kv_capacity:.0%} is kept for other ranks" if load.kv_pinned else why
        if load.max_running and load.running > FULL * load.max_running:
            return f"{load.running} of {load.max_running} run slots are in use, and {load.waiting} requests wait"
        if self._untaken_since is not None and at - self._untaken_since >= HOLDS_S:
            return f"{load.waiting} requests wait, and none was taken for {seconds(at - self._untaken_since)}"
        return ""


def sentence_of(rank: RankStatus, condition: Condition) -> str:
    """Return a condition as a sentence."""
    return f"{name_of(rank)} is {condition.what}: {condition.why}"


def held_tokens(rank: RankStatus, load: Load) -> int:
    """Return the tokens of KV memory that are neither free nor reclaimable: with those that a decode rank lends."""
    return load.kv_tokens + (load.kv_pinned or 0 if rank.role == "decode" else 0)


def watch_all(ranks: Iterable[tuple[RankStatus, Watch]], at: float) -> None:
    """Take in the status of all ranks at `at` seconds, and compare each with its kind."""
    kinds: dict[tuple[str, str], list[Watch]] = {}
    for rank, watch in ranks:
        watch.see(rank, at)
        if watch.step_s is not None and rank.state == "ready":
            kinds.setdefault((rank.role, rank.model), []).append(watch)
        elif watch._slow_since is not None:
            watch._slow_since = None
    for watches in kinds.values():
        steps = sorted(watch.step_s for watch in watches if watch.step_s is not None)
        for watch in watches:
            watch.compare(steps[(len(steps) - 1) // 2], at)
