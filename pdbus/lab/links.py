"""KV caches on their way between ranks. Owns the sharing of links and nothing else: no rank, no message.

A rank has a link that sends and receives at once, each at one speed. Each end divides its speed equally among the
transfers there, and a transfer goes at the lesser of its two shares. The rest of the larger share stays unused. That
is less than max-min fairness would give, but it is exact for one transfer, for several at one end, and for one between
two busy ends, and a change matters at its two ends alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bus.wire.messages import MemberKey
from pdbus.lab.clock import VirtualLoop


@dataclass(slots=True, eq=False)
class _Transfer:
    source: MemberKey
    target: MemberKey
    left_s: float  # seconds that the rest would take alone
    done: Callable[..., object]
    arguments: tuple[Any, ...]
    sharers: int = 0  # transfers at its busier end, itself included; 0: it has not begun
    since_s: float = 0.0  # when `left_s` and `sharers` were set
    event: int = 0  # its end


class Links:
    """The links of all ranks. `s_per_token` is the time of a KV token on one that has nothing else to do."""

    def __init__(self, loop: VirtualLoop, s_per_token: float) -> None:
        self._loop = loop
        self._s_per_token = s_per_token
        self._sent: defaultdict[MemberKey, dict[_Transfer, None]] = defaultdict(dict)  # by source, in order
        self._received: defaultdict[MemberKey, dict[_Transfer, None]] = defaultdict(dict)  # by target

    def send(
        self, source: MemberKey, target: MemberKey, tokens: int, done: Callable[..., object], *arguments: Any
    ) -> None:
        """Begin to move the KV cache of `tokens` tokens between two ranks. `done(*arguments)` is called when all is
        there."""
        transfer = _Transfer(source, target, tokens * self._s_per_token, done, arguments)
        self._sent[source][transfer] = self._received[target][transfer] = None
        self._share(source, target)

    def _end(self, transfer: _Transfer) -> None:
        del self._sent[transfer.source][transfer], self._received[transfer.target][transfer]
        self._share(transfer.source, transfer.target)
        transfer.done(*transfer.arguments)

    def _share(self, source: MemberKey, target: MemberKey) -> None:
        """Set the speed of each transfer at these two ends again, and the time of its end."""
        now = self._loop.now
        for transfer in self._sent[source] | self._received[target]:
            sharers = max(len(self._sent[transfer.source]), len(self._received[transfer.target]))
            if sharers == transfer.sharers:
                continue
            if transfer.sharers:
                self._loop.cancel(transfer.event)
                transfer.left_s -= (now - transfer.since_s) / transfer.sharers
            transfer.sharers, transfer.since_s = sharers, now
            transfer.event = self._loop.call_later(max(0.0, transfer.left_s) * sharers, self._end, transfer)
