"""A tick that comes often while something may end by itself, and rarely while nothing can."""

from __future__ import annotations

from collections.abc import Callable

from bus.runtime.loop import Loop, Timer


class Ticker:
    """A repeated call of `tick()` on the loop's thread. It returns the seconds until the next call, or None where
    nothing can happen by itself: then the next call comes after `idle_s`, unless the ticker is woken before. `dozing`
    is true meanwhile, and until the first `wake`, which starts the calls."""

    def __init__(self, loop: Loop, tick: Callable[[], float | None], idle_s: float) -> None:
        self.dozing = True
        self._loop = loop
        self._tick = tick
        self._idle_s = idle_s
        self._timer: Timer | None = None

    def wake(self, pause_s: float = 0.0) -> None:
        """Tick at once, or after `pause_s` seconds, instead of at the planned time."""
        if self._timer is not None:
            self._timer.cancel()
        self.dozing = False
        if pause_s:
            self._timer = self._loop.call_later(pause_s, self._run)
        else:
            self._run()

    def _run(self) -> None:
        self.dozing = False
        pause_s = self._tick()
        self.dozing = pause_s is None
        self._timer = self._loop.call_later(self._idle_s if pause_s is None else pause_s, self._run)
