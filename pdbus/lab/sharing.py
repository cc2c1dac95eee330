"""The messages between controllers in virtual time: the counters of what each has sent to the ranks of a role. Owns
when they are published, and their loss on the way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from bus.wire.messages import Sent
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.reports import Listener

RESTATE_S = 1.0


class Sharing:
    """The counters of all controllers for one role, whose choosers are `choosers` by controller. They are published
    soon after something was sent, and every RESTATE_S in any case. `rng` draws losses."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, config: LabConfig, choosers: Seq[Listener]) -> None:
        self._loop, self._rng = loop, rng
        self._interval_s, self._hop_s, self._loss = config.sent_interval_s, config.hop_s, config.report_loss
        self._choosers = choosers
        self._due_s = [0.0] * len(choosers)  # when each may publish again
        for number in range(len(choosers)):
            loop.call_later(rng.random() * RESTATE_S, self._restate, number)

    def soon(self, number: int) -> None:
        """Schedule the publication of the counters of controller `number`: now, or `sent_interval_s` after the last
        one."""
        now, due_s = self._loop.now, self._due_s[number]
        if due_s <= now:
            self._due_s[number] = now + self._interval_s
            self._loop.call_later(0.0, self._share, number)
        elif due_s - now <= self._interval_s:
            self._due_s[number] = due_s + self._interval_s
            self._loop.call_at(due_s, self._share, number)

    def _restate(self, number: int) -> None:
        self._share(number)
        self._loop.call_later(RESTATE_S, self._restate, number)

    def _share(self, number: int) -> None:
        sent = self._choosers[number].chooser.sent()
        if sent is not None:
            for other, listener in enumerate(self._choosers):
                if other != number and self._rng.random() >= self._loss:
                    self._loop.call_later(self._hop_s, self._deliver, listener, sent)

    def _deliver(self, listener: Listener, sent: Sent) -> None:
        listener.chooser.apply_sent(sent, self._loop.now)
