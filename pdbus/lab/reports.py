"""Load reports on their way from ranks to choosers. Owns their times, their loss and their order.

A report only informs later decisions, so it needs no event of its own. The reports due since a rank's last change are
made before it changes again, or when a chooser reads, and share one look at the state in between. Only the last report
that has come to a chooser counts, because each overwrites the one before. A test checks that this equals making each
report at its time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import TypeAlias

from msgspec.structs import replace

from bus.wire.messages import Load, Submit
from pdbus.lab.choosers import Chooser
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.rank import VirtualRank
from pdbus.lab.scheduler import DecodeRun

_Parts: TypeAlias = tuple[Load, DecodeRun | None]
_State: TypeAlias = list[_Parts]  # of a rank between two changes, for the reports of that time; empty until it is read


class Reports:
    """The load reports of one rank to `readers` choosers: one every `interval_s`, and at each call of `report`.
    Each chooser gets a report `delay_s` later, or loses it with probability `loss`. `before_ingest`: see
    `VirtualRank.load`. Times are virtual, in seconds."""

    def __init__(
        self, loop: VirtualLoop, rank: VirtualRank, rng: random.Random, readers: int, *,
        interval_s: float, delay_s: float, loss: float, before_ingest: bool,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._rank = rank
        self._rng = rng
        self._interval_s = interval_s
        self._delay_s = delay_s
        self._loss = loss
        self._before_ingest = before_ingest
        self._next_s = rng.random() * interval_s
        self._made = 0
        self._coming: list[deque[tuple[float, int, _State]]] = [deque() for _ in range(readers)]
        self._state: _State | None = None  # of the reports made since the last change; None: none was made
        rank.before_change = self._before_change

    def report(self, at_s: float) -> None:
        """Make a report of the state at `at_s`, beside the regular ones. The rank has not changed since."""
        if self._next_s <= at_s:
            self._catch_up(at_s)
        self._make(at_s)

    def _catch_up(self, at_s: float) -> None:
        """Make the regular reports that were due by `at_s`, without those that a later one of them replaces before a
        chooser reads."""
        come_s = self._loop.now - self._delay_s
        while self._next_s <= at_s:
            following_s = self._next_s + self._interval_s
            if following_s <= come_s and not self._loss:
                self._made += 1
            else:
                self._make(self._next_s)
            self._next_s = following_s

    def last(self, reader: int) -> tuple[float, Load] | None:
        """Return when the newest report came to `reader` (its number, from 0), and the report; None if none came since
        the last call. Older ones are dropped."""
        now, delay_s = self._loop.now, self._delay_s
        if self._rank.due_s <= now:
            self._rank.catch_up()
        if self._next_s <= now:  # asked here, too, because this is called for each rank at each request
            self._catch_up(now)
        coming, come = self._coming[reader], None
        while coming and coming[0][0] + delay_s <= now:
            come = coming.popleft()
        if come is None:
            return None
        made_s, number, state = come
        load, run = state[0] if state else self._read(state)
        held = load.kv_tokens + (run.rows * run.done(made_s) if run is not None else 0)
        return made_s + delay_s, replace(load, seq=number, kv_tokens=held)

    def next_s(self, reader: int) -> float:
        """Return the time when the next report may come to `reader`, if nothing changes until then."""
        now = self._loop.now
        if self._rank.due_s <= now:
            self._rank.catch_up()
        self._catch_up(now)
        coming = self._coming[reader]
        return (coming[0][0] if coming else self._next_s) + self._delay_s

    def _before_change(self, at_s: float) -> None:
        if self._next_s <= at_s:
            self._catch_up(at_s)
        state, self._state = self._state, None
        if state is not None and not state:
            self._read(state)

    def _read(self, state: _State) -> _Parts:
        parts = self._rank.state(self._before_ingest)
        state.append(parts)
        return parts

    def _make(self, at_s: float) -> None:
        self._made += 1
        if self._state is None:
            self._state = []
        report = at_s, self._made, self._state
        come = at_s + self._delay_s <= self._loop.now
        for coming in self._coming:
            if not self._loss or self._rng.random() >= self._loss:
                if come:
                    coming.clear()  # replaced before a chooser read it
                coming.append(report)


class Listener:
    """A chooser that reads its reports only when it decides. It is reader number `reader` of each of `reports`, which
    are in the order of ranks. The other methods do what the chooser's do, after `read` where loads matter."""

    def __init__(self, chooser: Chooser, reader: int, reports: list[Reports]) -> None:
        self.chooser = chooser
        self._reader = reader
        self._reports = reports

    def read(self) -> None:
        """Pass the reports that have come by now to the chooser."""
        reader, report = self._reader, self.chooser.report
        for dp_rank, reports in enumerate(self._reports):
            come = reports.last(reader)
            if come is not None:
                report(dp_rank, come[1], come[0])

    def next_s(self) -> float:
        """Return the time when the next report may come; infinite if no rank reports."""
        return min((reports.next_s(self._reader) for reports in self._reports), default=math.inf)

    def pick(self, request: Submit, now: float, read: int = 0) -> tuple[int, int]:
        self.read()
        return self.chooser.pick(request, now, read)

    def takes(self, request: Submit) -> bool:
        self.read()
        return self.chooser.takes(request)

    def prefills_here(self, request: Submit) -> bool:
        self.read()
        return self.chooser.prefills_here(request)

    def reads_back(self, request: Submit, prefill: Listener, now: float) -> int:
        """Return what `Chooser.reads_back` does for the rank that `prefill` would pick."""
        prefill.read()
        self.read()
        rank = prefill.chooser.asked(request, now)
        return 0 if rank is None else self.chooser.reads_back(request, rank, now)

    def work(self, request: Submit) -> int:
        return self.chooser.work(request)

    def first_token_s(self, work: int) -> float:
        return self.chooser.first_token_s(work)

    def least_tokens(self) -> int:
        self.read()
        return self.chooser.least_tokens()
