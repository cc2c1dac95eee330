"""The progress of a comparison (several runs), as a line of text. Owns the shares of its runs; reads no clock and
prints nothing."""

from __future__ import annotations

from collections.abc import Sequence


class Progress:
    """The progress of the runs `names`: `share` sets that of one run, `text` returns that of all. `now` is in seconds
    of any one clock."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shares = [0.0] * len(names)
        self._first: tuple[float, float] | None = None  # the time of the first share, and the total then

    def share(self, number: int, share: float, now: float) -> None:
        """Set the share (0 to 1) of run `number` that is done; 1 is its end."""
        self._shares[number] = share
        if self._first is None:
            self._first = now, self._total

    def text(self, now: float) -> str:
        """Return a line with the runs done, the seconds left (by the rate since the first share; left out before), and
        the runs in progress with their shares."""
        done = sum(share == 1.0 for share in self._shares)
        names = zip(self._names, self._shares, strict=True)
        under_way = ", ".join(f"{name} {share:.0%}" for name, share in names if 0 < share < 1)
        return f"{done} of {len(self._shares)} runs done{self._left(now)}" + (f": {under_way}" if under_way else "")

    def _left(self, now: float) -> str:
        if self._first is None or self._total <= self._first[1]:
            return ""
        began, total = self._first
        return f", about {(now - began) * (1 - self._total) / (self._total - total):.0f} s left"

    @property
    def _total(self) -> float:
        return sum(self._shares) / len(self._shares)
