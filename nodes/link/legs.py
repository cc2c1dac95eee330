"""The legs that are at a rank, and whether there is space for one more. Owns the bounds; decides nothing else. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bus.wire.messages import Refusal
from nodes.link.leg import Leg

MAX_LIVE = 65_535  # legs, and bytes of their names, that one hello can list
MAX_NAMES_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what may wait here."""

    max_waiting: int = 1024
    max_waiting_bytes: int = 64 << 20
    hold_s: float = 60.0


class Legs:
    """By request. Legs may end while one goes through them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._legs: dict[str, Leg] = {}
        self._prompt_bytes = 0
        self._names_bytes = 0
        self._seq = 0

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[Leg]:
        return iter(list(self._legs.values()))

    def get(self, rid: str) -> Leg | None:
        return self._legs.get(rid)

    def check_space(self, leg: Leg, waiting: int) -> None:
        """Refusal when there is none beside the `waiting` requests that wait at this rank."""
        prompt_bytes = self._prompt_bytes + 4 * len(leg.prompt)
        if waiting >= self._limits.max_waiting or prompt_bytes > self._limits.max_waiting_bytes:
            raise Refusal("overloaded", f"{waiting} requests are waiting at this rank")
        if len(self._legs) >= MAX_LIVE or self._names_bytes + _name_bytes(leg.rid) > MAX_NAMES_BYTES:
            raise Refusal("overloaded", f"{len(self._legs)} requests are at this rank")

    def add(self, leg: Leg) -> None:
        """It is here from now on, under a number of its own."""
        self._seq += 1
        leg.seq = self._seq
        self._legs[leg.rid] = leg
        self._prompt_bytes += 4 * len(leg.prompt)
        self._names_bytes += _name_bytes(leg.rid)

    def remove(self, leg: Leg) -> None:
        del self._legs[leg.rid]
        self._prompt_bytes -= 4 * len(leg.prompt)
        self._names_bytes -= _name_bytes(leg.rid)


def _name_bytes(rid: str) -> int:
    """What `(rid, attempt)` takes in a hello, at most."""
    return len(rid.encode()) + 9
