"""What became of every request, judged from what was delivered alone. Pure; trusts nothing of the client's own checks.

Rids are numbered here, in order, so a rid that is not live has ended: whatever is still delivered under it is a
duplicate, however late, and nothing need be remembered for it. Owns the counts; must not send or wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdbus.client.output import Result

COMPLAINTS_MAX = 20


@dataclass(slots=True)
class _Open:
    expected: tuple[int, ...]
    began: float
    ids: list[int] = field(default_factory=list)


class Ledger:
    """`begin` hands out rids; `deliver` is told every piece and every Result as it reaches the caller."""

    def __init__(self, prefix: str = "s") -> None:
        self.accepted = 0
        self.completed = 0
        self.resumed = 0  # completed, at another attempt than the first
        self.duplicated = 0
        self.wrong = 0
        self.failed: Counter[str] = Counter()
        self.complaints: list[str] = []  # what went wrong, in words; the first COMPLAINTS_MAX
        self._prefix = prefix
        self._open: dict[str, _Open] = {}

    @property
    def live(self) -> int:
        return len(self._open)

    @property
    def ended(self) -> int:
        return self.completed + sum(self.failed.values())

    def begin(self, expected: Sequence[int], now: float) -> str:
        """The rid of a request whose whole output must be `expected`."""
        rid = f"{self._prefix}{self.accepted}"
        self.accepted += 1
        self._open[rid] = _Open(tuple(expected), now)
        return rid

    def deliver(self, rid: str, update: tuple[int, ...] | Result) -> bool:
        """Tokens, or the end (then True)."""
        entry = self._open.get(rid)
        if entry is None:
            self.duplicated += 1
            self._tell(f"{rid} had ended when this came: {update!r:.200}")
            return False
        if not isinstance(update, Result):
            entry.ids.extend(update)
            return False
        del self._open[rid]
        self._judge(rid, entry, update)
        return True

    def overdue(self, now: float, patience_s: float) -> list[str]:
        """Requests that have been live for longer than `patience_s`."""
        return [rid for rid, entry in self._open.items() if now - entry.began > patience_s]

    def _judge(self, rid: str, entry: _Open, result: Result) -> None:
        got, expected = tuple(entry.ids), entry.expected
        whole = result.finish in ("stop", "length")
        if len(got) > len(expected):
            self.duplicated += 1
            self._tell(f"{rid}: {len(got)} tokens were delivered, not {len(expected)}")
        elif got != (expected if whole else expected[: len(got)]) or result.ids != got:
            self.wrong += 1
            at = next((n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
            where = f"{result.decode.instance}/{result.decode.dp_rank}" if result.decode else "nowhere"
            self._tell(
                f"{rid}: {result.finish} after {result.attempts} attempts at {where}: {len(got)} of {len(expected)} "
                f"tokens, the first wrong one at {at}"
            )
        if whole:
            self.completed += 1
            self.resumed += result.attempts > 1
        else:
            self.failed[result.code] += 1

    def _tell(self, line: str) -> None:
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(line)
