"""Stop strings: found in text that comes in pieces, over their borders. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Searches a stream of text for stop strings. `push` returns the text that may be shown; `found` is the stop string
    that ended the text, None before. `include`: show the stop string too.

    Text that may begin a stop string is held back: at most the length of the longest one, minus one. An empty list
    finds nothing; an empty string in it is an AssertionError.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string is met before anything"
        self._stops = tuple(stops)
        self._include = include  # return the stop string too
        self._held = ""
        self._early = 0  # first characters of `_held`, in which no stop string may end
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take the next text and return what may be shown now: maybe less than `text`, maybe also what was held back
        before. Nothing follows a stop string."""
        if not self._stops or not text:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits and self._early:
            hits = self._late(text)
        if hits:
            at, _, self.found = min(hits)
            self._held = ""
            return text[: at + len(self.found) if self._include else at]
        keep = max(self._begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        if self._early:
            self._early = max(0, self._early - len(text) + keep)
        return text[: len(text) - keep]

    def push_early(self, text: str) -> str:
        """Take the next text, in which no stop string may end (the request's minimum of tokens is not reached), and
        return what may be shown now. A stop string may begin in it. Call it before the first `push` only."""
        text = self._held + text
        keep = max((self._begun(text, stop) for stop in self._stops), default=0)
        self._held, self._early = text[len(text) - keep :], keep
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, when no more text comes; empty after a stop string."""
        held, self._held = self._held, ""
        return held

    def _late(self, text: str) -> list[tuple[int, int, str]]:
        """Return the stop strings that end after the early characters."""
        found = ((text.find(stop, max(0, self._early - len(stop) + 1)), stop) for stop in self._stops)
        return [(at, -len(stop), stop) for at, stop in found if at >= 0]

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Return the number of characters at the end of `text` that begin `stop`."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
