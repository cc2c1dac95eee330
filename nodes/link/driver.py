"""A rank's core and its runner (the engine behind the rank), connected: the runner does the core's actions, and the
core handles the runner's events.

Pure as far as the runner is: the live ranks, the tests in memory and the fuzz tests all use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from nodes.link.actions import Action, Cancel, Lend, Readable, Reclaim, Release, Start, TakeBlock
from nodes.link.core import RankCore
from nodes.link.runner import EVENTS, BlockRunner, Event, ReadingRunner, Runner


class RankDriver:
    """The driver of one rank. `do` gets every action that is not for the runner, in order. `dirty` is set when
    something happened since the owner cleared it: then a `turn` of the runner and a report are due."""

    def __init__(
        self, core: RankCore, runner: Runner, do: Callable[[Action], None], clock: Callable[[], float]
    ) -> None:
        self.dirty = True
        self._core = core
        self._runner = runner
        self._do_outside = do
        self._clock = clock
        self._todo: deque[Action | Event] = deque()
        self._doing = False
        runner.attach(self._receive)

    def apply(self, actions: Iterable[Action]) -> None:
        """Do `actions`, and what follows from them, before this returns. Events that the runner emits meanwhile wait
        until the current action is done."""
        self._todo.extend(actions)
        if self._doing or not self._todo:
            return
        self._doing = self.dirty = True
        try:
            while self._todo:
                item = self._todo.popleft()
                if type(item) in EVENTS:
                    for action in self._core.handle(cast(Event, item), self._clock()):
                        self._do(action)
                else:
                    self._do(cast(Action, item))
        finally:
            self._doing = False

    def _receive(self, event: Event) -> None:
        if self._doing:
            self._todo.append(event)
            return
        self.dirty = True
        if actions := self._core.handle(event, self._clock()):  # rarely any: most events are output
            self.apply(actions)

    def _do(self, action: Action) -> None:
        if isinstance(action, Start):
            self._runner.start(action.leg)
        elif isinstance(action, Cancel):
            self._runner.cancel(action.leg)
        elif isinstance(action, Release):
            self._runner.release(action.leg)
        elif isinstance(action, TakeBlock):
            runner = cast(BlockRunner, self._runner)
            runner.received(action.leg, action.index, action.data, action.intact, self._clock())
        elif isinstance(action, Readable):
            cast(ReadingRunner, self._runner).readable(action.leg, action.blocks, self._clock())
        elif isinstance(action, Lend):
            cast(ReadingRunner, self._runner).lend(action.leg)
        elif isinstance(action, Reclaim):
            cast(ReadingRunner, self._runner).reclaim(action.leg)
        else:
            self._do_outside(action)
