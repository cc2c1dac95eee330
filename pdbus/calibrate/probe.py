"""Runs legs on a runner without a cluster, and records the time of each token. A leg is a rank's share of a request, a
runner the engine's adapter. Owns these records.

The measured time is that of the engine and of the code that a rank adds to it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bus.errors import StartError
from bus.wire.messages import Params
from nodes.link.leg import NO_ROOM, Leg
from nodes.link.runner import Dead, Event, Finished, LegFailed, Output, Runner

WAIT_S = 300.0  # how long to wait for the next token


@dataclass(slots=True)
class LegTimes:
    """The times of a leg's tokens, in seconds from the common start of all legs of the run. `over`: its last token has
    come."""

    prompt_tokens: int
    tokens_at: list[float] = field(default_factory=list)
    over: bool = False


class Probe:
    """Runs legs on `runner`, whose only user it is. `clock()` is in seconds; `turn()` waits for the next event of the
    runner, for a short time at most."""

    def __init__(self, runner: Runner, clock: Callable[[], float], turn: Callable[[], None]) -> None:
        self.facts = runner.facts
        self._runner = runner
        self._clock = clock
        self._turn = turn
        self._times_of: dict[Leg, LegTimes] = {}
        self._began = self._last_token_at = 0.0
        self._numbers = itertools.count(1)
        runner.attach(self._on_event)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[LegTimes]:
        """Run all prompts at once, each to its `max_tokens` (end tokens are ignored); return their times, in the order
        of the prompts. It blocks until all have ended. Raises StartError when a leg fails, when the engine dies, or
        when it makes no token for WAIT_S."""
        legs = [self._leg(prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)]
        courses = [LegTimes(len(prompt)) for prompt in prompts]
        self._times_of = dict(zip(legs, courses, strict=True))
        self._began = self._last_token_at = self._clock()
        for leg in legs:
            self._runner.start(leg)
        while not all(course.over for course in courses):
            now = self._clock()
            self._runner.turn(now)
            self._runner.tick(now)
            self._turn()
            if self._clock() - self._last_token_at > WAIT_S:
                raise StartError(f"the engine made no token for {WAIT_S:g} s")
        return courses

    def _leg(self, prompt: Sequence[int], max_tokens: int) -> Leg:
        number = next(self._numbers)
        return Leg(
            f"c{number}", 1, "unified", 0, number, NO_ROOM, array("i", prompt), len(prompt), max_tokens, 0, 0,
            Params(ignore_eos=True), frozenset(), None,
        )  # fmt: skip

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Dead):
            raise StartError(f"the engine died: {event.reason}")
        if isinstance(event, LegFailed):
            raise StartError(f"the engine failed: {event.message or event.code}")
        if isinstance(event, Output):
            self._last_token_at = self._clock()
            self._times_of[event.leg].tokens_at += [self._last_token_at - self._began] * len(event.tokens)
        elif isinstance(event, Finished):
            self._times_of[event.leg].over = True
