"""Requests that wait at their controllers, where a policy or the order of the SLO says when they go to ranks. Owns
their lines and when each is tried again; `simulate` sends them to ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bus.wire.messages import Role, Submit
from controller.requests.order import ArrivalOrder, PolicyOrder, SloOrder
from pdbus.lab.clock import VirtualLoop
from pdbus.lab.config import LabConfig
from pdbus.lab.reports import Listener
from pdbus.lab.tape import Tape

TICK_S = 0.05  # of a controller


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits at a controller."""

    number: int
    work: int
    first_due: float
    order: int

    @property
    def arrived(self) -> int:
        """The number that the order of arrival uses."""
        return self.number


@dataclass(slots=True, eq=False)
class _Line:
    """The requests that wait at one controller: for a unified rank, or for a prefill rank and a decode rank."""

    owner: int  # the controller
    chooser: Listener
    decode: Listener | None
    waiting: ArrivalOrder[_Waiting]
    unified: bool
    wake_s: float = math.inf  # when the controller tries it again


class Lines:
    """The lines of all controllers. `late` binds a request when a rank runs dry, `admits` when the policies of both
    ranks admit it, `orders` lets the policy say which goes first. `submit_of` gives the header of a request by number,
    `dispatch` sends it to ranks, and `goes_unified` says whether a pair goes to a unified rank instead (None: none
    does)."""

    def __init__(
        self, loop: VirtualLoop, config: LabConfig, *, late: bool, admits: bool, orders: bool,
        submit_of: Callable[[int], Submit], dispatch: Callable[[int], None],
        goes_unified: Callable[[int, Submit], bool] | None,
    ) -> None:  # fmt: skip
        self._loop, self._config = loop, config
        self._late, self._admits, self._orders = late, admits, orders
        self._submit_of, self._dispatch, self._goes_unified = submit_of, dispatch, goes_unified
        self._by_tick = late and config.controllers > 1
        self._lines: dict[Role, list[_Line]] = {}
        self.tape: Tape | None = None  # records how many wait

    def open(self, role: Role, choosers: list[Listener], decode: list[Listener]) -> None:
        """Open a line at each controller for the requests whose prompts ranks of `role` compute; `decode` are the
        choosers of their decode ranks, if they have any."""
        self._lines[role] = [
            _Line(number, chooser, decode[number] if decode else None, self._order(), role == "unified")
            for number, chooser in enumerate(choosers)
        ]

    def add(self, role: Role, owner: int, number: int, arrived_s: float) -> None:
        """Let a request wait at controller `owner` for a rank of `role`; it goes at once if it may."""
        line = self._lines[role][owner]
        line.chooser.read()
        submit = self._submit_of(number)
        work = line.chooser.work(submit)
        order = line.chooser.chooser.order(submit, work, self._loop.now) if self._orders else 0
        line.waiting.add(_Waiting(number, work, arrived_s + self._config.slo_ttft_s, order))
        self._record(owner)
        if not self._by_tick or len(line.waiting) == 1:
            self._bind(line)

    def news(self, role: Role, at_s: float) -> None:
        """Try the requests that wait for ranks of `role` at `at_s`, when a report comes that was sent after a step."""
        for line in self._lines[role]:
            if line.waiting:
                self._wake_at(line, at_s)

    def _order(self) -> ArrivalOrder[_Waiting]:
        if self._orders:
            return PolicyOrder(self._config.overtake_tokens)
        return SloOrder(self._config.overtake_tokens) if self._config.queue_order == "slo" else ArrivalOrder()

    def _bind(self, line: _Line) -> None:
        """Dispatch waiting requests while a prefill rank (under late binding one that is nearly idle) and a decode rank
        can take the next, or a unified rank can."""
        waiting, chooser = line.waiting, line.chooser
        second = chooser if line.unified else line.decode  # which must be able to take it, too
        next_s = chooser.next_s
        while waiting:
            open_now = line.unified or not self._late or chooser.least_tokens() < self._config.late_tokens
            if not open_now and self._goes_unified is None:
                break
            _, head = waiting.head(lambda item: self._loop.now + chooser.first_token_s(item.work) <= item.first_due)
            submit = self._submit_of(head.number)
            if self._goes_unified is None or not self._goes_unified(head.number, submit):
                if not open_now or (self._admits and not line.unified and not chooser.takes(submit)):
                    break
                if second is not None and not second.takes(submit):
                    next_s = second.next_s
                    break
            waiting.remove(head)
            self._record(line.owner)
            self._dispatch(head.number)
        if waiting:  # until a report comes
            self._wake_at(line, next_s())

    def _record(self, owner: int) -> None:
        if self.tape is not None:
            waiting = sum(len(lines[owner].waiting) for lines in self._lines.values() if lines)
            self.tape.waits(owner, self._loop.now, waiting)

    def _wake_at(self, line: _Line, at_s: float) -> None:
        if self._by_tick:  # otherwise all controllers would fill the same rank after the same report
            phase = TICK_S * line.owner / self._config.controllers
            at_s = phase + TICK_S * math.ceil((at_s - phase) / TICK_S)
            at_s += TICK_S * (at_s <= self._loop.now)
        if self._loop.now <= at_s < line.wake_s:
            line.wake_s = at_s
            self._loop.call_at(at_s, self._wake, line, at_s)

    def _wake(self, line: _Line, at_s: float) -> None:
        if at_s == line.wake_s:  # otherwise an earlier wake-up has replaced it
            line.wake_s = math.inf
            self._bind(line)
