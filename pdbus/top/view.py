"""The user's choices on the screen of `pdbus top`: order, chosen rank, page; and how keys change them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bus.histogram import quantile
from bus.wire.messages import MemberKey
from pdbus.fleet.figures import RankFigures
from pdbus.fleet.formatting import by_number

_ROLES = ("prefill", "decode", "unified")
_WORST = ("lost", "hung", "silent", "starting", "draining", "gone", "ready")
SORTS: dict[str, Callable[[RankFigures], float]] = {  # the greatest first, except for `rank`
    "rank": lambda each: 0.0,
    "state": lambda each: -_WORST.index(each.rank.state),
    "load": lambda each: each.slots or 0.0,
    "kv": lambda each: each.kv or 0.0,
    "req/s": lambda each: each.requests_s or 0.0,
    "tok/s": lambda each: each.tokens_s or 0.0,
    "ttft99": lambda each: quantile(each.ttft, 0.99) or 0.0,
    "tpot99": lambda each: quantile(each.tpot, 0.99) or 0.0,
    "hits": lambda each: each.hits or 0.0,
    "bad": lambda each: each.rank.failed_total,
    "rst": lambda each: each.rank.restarts,
}
KEYS = (
    ("q", "quit"),
    ("up down", "choose a rank"),
    ("enter", "the rank in detail, and back"),
    ("s", "sort by another column (S: back)"),
    ("r", "reverse the order"),
    ("p", "pause, and go on"),
    ("?", "this help, and back"),
)


@dataclass(frozen=True)
class View:
    """The user's choices. `sort` is a name of SORTS, `chosen` the rank that keys have chosen (None: none yet). It is
    never changed: a key gives a new one."""

    sort: str = "rank"
    reverse: bool = False
    chosen: MemberKey | None = None
    page: str = "ranks"  # or `rank`, `help`
    paused: bool = False
    over: bool = False  # the user wants to leave

    def ordered(self, ranks: Sequence[RankFigures]) -> list[RankFigures]:
        """Return the ranks by the chosen column, the greatest first, or by role and name for `rank`; the other way with
        `reverse`."""
        by_name = sorted(ranks, key=lambda each: (_ROLES.index(each.rank.role), by_number(key_of(each))))
        if self.sort == "rank":
            return by_name[::-1] if self.reverse else by_name
        return sorted(by_name, key=SORTS[self.sort], reverse=not self.reverse)

    def pressed(self, key: str, ranks: Sequence[RankFigures]) -> View:
        """Return the view after `key` (a name of `keys.keys_in`) was pressed; an unknown key changes nothing. `ranks`
        are those that are shown."""
        match key:
            case "q":
                return replace(self, over=True)
            case "s" | "S":
                names = list(SORTS)
                at = names.index(self.sort) + (1 if key == "s" else -1)
                return replace(self, sort=names[at % len(names)], reverse=False)
            case "r":
                return replace(self, reverse=not self.reverse)
            case "p":
                return replace(self, paused=not self.paused)
            case "?":
                return replace(self, page="ranks" if self.page == "help" else "help")
            case "escape":
                return replace(self, page="ranks", chosen=self.chosen if self.page != "ranks" else None)
            case "enter" if ranks:
                chosen = self.chosen or key_of(self.ordered(ranks)[0])
                return replace(self, page="ranks" if self.page != "ranks" else "rank", chosen=chosen)
            case "up" | "down" | "home" | "end" | "page up" | "page down" if ranks:
                return self._moved(key, [key_of(each) for each in self.ordered(ranks)])
        return self

    def _moved(self, key: str, order: list[MemberKey]) -> View:
        steps = {"up": -1, "down": 1, "home": -len(order), "end": len(order), "page up": -10, "page down": 10}
        if self.chosen not in order:
            return replace(self, chosen=order[-1 if key == "end" else 0])
        at = order.index(self.chosen) + steps[key]
        return replace(self, chosen=order[max(0, min(at, len(order) - 1))])


def key_of(each: RankFigures) -> MemberKey:
    """Return the rank's instance and number."""
    return each.rank.instance, each.rank.dp_rank
