"""Due times: the structure in which the parts' cores (their logic without I/O) keep when something ends. It reads no
clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TimerSlots(Generic[K]):
    """Keys with due times in seconds, in slots of `step_s`, so that adding and removing are O(1) and leave nothing
    behind. `take` returns a key once its time has come: never before, and at most a
    slot late. To remove a key, the caller
    gives the time with which it was added. `len` and iteration give the keys that wait."""

    def __init__(self, now: float = 0.0, *, step_s: float = 0.05) -> None:
        self._step_s = step_s
        self._next = int(now / step_s)
        self._slots: dict[int, dict[K, None]] = {}

    def add(self, key: K, due: float) -> None:
        """Add a key that is due at `due`. The same key with another time must be removed first."""
        self._slots.setdefault(self._slot(due), {})[key] = None

    def remove(self, key: K, due: float) -> None:
        """Remove the key that was added with the time `due`; nothing happens if it is not there."""
        number = self._slot(due)
        slot = self._slots.get(number)
        if slot is not None:
            slot.pop(key, None)
            if not slot:
                del self._slots[number]

    def discard(self, key: K) -> None:
        """Remove the key if it is there, whatever its time. This searches all slots, so use it for rare events."""
        for number, slot in list(self._slots.items()):
            if key in slot:
                del slot[key]
                if not slot:
                    del self._slots[number]

    def take(self, now: float, most: int | None = None) -> list[K]:
        """Remove and return the keys whose time has come, but no more than `most` keys; the next call returns the
        rest."""
        end = int(now / self._step_s) + 1
        if end - self._next > len(self._slots):  # a long pause: look at what is there
            numbers = sorted(number for number in self._slots if number < end)
        else:
            numbers = [number for number in range(self._next, end) if number in self._slots]
        keys: list[K] = []
        for number in numbers:
            slot = self._slots.pop(number)
            if most is not None and len(keys) + len(slot) > most:
                some = list(islice(slot, most - len(keys)))
                for key in some:
                    del slot[key]
                self._slots[number] = slot
                self._next = number
                return keys + some
            keys += slot
        self._next = max(self._next, end)
        return keys

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def __iter__(self) -> Iterator[K]:
        for slot in self._slots.values():
            yield from slot

    def _slot(self, due: float) -> int:
        return max(math.ceil(due / self._step_s), self._next)
