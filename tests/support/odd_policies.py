"""Policies from outside the package: one that records what it is told, and some that break their contract."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bus.wire.messages import Ended, Submit
from controller.costs import Costs
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies import Policy, PolicySettings


class Recorder(Policy):
    """`total_tokens`; `calls` are the hooks called, `running` the legs that were dispatched and did not end."""

    uses_hashes = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()
        self.calls: list[tuple[Any, ...]] = []
        self.running: list[tuple[str, tuple[str, int]]] = []

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        return view.least(Metric.TOKENS)

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        self.calls.append(("dispatched", rank.key, request.rid, now))
        self.running.append((request.rid, rank.key))

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        self.calls.append(("ended", rank.key, request.rid, end, took_s))
        self.running.remove((request.rid, rank.key))

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        self.calls.append(("stored", rank.key, tuple(hashes)))

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        self.calls.append(("removed", rank.key, tuple(hashes)))

    def forgotten(self, rank: RankLoad) -> None:
        self.calls.append(("forgotten", rank.key))

    def tick(self, now: float) -> None:
        self.calls.append(("tick", now))


class Erratic(Recorder):
    """A policy with faults. Some picks raise, others return None, no rank, or a rank that is gone. Its hooks record
    their call and then raise. Its other decisions are right, or nonsense, or raise."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._rng = random.Random(7)
        self._seen: list[RankLoad] = []

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        self._seen += [rank for rank in view if rank not in self._seen]
        odd: list[Any] = [None, 3, "rank", *self._seen, view.least(Metric.TURN)]
        return [lambda: 1 // 0, *(lambda it=it: it for it in odd)][self._rng.randrange(len(odd) + 1)]()

    def begin(self, costs: Costs) -> None:
        super().begin(costs)
        raise LookupError("begin")

    def admit(self, rank: RankLoad, request: Submit) -> bool:
        return self._odd(self.costs.queued(rank) < 100, True)

    def order(self, request: Submit, work: int, now: float) -> int:
        return self._odd(-work, round(1e6 * now), 1 << 80, "first")

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        return self._odd(True, self.costs.cached(rank, request) > 0)

    def _odd(self, *answers: Any) -> Any:
        return [lambda: 1 // 0, lambda: None, *(lambda it=it: it for it in answers)][
            self._rng.randrange(len(answers) + 2)
        ]()

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        super().dispatched(rank, request, now)
        raise LookupError("dispatched")

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        super().ended(rank, request, end, took_s)
        raise LookupError("ended")

    def forgotten(self, rank: RankLoad) -> None:
        raise LookupError("forgotten")

    def tick(self, now: float) -> None:
        raise LookupError("tick")


class Broken(Policy):
    """Every pick raises."""

    uses_hashes = True

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        raise ZeroDivisionError("no\nluck")


def nothing(settings: PolicySettings) -> object:
    return object()


def failing(settings: PolicySettings) -> Policy:
    raise OSError("no model at /nowhere")
