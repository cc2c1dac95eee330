"""The rings of a rank's steps and of its work on requests, for `pdbus record`.

They are filled while a recording runs: a question extends it by its lease, and without questions it ends by itself. A
reader asks from a number on, so that several can read. Whatever the engine, the link records what runners say of
prompts and KV transfers; a runner that knows its steps records them and the chunks of prompts in them. Pure: times are
in seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import deque
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

MAX_STEPS = 4096  # that are kept, of seconds: half a megabyte
MAX_WORK = 8192


class Recorder:
    """The recording of one rank. Nothing is kept, and nothing may be recorded, unless it is `on`. Its runner sets
    `has_steps` if it appends its steps to `steps`, as (number, began, seconds, decode rows, prompt tokens, KV
    tokens)."""

    def __init__(self) -> None:
        self.on = False
        self.has_steps = False
        self._until = -math.inf
        self.steps: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=MAX_STEPS)
        # what, rid, attempt, began, seconds, tokens, before, prompt tokens, the other rank
        self._work: deque[tuple[str, str, int, float, float, int, int, int, Location | None]] = deque(maxlen=MAX_WORK)
        self._worked = 0  # pieces of work that were recorded so far, in all recordings

    def asked(self, query: RecordQuery, now: float, wall_s: float) -> RecordReply:
        """Record from now on, for the lease at least, and return what is recorded. `wall_s` is added to the clock to
        get seconds since 1970."""
        if query.lease_s:
            self.on, self._until = True, max(self._until, now + query.lease_s)
        steps, work = self.steps, self._work
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
        return RecordReply(query.id, tuple(some), tuple(pieces), begin, more, no_steps=not self.has_steps)

    def tick(self, now: float) -> None:
        """End the recording when its lease is over."""
        if now >= self._until:
            self.on = False
            self.steps.clear()
            self._work.clear()

    def chunk(self, leg: Leg, began: float, seconds: float, tokens: int, before: int) -> None:
        """Record that a step computed `tokens` of a leg's prompt, after the first `before`."""
        self._add("chunk", leg, leg.attempt, began, seconds, tokens, before)

    def computed(self, leg: Leg, now: float) -> None:
        """Record that a prompt is computed, where the engine does not say in which steps: since it came."""
        if not self.has_steps:
            self._add("prompt", leg, leg.attempt, leg.ingested_at, now - leg.ingested_at, leg.prompt_tokens)

    def fetched(self, leg: Leg, now: float, seconds: float, tokens: int) -> None:
        """Record that a decode leg's KV cache has come, in so many seconds."""
        self._add("fetch", leg, leg.kv_attempt or leg.attempt, now - seconds, seconds, tokens, other=leg.location)

    def read(self, leg: Leg, now: float, seconds: float, tokens: int) -> None:
        """Record that a part of a prompt's KV cache has come from a decode rank, in so many seconds."""
        self._add("read", leg, leg.attempt, now - seconds, seconds, tokens, other=leg.location)

    def lent(self, leg: Leg, now: float, tokens: int) -> None:
        """Record that the KV cache of a part of a prompt is lent from now on."""
        self._add("lend", leg, leg.attempt, now, 0.0, tokens)

    def _add(
        self, what: str, leg: Leg, attempt: int, began: float, seconds: float, tokens: int, before: int = 0,
        other: Location | None = None,
    ) -> None:  # fmt: skip
        self._worked += 1
        self._work.append((what, leg.rid, attempt, began, seconds, tokens, before, leg.prompt_tokens, other))


def _span(began: float, seconds: float, wall_s: float) -> tuple[int, int]:
    """Return a beginning and a duration in microseconds, so that ends are rounded as beginnings are."""
    began_us = max(0, round((wall_s + began) * 1e6))
    return began_us, max(0, round((wall_s + began + seconds) * 1e6) - began_us)
