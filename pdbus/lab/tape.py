"""Records what the ranks of a virtual run do in a part of its time, as facts for a timeline (`pdbus.timeline`). Owns
the window and the facts; it changes nothing of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from bus.wire.messages import MemberKey, RankStep, RankWork, Role
from nodes.own.sequence import Sequence
from pdbus.lab.scheduler import DecodeRun, LabScheduler, PromptRun
from pdbus.timeline.facts import MAX_FACTS, LoadSample, RankTrack, Timeline

Transfer: TypeAlias = Literal["fetch", "read"]

SAMPLE_S = 0.25  # between samples of the ranks' load


class Tape:
    """A recording from `from_s` on, for `length_s` seconds of virtual time. `timeline` has what came so far; `left_out`
    counts what came beyond MAX_FACTS."""

    def __init__(self, from_s: float, length_s: float) -> None:
        self.timeline = Timeline("virtual time")
        self.from_s, self.until_s = from_s, from_s + length_s
        self.left_out = 0
        self._room = MAX_FACTS
        self._ranks: dict[MemberKey, RankTape] = {}
        self._began: dict[tuple[int, Transfer], float] = {}  # transfers under way, by request and kind

    def done(self) -> Timeline:
        """Return the timeline, after the run, with what a reader has to know of it."""
        timeline = self.timeline
        timeline.notes.append(f"from {self.from_s:g} s to {self.until_s:g} s of the run, in virtual time")
        if self.left_out:
            timeline.notes.append(f"{self.left_out} facts beyond the first {MAX_FACTS} are left out")
        if not timeline.queues:
            timeline.notes.append("no request waited at a controller")
        return timeline

    def rank(self, key: MemberKey, role: Role) -> RankTape:
        """Return the recorder of a rank; call it once for each."""
        track = RankTrack(*key, role)
        self.timeline.ranks.append(track)
        tape = self._ranks[key] = RankTape(self, track)
        return tape

    def takes(self, at_s: float) -> bool:
        """Return true, and count a fact, if one that began at `at_s` is to be recorded."""
        if not self.from_s <= at_s < self.until_s:
            return False
        if not self._room:
            self.left_out += 1
            return False
        self._room -= 1
        return True

    def waits(self, controller: int, at_s: float, requests: int) -> None:
        """Record how many requests wait at a controller from now on."""
        if self.takes(at_s):
            self.timeline.queues.setdefault(f"controller-{controller}", []).append((_us(at_s), requests))

    def lends(self, number: int, source: MemberKey, at_s: float, tokens: int) -> None:
        """Record that `source` begins to send, or lend, the KV cache of a request."""
        if self.takes(at_s):
            self._ranks[source].track.work.append(RankWork("lend", str(number), 1, _us(at_s), 0, tokens))

    def begins(self, number: int, what: Transfer, at_s: float) -> None:
        """Note that a transfer begins."""
        self._began[number, what] = at_s

    def ends(self, number: int, what: Transfer, source: MemberKey, target: MemberKey, at_s: float, tokens: int) -> None:
        """Record a transfer that ends now."""
        began_s = self._began.pop((number, what))
        if self.takes(began_s):
            began_us = _us(began_s)
            work = RankWork(
                what, str(number), 1, began_us, _us(at_s) - began_us, tokens, instance=source[0], dp_rank=source[1]
            )
            self._ranks[target].track.work.append(work)


class RankTape:
    """The recorder of one rank. Each method is called before the scheduler accounts for the steps concerned."""

    def __init__(self, tape: Tape, track: RankTrack) -> None:
        self.track = track
        self._tape = tape

    def step(self, scheduler: LabScheduler, began_s: float, end_s: float) -> None:
        """Record the step that ends now."""
        rows, prompts = scheduler.under_way
        chunks = [(sequence, sequence.computed, sequence.fed) for sequence in prompts]
        self._add(scheduler.step + 1, began_s, end_s, rows, scheduler.kv_tokens, chunks)

    def decode_run(self, scheduler: LabScheduler, run: DecodeRun, steps: int) -> None:
        """Record the first `steps` steps of a run."""
        if run.ends_s(steps) < self._tape.from_s or run.began_s >= self._tape.until_s:
            return
        began_s, kv_tokens = run.began_s, scheduler.kv_tokens
        for at in range(steps):
            end_s = run.ends_s(at + 1)
            self._add(scheduler.step + 1 + at, began_s, end_s, run.rows, kv_tokens + at * run.rows, ())
            began_s = end_s

    def prompt_run(self, scheduler: LabScheduler, run: PromptRun, steps: int) -> None:
        """Record the next `steps` steps of a run."""
        sequence = run.sequence
        for at in range(steps):
            place = run.done + at
            end_s, tokens = run.ends_s[place], at * run.chunk
            chunk = (sequence, sequence.computed + tokens, run.chunk)
            began_s = end_s - run.durations_s[place]
            self._add(scheduler.step + 1 + at, began_s, end_s, 0, scheduler.kv_tokens + tokens, [chunk])

    def load(self, at_s: float, running: int, waiting: int, kv_tokens: int) -> None:
        """Record the rank's load as it is now."""
        if self._tape.takes(at_s):
            self.track.samples.append(LoadSample(_us(at_s), running, waiting, kv_tokens))

    def _add(
        self, number: int, began_s: float, end_s: float, rows: int, kv_tokens: int,
        chunks: Iterable[tuple[Sequence, int, int]],
    ) -> None:  # fmt: skip
        if not self._tape.takes(began_s):
            return
        began_us, prompt_tokens = _us(began_s), 0
        duration_us = _us(end_s) - began_us
        for sequence, before, fed in chunks:
            prompt_tokens += fed
            self.track.work.append(
                RankWork("chunk", str(sequence.id), 1, began_us, duration_us, fed, before, len(sequence.prompt))
            )
        self.track.steps.append(RankStep(number, began_us, duration_us, rows, prompt_tokens, kv_tokens))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
