"""How far a comparison is, in words. Owns the shares of its runs; reads no clock and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence


class Progress:
    """`names` of the runs; `share` says how far one is, `text` how far all are."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shares = [0.0] * len(names)

    def share(self, number: int, share: float) -> None:
        """Run `number` is so far; 1 is its end."""
        self._shares[number] = share

    def text(self, elapsed_s: float) -> str:
        """Runs done, seconds left if the rest goes on as before, and what is under way."""
        done = sum(share == 1.0 for share in self._shares)
        total = sum(self._shares) / len(self._shares)
        left = f", about {elapsed_s * (1 - total) / total:.0f} s left" if total else ""
        names = zip(self._names, self._shares, strict=True)
        under_way = ", ".join(f"{name} {share:.0%}" for name, share in names if 0 < share < 1)
        return f"{done} of {len(self._shares)} runs done{left}" + (f": {under_way}" if under_way else "")
