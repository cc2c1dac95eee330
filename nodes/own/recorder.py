"""The rings of a rank's steps and of its work on requests, for `pdbus record`.

They are filled while a recording runs: a question extends it by its lease, and without questions it ends by itself. A
reader asks from a number on, so that several can read. Pure: times are in seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice

from bus.wire.messages import (
    MAX_STEPS_PER_MESSAGE,
    MAX_WORK_PER_MESSAGE,
    Location,
    RankStep,
    RankWork,
    RecordQuery,
    RecordReply,
)
from nodes.link.leg import Leg
from nodes.own.engines.base import StepResult
from nodes.own.scheduler import Scheduler
from nodes.own.sequence import Phase, Sequence

MAX_STEPS = 4096  # that are kept, of seconds: half a megabyte
MAX_WORK = 8192


class Recorder:
    """The recording of one rank. Nothing is kept, and no method but `asked` may be called, unless it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self._until = -math.inf
        # number, began, seconds, decode rows, prompt tokens, KV tokens
        self._steps: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=MAX_STEPS)
        # what, rid, attempt, began, seconds, tokens, before, prompt tokens, the other rank
        self._work: deque[tuple[str, str, int, float, float, int, int, int, Location | None]] = deque(maxlen=MAX_WORK)
        self._worked = 0  # pieces of work that were recorded so far, in all recordings

    def asked(self, query: RecordQuery, now: float, wall_s: float) -> RecordReply:
        """Record from now on, for the lease at least, and return what is recorded. `wall_s` is added to the clock to
        get seconds since 1970."""
        if query.lease_s:
            self.on, self._until = True, max(self._until, now + query.lease_s)
        steps, work = self._steps, self._work
        place = max(0, query.steps_from - steps[0][0]) if steps else 0
        some = [
            RankStep(number, *_span(began, seconds, wall_s), *rest)
            for number, began, seconds, *rest in islice(steps, place, place + MAX_STEPS_PER_MESSAGE)
        ]
        first = self._worked - len(work)  # the number of the oldest that is kept
        begin = min(max(query.work_from, first), self._worked)
        pieces = [
            RankWork(what, rid, attempt, *_span(began, seconds, wall_s), tokens, before, of,
                     "" if other is None else other.instance, 0 if other is None else other.dp_rank)
            for what, rid, attempt, began, seconds, tokens, before, of, other in islice(
                work, begin - first, begin - first + MAX_WORK_PER_MESSAGE
            )
        ]  # fmt: skip
        more = place + len(some) < len(steps) or begin + len(pieces) < self._worked
        return RecordReply(query.id, tuple(some), tuple(pieces), begin, more)

    def tick(self, now: float) -> None:
        """End the recording when its lease is over."""
        if now >= self._until:
            self.on = False
            self._steps.clear()
            self._work.clear()

    def stepped(self, scheduler: Scheduler, result: StepResult, began: float) -> None:
        """Record a step, before the scheduler accounts for it."""
        fed = scheduler.in_step  # those that decode come first
        rows, prompt_tokens = len(fed), 0
        if fed[-1].phase is Phase.PROMPT:
            rows, prompt_tokens = self._chunks(fed, began, result.duration_s)
        self._steps.append((result.number, began, result.duration_s, rows, prompt_tokens, scheduler.kv_tokens))

    def worked(self, what: str, leg: Leg, began: float, now: float, tokens: int) -> None:
        """Record work on a leg that ends now: a `fetch` or `read` from its `location`, or that it begins to `lend`."""
        other = None if what == "lend" else leg.location
        attempt = leg.kv_attempt or leg.attempt
        self._add(what, leg.rid, attempt, began, now - began, tokens, 0, leg.prompt_tokens, other)

    def _chunks(self, fed: Seq[Sequence], began: float, seconds: float) -> tuple[int, int]:
        """Record the chunks of prompts of a step. Return the rows that decode in it, and the prompt tokens."""
        rows = prompt_tokens = 0
        for sequence in fed:
            if sequence.phase is not Phase.PROMPT:
                rows += 1
                continue
            prompt_tokens += sequence.fed
            leg = sequence.leg
            if leg is not None:
                self._add("chunk", leg.rid, leg.attempt, began, seconds, sequence.fed, sequence.computed,
                          len(sequence.prompt), None)  # fmt: skip
        return rows, prompt_tokens

    def _add(
        self, what: str, rid: str, attempt: int, began: float, seconds: float, tokens: int, before: int, of: int,
        other: Location | None,
    ) -> None:  # fmt: skip
        self._worked += 1
        self._work.append((what, rid, attempt, began, seconds, tokens, before, of, other))


def _span(began: float, seconds: float, wall_s: float) -> tuple[int, int]:
    """Return a beginning and a duration in microseconds, so that ends are rounded as beginnings are."""
    began_us = max(0, round((wall_s + began) * 1e6))
    return began_us, max(0, round((wall_s + began + seconds) * 1e6) - began_us)
