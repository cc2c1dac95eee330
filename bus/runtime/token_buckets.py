"""Token buckets that bound what each peer gets, such as bytes of large answers.

A short question may have a long answer, and queues are bounded in messages only. Pure: time is an argument; this
module does not send.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

LARGE = 4096  # bytes; what is smaller is bounded well enough by the number of messages
BURST, PER_S = 2 << 20, 1 << 20
PEERS_MAX = 16_384


class TokenBuckets:
    """One token bucket for each peer: `burst` at once and `per_s` more each second. A size of at most `free` is not
    counted."""

    def __init__(self, burst: int = BURST, per_s: int = PER_S, free: int = LARGE) -> None:
        self._burst, self._per_s, self._free = burst, per_s, free
        self._taken: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # taken, as of when; the latest last

    def allows(self, peer: Hashable, size: int, now: float) -> bool:
        """Take `size` from the bucket of `peer` and return true; if it holds less at `now` (seconds), take nothing and
        return false."""
        if size <= self._free:
            return True
        taken, since = self._taken.get(peer, (0.0, now))
        taken = max(0.0, taken - self._per_s * (now - since))
        if taken + size > self._burst:
            return False
        self._taken[peer] = (taken + size, now)
        self._taken.move_to_end(peer)
        if len(self._taken) > PEERS_MAX:
            self._taken.popitem(last=False)
        return True
