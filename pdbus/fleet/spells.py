"""Since when something holds: ranks that do badly, requests that wait or are lost. Pure.

A spell begins when its name holds, and is over once it has not held for `SETTLE_S`, so that what comes and goes within
seconds is one spell. It is announced once it has lasted for as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

SETTLE_S = 5.0

Name = TypeVar("Name", bound=Hashable)


class Spells(Generic[Name]):
    """The spells of one fleet, by name."""

    def __init__(self) -> None:
        self._open: dict[Name, tuple[float, float]] = {}  # when it began, and when it held last
        self._announced: set[Name] = set()

    def see(self, holding: Iterable[Name], at: float) -> tuple[list[Name], list[Name]]:
        """Take in all that holds at `at` seconds. Return the spells to announce, and those announced that are over."""
        for name in holding:
            began, _ = self._open.get(name, (at, at))
            self._open[name] = began, at
        over = [name for name, (_, held) in self._open.items() if at - held >= SETTLE_S]
        for name in over:
            del self._open[name]
        ended = [name for name in over if name in self._announced]
        self._announced.difference_update(ended)
        fresh = [name for name, (began, held) in self._open.items() if held - began >= SETTLE_S]
        fresh = [name for name in fresh if name not in self._announced]
        self._announced.update(fresh)
        return fresh, ended

    def began(self, name: Name) -> float | None:
        """Return when the spell began, in seconds; None: there is none."""
        found = self._open.get(name)
        return found[0] if found is not None else None
