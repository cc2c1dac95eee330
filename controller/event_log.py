"""The last events of a cluster as its controller saw them happen: ranks that came, left and were lost, orders,
refusals. For people; no decision uses them. Pure.

Each event has a number, so that a watcher asks from a number on and gets each event once. What may come
thousands of times a second (failures, refusals) is one event with a count: the first at once, the next ones after a
wait that doubles, so a flood drives nothing else out of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from bus.wire.messages import MAX_EVENTS, MAX_PHRASE, MAX_WORD, ControllerEvent, MemberKey

FLOOD_S = (1.0, 60.0)  # the first wait until one more event of the same count, and the longest
# Counts that become events: the beginning of their names, the event, and what is counted
COUNTED = (
    ("failed_", "failed", "request"),
    ("rejected_", "refused", "message"),
    ("hello_", "refused", "hello"),
    ("peers_refused", "refused", "connection"),
    ("clients_unreachable", "unreachable", "client"),
    ("adopted", "adopted", "request"),
    ("policy_faults", "policy_failed", "time"),
)
GOOD = frozenset({"adopted"})


class EventLog:
    """The last MAX_EVENTS events. `now` is in seconds on the controller's clock; `wall_s` added to it gives seconds
    since 1970."""

    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s
        self._kept: deque[ControllerEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._seen: dict[str, tuple[int, float, float]] = {}  # by count: how many were noted, when, and the wait then

    def add(
        self, now: float, what: str, rank: MemberKey | None = None, code: str = "", phrase: str = "", bad: bool = False
    ) -> None:
        """Add an event: `what` happened to `rank` (None: to no rank alone), with a `code` for programs and a `phrase`
        for people, which is cut to what a message may hold. `bad`: it is trouble."""
        self._number += 1
        instance, dp_rank = rank or ("", 0)
        phrase = phrase.encode(errors="replace")[:MAX_PHRASE].decode(errors="ignore")
        at_us = max(0, round((now + self._wall_s) * 1e6))
        self._kept.append(ControllerEvent(self._number, at_us, what, instance, dp_rank, code[:MAX_WORD], phrase, bad))

    def since(self, number: int) -> tuple[ControllerEvent, ...]:
        """Return the events from `number` on that are kept, in order."""
        kept = self._kept
        return tuple(kept)[max(0, number - (kept[0].number if kept else 0)) :]

    def count(self, now: float, counts: Mapping[str, int]) -> None:
        """Add an event for each of the COUNTED `counts` that has grown; call it about once a second."""
        for name, total in counts.items():
            noted, at, wait_s = self._seen.get(name, (0, float("-inf"), 0.0))
            if total == noted or now < at + wait_s:
                continue
            kind = next((kind for kind in COUNTED if name.startswith(kind[0])), None)
            if kind is None:
                continue
            begins, what, noun = kind
            again = now < at + 4 * wait_s
            wait_s = min(FLOOD_S[1], 2 * wait_s) if again else FLOOD_S[0]
            self._seen[name] = total, now, wait_s
            code = name.removeprefix(begins)
            self.add(now, what, None, code, counted(total - noted, noun), bad=what not in GOOD)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in `3 requests`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
