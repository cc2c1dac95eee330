"""A guard around a policy from outside (not of ours): an exception or an invalid answer costs one pick by tokens, not
the controller.

This module owns the checks; the maker of a Guard decides what happens after a fault. It cannot help against a slow
policy.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from bus.errors import BusError
from bus.wire.messages import Ended, Submit
from controller.costs import Costs
from controller.load.groups import Metric, View
from controller.load.rank import RankLoad
from controller.policies.base import Policy
from controller.policies.prefix_index import PrefixIndex

FAULTS = (Exception, SystemExit)  # KeyboardInterrupt is no fault of the policy
OnFault = Callable[[str, str], None]  # gets the hook's name and what went wrong, one line


class Guard(Policy):
    """The guard of `policy`: it has the same methods. For each fault it calls `on_fault` with the hook's name and one
    line. A pick that fails, or returns no candidate, becomes the least loaded rank by tokens; `work` and `charge` that
    fail become the prompt's tokens; `cost` None; `admit` true; `order` 0, the order of arrival; `prefill_here` and
    `read_back` false. None raises, unless `on_fault` does."""

    def __init__(self, policy: Policy, on_fault: OnFault) -> None:
        self.policy = policy
        self.fixed = bool(policy.fixed)
        self.uses_hashes = bool(policy.uses_hashes)
        self.counts_queue_only = bool(policy.counts_queue_only)
        self.unit = str(policy.unit)[:32]
        self.prefixes = policy.prefixes if isinstance(policy.prefixes, PrefixIndex) else None
        self._on_fault = on_fault

    def begin(self, costs: Costs) -> None:
        self._notify("begin", costs)

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        """Return the policy's pick; after a fault the least loaded rank by tokens; None: no candidate."""
        try:
            rank = self.policy.pick(view, request, tokens)
        except FAULTS as error:
            self._on_fault("pick", one_line(error))
        else:
            if isinstance(rank, RankLoad) and (rank.candidate or (self.fixed and rank.ready)) and view.has(rank):
                return rank
            least = view.least(Metric.TOKENS)
            if rank is None and (self.fixed or least is None):
                return None
            what = f"rank {rank.key[0]}/{rank.key[1]}" if isinstance(rank, RankLoad) else type(rank).__name__
            self._on_fault("pick", f"it returned {what}, which is none of the candidates")
        return view.least(Metric.TOKENS)

    def cost(self, rank: RankLoad, request: Submit) -> float | None:
        """Return the policy's number, if it is finite."""
        try:
            cost = self.policy.cost(rank, request)
            return float(cost) if cost is not None and isfinite(cost) else None
        except FAULTS as error:
            self._on_fault("cost", one_line(error))
            return None

    def admit(self, rank: RankLoad, request: Submit) -> bool:
        """Return the policy's answer."""
        try:
            return bool(self.policy.admit(rank, request))
        except FAULTS as error:
            self._on_fault("admit", one_line(error))
            return True

    def order(self, request: Submit, work: int, now: float) -> int:
        """Return the policy's number."""
        try:
            return int(self.policy.order(request, work, now))
        except FAULTS as error:
            self._on_fault("order", one_line(error))
            return 0

    def prefill_here(self, rank: RankLoad, request: Submit) -> bool:
        """Return the policy's answer."""
        try:
            return bool(self.policy.prefill_here(rank, request))
        except FAULTS as error:
            self._on_fault("prefill_here", one_line(error))
            return False

    def read_back(self, rank: RankLoad, prefill: RankLoad, request: Submit) -> bool:
        """Return the policy's answer."""
        try:
            return bool(self.policy.read_back(rank, prefill, request))
        except FAULTS as error:
            self._on_fault("read_back", one_line(error))
            return False

    def work(self, request: Submit) -> int:
        """Return the policy's number of tokens, 1 at least."""
        try:
            return max(1, int(self.policy.work(request)))
        except FAULTS as error:
            self._on_fault("work", one_line(error))
            return request.prompt_tokens

    def charge(self, rank: RankLoad, request: Submit) -> int:
        """Return the policy's number of tokens, from 0 to those of the prompt."""
        try:
            return max(0, min(int(self.policy.charge(rank, request)), request.prompt_tokens))
        except FAULTS as error:
            self._on_fault("charge", one_line(error))
            return request.prompt_tokens

    def dispatched(self, rank: RankLoad, request: Submit, now: float) -> None:
        self._notify("dispatched", rank, request, now)

    def ended(self, rank: RankLoad, request: Submit, end: Ended | None, took_s: float) -> None:
        self._notify("ended", rank, request, end, took_s)

    def stored(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        self._notify("stored", rank, hashes)

    def removed(self, rank: RankLoad, hashes: Sequence[int]) -> None:
        self._notify("removed", rank, hashes)

    def forgotten(self, rank: RankLoad) -> None:
        self._notify("forgotten", rank)

    def tick(self, now: float) -> None:
        self._notify("tick", now)

    def _notify(self, hook: str, *arguments: Any) -> None:
        try:
            getattr(self.policy, hook)(*arguments)
        except FAULTS as error:
            self._on_fault(hook, one_line(error))


def overrides(policy: Policy, hook: str) -> bool:
    """Return true if `policy`, or the one that it guards, has a `hook` of its own."""
    own = policy.policy if isinstance(policy, Guard) else policy
    return getattr(getattr(own, hook), "__func__", None) is not getattr(Policy, hook)


def one_line(error: BaseException) -> str:
    """Return an exception in one line: its type and text, and the file and line that raised it."""
    what = " ".join(traceback.format_exception_only(error)[-1].split())[:400]
    frames = list(traceback.walk_tb(error.__traceback__))  # what extracts them reads the sources, too
    return f"{what} ({frames[-1][0].f_code.co_filename}:{frames[-1][1]})" if frames else what


def fail_on(method: str) -> OnFault:
    """Return an `on_fault` that raises BusError: for runs whose figures would mislead with another policy's picks."""

    def on_fault(hook: str, why: str) -> None:
        raise BusError(f"policy {method} failed in {hook}: {why}")

    return on_fault
