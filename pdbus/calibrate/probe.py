"""A runner that is alone with us: legs are given to it, and it is noted when each token came. Owns their records.

Nothing of the bus takes part, so what is measured is what a rank adds to its engine and the engine itself.
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

WAIT_S = 300.0  # for the next token


@dataclass(slots=True)
class LegTimes:
    """The times at which its tokens came, in seconds from the start of all legs of the run."""

    prompt_tokens: int
    tokens_at: list[float] = field(default_factory=list)
    over: bool = False


class Probe:
    """`turn()` lets the runner go on: it waits for the next thing to happen, and returns in any case before long."""

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
        """All at once, each to its last token. StartError where the engine fails one, or stands still."""
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
