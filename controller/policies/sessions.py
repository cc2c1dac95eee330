"""The places of sessions (conversations) whose requests have no block hashes: the rank of the last turn, and how much
of the next prompt it probably caches. It knows no loads.

A turn's prompt begins with the last turn's, so the rank that had it is taken to cache that many tokens, for KEPT_S
after its last turn. Where requests have hashes, those say more, and nothing is kept here.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT_S = 300.0
MAX_SESSIONS = 16_384  # 1,024 bytes of name each at most


class Sessions:
    """The sessions of the ranks with one policy; a rank is its slot, and times are those of `advance`. All calls take
    O(1), but `forget` and `advance`, which take O(sessions that go)."""

    def __init__(self) -> None:
        self._now = 0.0
        self._at: OrderedDict[str, tuple[int, int, float]] = OrderedDict()  # slot, tokens, until; the oldest first
        self._of: dict[int, dict[str, None]] = {}  # by slot

    def __len__(self) -> int:
        return len(self._at)

    def went(self, session: str, slot: int, tokens: int) -> None:
        """Note that a turn with a prompt of `tokens` went to the rank in `slot`."""
        self._leave(session)
        self._at[session] = slot, tokens, self._now + KEPT_S
        self._of.setdefault(slot, {})[session] = None
        if len(self._at) > MAX_SESSIONS:
            self._leave(next(iter(self._at)))

    def place(self, session: str) -> tuple[int, int] | None:
        """Return the slot of the session's last rank, and the tokens that it caches; None: neither is known."""
        found = self._at.get(session)
        return None if found is None else found[:2]

    def tokens(self, session: str, slot: int) -> int:
        """Return the tokens of the session that the rank in `slot` caches."""
        found = self._at.get(session)
        return found[1] if found is not None and found[0] == slot else 0

    def forget(self, slot: int) -> None:
        """Forget the sessions of a rank that restarted, cleared its cache or is gone."""
        for session in list(self._of.get(slot, ())):
            self._leave(session)

    def advance(self, now: float) -> None:
        """Set the time in seconds, and forget the sessions that are older than KEPT_S."""
        self._now = max(self._now, now)
        while self._at and next(iter(self._at.values()))[2] <= self._now:
            self._leave(next(iter(self._at)))

    def validate(self) -> None:
        """Check that both directions agree (for tests)."""
        assert {(session, at[0]) for session, at in self._at.items()} == {
            (session, slot) for slot, sessions in self._of.items() for session in sessions
        }
        assert all(self._of.values())
        assert len(self._at) <= MAX_SESSIONS

    def _leave(self, session: str) -> None:
        found = self._at.pop(session, None)
        if found is not None:
            sessions = self._of[found[0]]
            del sessions[session]
            if not sessions:
                del self._of[found[0]]
