"""How many bytes of large answers a peer gets: a short question may have a long answer, and queues are bounded in
messages. Pure: time is an argument. Must not send, and does not know who reads."""

from __future__ import annotations

from collections import OrderedDict

LARGE = 4096  # bytes; what is smaller is bounded well enough by the number of messages
BURST, PER_S = 2 << 20, 1 << 20
PEERS_MAX = 16_384


class Ration:
    """Each peer may have BURST bytes at once, and PER_S more each second."""

    def __init__(self) -> None:
        self._taken: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # bytes taken, as of when; the latest last

    def allows(self, peer: bytes, size: int, now: float) -> bool:
        """Whether `peer` may be sent `size` bytes more now; if so they are taken from its ration."""
        if size <= LARGE:
            return True
        taken, since = self._taken.get(peer, (0.0, now))
        taken = max(0.0, taken - PER_S * (now - since))
        if taken + size > BURST:
            return False
        self._taken[peer] = (taken + size, now)
        self._taken.move_to_end(peer)
        if len(self._taken) > PEERS_MAX:
            self._taken.popitem(last=False)
        return True
