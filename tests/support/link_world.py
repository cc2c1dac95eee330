"""A rank link that was not started: an engine's scheduler, the hand-over and the rank's core in memory, no socket."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import count
from typing import Any

from legs_world import PROMPT, Rank, World

from bus.wire.messages import CancelLeg, Params
from nodes.link import RankFacts, RankLink, Start
from nodes.link.leg import NO_ROOM, Leg

FACTS = RankFacts(model="m", max_context=1000, vocab_size=512, block_tokens=16)
SETTINGS: dict[str, Any] = {"controllers": ["ipc:///c"], "instance": "u", "facts": FACTS, "data": "ipc:///d"}


def unified_leg(rid: str, attempt: int = 1, offset: int = 0, **fields: Any) -> Leg:
    """One that was taken in."""
    leg = Leg(rid, attempt, "unified", 0, 1, NO_ROOM, array("i", [5]), 1, 9, offset, 0, Params(), frozenset(), None)
    for name, value in fields.items():
        setattr(leg, name, value)
    return leg


class Engine:
    """A link that was not started, its rank's core in memory, and both ends of the hand-over moved by the test."""

    def __init__(self, role: Any = "unified", queue_max: int = 100, transfer: str = "blocks", params: Any = ()) -> None:
        self.world = World()
        settings = SETTINGS | {"facts": replace(FACTS, kv_transfer=transfer, params=params)}
        self.link = RankLink("ipc:///b", role=role, queue_max=queue_max, **settings)
        self.runner = self.link._runners[0]
        self.rank = Rank(self.world, role, "u", runner=self.runner)
        self.numbers = count()

    def dispatch(self, prompt: list[int] = PROMPT, **changes: Any) -> str:
        rid = f"r{next(self.numbers)}"
        changes.setdefault("max_tokens", 9)
        self.rank.read(rid)
        self.rank.dispatch(rid, prompt, **changes)
        return rid

    def legs(self) -> list[Leg]:
        """Those that the scheduler is handed now."""
        return [order.leg for order in self.link.poll() if isinstance(order, Start)]

    def take(self) -> None:
        """The link's thread takes what was said."""
        self.link._take()
        self.rank.turn()

    def cancel(self, rid: str) -> None:
        self.rank.do(self.rank.core.cancel(0, CancelLeg(rid, 1), self.world.now))

    def load(self) -> tuple[int, int, int]:
        load = self.rank.core.load()
        return load.running, load.waiting, load.waiting_tokens

    def code(self, rid: str) -> str:
        return self.rank.code(rid)
