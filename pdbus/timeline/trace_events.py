"""The trace events of a timeline, in the Trace Event Format (JSON), which Perfetto and chrome://tracing open. Pure.

A rank is a process: its steps are slices of one thread, chunks of prompts and KV transfers those of further threads, as
many as run at once; the decode batch, KV tokens and load are counters. A transfer is an arrow to its slice, from what
its source last did for the request: the last chunk of its prompt (or the prompt, where chunks are not said), or that it
began to lend or send its KV cache. An arrow is drawn from the end of its first slice to the beginning of its second, so
no transfer begins before its source was ready: one that does by the two clocks is cut, and says by how much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from bus.runtime.cli import printable
from bus.wire.messages import RankStep, RankWork
from pdbus.timeline.facts import LoadSample, RankTrack, Timeline

TraceEvent: TypeAlias = dict[str, Any]

ABOUT = 1  # the process with the notes
ROUNDING_US = 1  # no slice is shorter
IDLE_US = 20_000  # a rank that begins no step for so long has an empty batch
ROLES = {"prefill": 0, "unified": 1, "decode": 2}
WORK = {"chunk": "prefill chunks", "prompt": "prompts", "lend": "KV out"}
SOURCES = ("lend", "chunk", "prompt")  # of arrows: the first that is known of a request
TRANSFERS = {"fetch": "KV", "read": "KV read back"}


@dataclass(slots=True)
class Counts:
    """The numbers of what was written: slices (instants too), counter values and arrows. Of these, `clamped` were
    cut by `worst_us` at most, `beyond` of them by more than is known of the two clocks."""

    slices: int = 0
    counters: int = 0
    flows: int = 0
    clamped: int = 0
    beyond: int = 0
    worst_us: int = 0

    def __str__(self) -> str:
        return f"{self.slices:,} slices, {self.counters:,} counter values, {self.flows:,} arrows"


@dataclass(slots=True)
class _Source:
    """A slice from which an arrow may start, by the timeline's clock."""

    pid: int
    tid: int
    began_us: int
    end_us: int
    rtt_us: int


@dataclass(slots=True)
class _Threads:
    """The threads of one process that hold slices of one kind, no two of which overlap in a thread."""

    pid: int
    name: str
    numbers: count[int]
    free_us: list[int] = field(default_factory=list)
    tids: list[int] = field(default_factory=list)

    def take(self, began_us: int, end_us: int) -> int:
        """Return the thread for a slice; call it in the order of beginnings."""
        for at, free_us in enumerate(self.free_us):
            if free_us <= began_us:
                self.free_us[at] = end_us
                return self.tids[at]
        self.free_us.append(end_us)
        self.tids.append(next(self.numbers))
        return self.tids[-1]

    def named(self) -> Iterator[TraceEvent]:
        for at, tid in enumerate(self.tids):
            yield _named("thread", self.pid, tid, self.name + (f" {at + 1}" if at else ""))


class TraceEvents:
    """The trace events of one timeline. Iterate it once; `counts` is complete then, and `zero_us` is the time of the
    first event, from which the others count."""

    def __init__(self, timeline: Timeline) -> None:
        self.counts = Counts()
        self.timeline = timeline
        self.ranks = sorted(timeline.ranks, key=lambda rank: (ROLES[rank.role], _natural(rank.name)))
        self.controllers = sorted({*timeline.queues, *timeline.events})
        self.zero_us = min(_times(timeline), default=0)
        self._numbers = count(ABOUT + 1 + len(self.controllers) + len(self.ranks))
        # by rank, rid, attempt and kind, in order of time
        self._sources: dict[tuple[str, str, int, str], list[_Source]] = {}

    def __iter__(self) -> Iterator[TraceEvent]:
        pids = count(ABOUT + 1)
        for name in self.controllers:
            yield from self._controller(name, next(pids))
        placed = [(rank, next(pids)) for rank in self.ranks]
        for rank, pid in placed:
            yield from self._steps(rank, pid)
        for rank, pid in placed:  # after all that arrows may start from
            yield from self._transfers(rank, pid)
        yield _named("process", ABOUT, 0, "about this recording")
        tid = next(self._numbers)
        yield _named("thread", ABOUT, tid, "notes")
        for note in self.notes():
            yield self._instant(ABOUT, tid, self.zero_us, note, "note", {})

    def notes(self) -> list[str]:
        """Return what a reader has to know: what was recorded, what is missing of which ranks, and which arrows were
        cut. Complete once the other events were made."""
        counts, notes = self.counts, [self.timeline.title, *self.timeline.notes]
        notes += [f"{rank.name}: {rank.note}" for rank in self.ranks if rank.note]
        if unknown := [rank.name for rank in self.ranks if rank.rtt_us < 0]:
            notes.append(f"clock not known, taken as it is: {', '.join(unknown)}")
        if counts.clamped:
            by = "some clocks disagree by more than is known of them" if counts.beyond else "within what is known"
            notes.append(
                f"{counts.clamped} of {counts.flows} transfers began before their source was ready, by the ranks' "
                f"clocks, and were cut by {counts.worst_us} µs at most; {counts.beyond} of them by more than the "
                f"clocks' bound ({by})"
            )
        return notes

    # --- a controller ---------------------------------------------------------------------------------------------

    def _controller(self, name: str, pid: int) -> Iterator[TraceEvent]:
        yield _named("process", pid, 0, name)
        yield from self._counter(pid, "waiting requests", self.timeline.queues.get(name, ()))
        events = self.timeline.events.get(name)
        if events:
            tid = next(self._numbers)
            yield _named("thread", pid, tid, "events")
            for event in events:
                rank = f"{event.instance}/{event.dp_rank}" if event.instance else ""
                about = {"rank": rank, "code": event.code, "phrase": event.phrase, "trouble": event.bad}
                what = f"{event.what} {rank}".strip()
                yield self._instant(pid, tid, event.at_us, what, "event", about)

    # --- a rank ---------------------------------------------------------------------------------------------------

    def _steps(self, rank: RankTrack, pid: int) -> Iterator[TraceEvent]:
        yield _named("process", pid, 0, _title(rank))
        steps = sorted(rank.steps, key=lambda step: step.began_us)
        lines = _Threads(pid, "steps", self._numbers)
        batch: list[tuple[int, int]] = []
        for at, step in enumerate(steps):
            began_us = step.began_us - rank.offset_us
            end_us = began_us + max(1, step.duration_us)
            next_us = steps[at + 1].began_us - rank.offset_us if at + 1 < len(steps) else end_us + IDLE_US + 1
            args = {"number": step.number, "decode rows": step.decode_rows, "prompt tokens": step.prompt_tokens}
            shown_us = max(began_us + 1, min(end_us, next_us))
            tid = lines.take(began_us, shown_us)
            yield self._slice(pid, tid, began_us, shown_us, _kind(step), "step", args)
            batch.append((began_us, step.decode_rows))
            if next_us - end_us > IDLE_US:
                batch.append((end_us, 0))
        threads = {what: _Threads(pid, name, self._numbers) for what, name in WORK.items()}
        for work in sorted(rank.work, key=lambda work: work.began_us):
            if work.what not in WORK:
                continue
            began_us = work.began_us - rank.offset_us
            end_us = began_us + max(1, work.duration_us)
            tid = threads[work.what].take(began_us, end_us)
            args = {"tokens": work.tokens}
            if work.what == "chunk":
                args |= {"before": work.before, "prompt": work.prompt_tokens}
            yield self._slice(pid, tid, began_us, end_us, work.rid, work.what, args)
            if work.what != "chunk" or work.before + work.tokens >= work.prompt_tokens:
                key = rank.name, work.rid, work.attempt, work.what
                self._sources.setdefault(key, []).append(_Source(pid, tid, began_us, end_us, rank.rtt_us))
        yield from lines.named()
        for each in threads.values():
            yield from each.named()
        if steps:
            yield from self._counter(pid, "decode batch", batch)
            yield from self._counter(pid, "KV tokens", [(s.began_us - rank.offset_us, s.kv_tokens) for s in steps])
        for name, values in _loads(rank.samples, kv=not steps).items():
            yield from self._counter(pid, name, values)

    def _transfers(self, rank: RankTrack, pid: int) -> Iterator[TraceEvent]:
        placed = []
        for work in rank.work:
            if work.what not in TRANSFERS:
                continue
            began_us = work.began_us - rank.offset_us
            end_us = began_us + max(1, work.duration_us)
            source, cut_us = self._source(work, end_us), 0
            if source is not None and began_us < source.end_us:
                if source.end_us - began_us > ROUNDING_US:
                    cut_us = source.end_us - began_us
                    self._cut(cut_us, source.rtt_us, rank.rtt_us)
                began_us = source.end_us
                end_us = max(end_us, began_us + 1)
            placed.append((began_us, end_us, work, source, cut_us))
        placed.sort(key=lambda each: each[:2])
        threads = _Threads(pid, "KV in", self._numbers)
        for began_us, end_us, work, source, cut_us in placed:
            tid = threads.take(began_us, end_us)
            args = {"tokens": work.tokens, "from": f"{work.instance}/{work.dp_rank}" if work.instance else ""}
            if cut_us:
                args["cut by µs"] = cut_us
            yield self._slice(pid, tid, began_us, end_us, f"{TRANSFERS[work.what]} {work.rid}", work.what, args)
            if source is not None:
                self.counts.flows += 1
                flow = {"cat": "KV", "name": "KV transfer", "id": self.counts.flows}
                yield flow | {"ph": "s", "pid": source.pid, "tid": source.tid, "ts": source.began_us - self.zero_us}
                yield flow | {"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": began_us - self.zero_us}
        yield from threads.named()

    def _source(self, work: RankWork, end_us: int) -> _Source | None:
        """Return the last slice of the other rank that made the transfer possible: the latest that began before its
        end, or else the first. None: it was not recorded."""
        of = f"{work.instance}/{work.dp_rank}", work.rid, work.attempt
        known = next((found for what in SOURCES if (found := self._sources.get((*of, what)))), [])
        return next((source for source in reversed(known) if source.began_us < end_us), known[0] if known else None)

    def _cut(self, cut_us: int, *rtts_us: int) -> None:
        counts = self.counts
        counts.clamped += 1
        counts.worst_us = max(counts.worst_us, cut_us)
        counts.beyond += min(rtts_us) >= 0 and 2 * cut_us > sum(rtts_us)

    # --- events ---------------------------------------------------------------------------------------------------

    def _slice(
        self, pid: int, tid: int, began_us: int, end_us: int, name: str, cat: str, args: dict[str, Any]
    ) -> TraceEvent:
        self.counts.slices += 1
        return {
            "ph": "X", "pid": pid, "tid": tid, "ts": began_us - self.zero_us, "dur": end_us - began_us,
            "name": printable(name), "cat": cat, "args": {key: value for key, value in args.items() if value},
        }  # fmt: skip

    def _instant(self, pid: int, tid: int, at_us: int, name: str, cat: str, args: dict[str, Any]) -> TraceEvent:
        self.counts.slices += 1
        return {
            "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": at_us - self.zero_us,
            "name": printable(name), "cat": cat, "args": {key: value for key, value in args.items() if value},
        }  # fmt: skip

    def _counter(self, pid: int, name: str, values: Iterable[tuple[int, int]]) -> Iterator[TraceEvent]:
        """Give the changes of a counter, one at a time: of several values at once the last counts. Perfetto shows it as
        the event's name and the value's, as in `KV tokens`."""
        last = None
        of, _, unit = name.partition(" ")
        for at_us, value in dict(values).items():
            if value != last:
                last = value
                self.counts.counters += 1
                yield {"ph": "C", "pid": pid, "ts": at_us - self.zero_us, "name": of, "args": {unit: value}}


def _title(rank: RankTrack) -> str:
    return rank.name if rank.name.startswith(rank.role) else f"{rank.name} ({rank.role})"


def _kind(step: RankStep) -> str:
    if not step.prompt_tokens:
        return "decode"
    return "prefill and decode" if step.decode_rows else "prefill"


def _loads(samples: list[LoadSample], *, kv: bool) -> dict[str, list[tuple[int, int]]]:
    """Return the counters of a rank's load; its KV tokens too where its steps do not say them."""
    names = {"running": "running requests", "waiting": "waiting requests"} | ({"kv_tokens": "KV tokens"} if kv else {})
    return {name: [(each.at_us, getattr(each, key)) for each in samples] for key, name in names.items()}


def _named(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    """Return the event that names a process or thread. Perfetto orders them by their numbers."""
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": printable(name)}}


def _times(timeline: Timeline) -> Iterator[int]:
    for rank in timeline.ranks:
        yield from (step.began_us - rank.offset_us for step in rank.steps)
        yield from (work.began_us - rank.offset_us for work in rank.work)
        yield from (sample.at_us for sample in rank.samples)
    for values in timeline.queues.values():
        yield from (at_us for at_us, _ in values)
    for events in timeline.events.values():
        yield from (event.at_us for event in events)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `decode-10/0` behind `decode-9/0`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
