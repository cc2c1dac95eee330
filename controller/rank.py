"""The records that the controller keeps of one rank besides its load: pings on their way, its clock, its latencies."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from bus.histogram import Histogram


class Asked(NamedTuple):
    """A ping on its way, and the rank's pulse before it: no message of the rank overtakes its answer."""

    n: int
    load_seq: int
    step: int
    at: float


class Clock:
    """The offset of a rank's clock (since 1970) from the controller's own, which never steps. As in NTP: the rank
    read its clock half way between a ping and its pong, and the shortest of the last round trips gives the best
    value."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=8)

    def add(self, sent_at: float, now: float, at_us: int) -> None:
        self._samples.append((now - sent_at, at_us / 1e6 - (sent_at + now) / 2))

    @property
    def best(self) -> tuple[float, float] | None:
        """The shortest round trip, and the rank's clock minus the controller's, in seconds; None: unknown."""
        return min(self._samples) if self._samples else None


class Latencies:
    """The latencies of the requests at one rank, over all its starts, for display only: no decision uses them.

    `ttft`: at a prefill rank from a leg's arrival to its first token, as the rank reports it; elsewhere from the
    submit's arrival here to the report of the first output. `tpot`: per token after the first, of each leg that
    ended well. `acked`: from a moment until everything sent by then was acknowledged (`controller.observe.probe`).
    """

    __slots__ = ("acked", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.tpot = Histogram()
        self.acked = Histogram()
