"""The reports to controllers about the legs at one rank: which dispatches came, which legs began, and which ended. Pure
bookkeeping.

An acknowledgement counts, in order, all that this rank has ingested from one start (epoch) of a controller; the
controller's load estimate relies on it. Ends are remembered for a while, so that a repeated dispatch or a returning
controller gets the same answer again. All of it is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bus.wire.codes import Refusal
from bus.wire.messages import Ack, Dispatch, Ended
from nodes.link.leg import Identity, Leg, identity_of

MAX_ACKS = 64
MAX_REMEMBERED = 16_384
REMEMBER_S = 120.0  # longer than a dispatch is on its way, or a controller away
MAX_RESTATED = 1024


@dataclass(slots=True)
class Report:
    """The report to one owner: (rid, attempt) of legs that produced their first output, and legs that ended."""

    started: list[tuple[str, int]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class _Remembered(NamedTuple):
    end: Ended
    owner: int
    identity: Identity  # of the request that ended so
    at: float


class Reports:
    """The reports of one rank, kept by its core. `owner` names the connection to a controller; `now` is seconds on the
    process's clock."""

    def __init__(self) -> None:
        self._acks: OrderedDict[int, tuple[int, Ack]] = OrderedDict()  # controller epoch -> (last number, ack)
        self._epochs: dict[int, int] = {}  # of the controller that welcomed this rank last, by owner
        self._reports: dict[int, Report] = {}
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()  # the last end of each rid, in order of time

    @property
    def acks(self) -> tuple[Ack, ...]:
        """The acknowledgements to publish with each load: of each controller, the dispatches and tokens ingested so
        far."""
        return tuple(ack for _, ack in self._acks.values())

    def welcomed(self, owner: int, epoch: int) -> None:
        """Add a controller that may dispatch here to the acks; then its published counters count for other
        controllers. It replaces an earlier start at the other end of the same connection."""
        self._epochs[owner] = epoch
        if epoch not in self._acks:
            self._keep(0, Ack(epoch, 0, 0))

    def acknowledge(self, dispatch: Dispatch) -> Literal["counted", "gap", "repeated"]:
        """Acknowledge a dispatch by its number. Return `gap` where dispatches before it were lost on the way,
        `repeated` where it was counted before; then it is not counted again."""
        epoch = dispatch.controller_epoch
        last, ack = self._acks.get(epoch, (0, Ack(epoch, 0, 0)))
        if dispatch.number <= last:
            return "repeated"
        self._keep(dispatch.number, Ack(epoch, ack.dispatches + 1, ack.tokens + dispatch.charge))
        return "gap" if last and dispatch.number > last + 1 else "counted"

    def started(self, leg: Leg) -> None:
        """Report to the leg's owner that it produced its first output."""
        self._report(leg.owner).started.append((leg.rid, leg.attempt))

    def ended(self, owner: int, end: Ended) -> None:
        """Report an end to `owner` without remembering it: the attempt may be dispatched again."""
        self._report(owner).ended.append(end)

    def remember(self, owner: int, end: Ended, identity: Identity, now: float) -> None:
        """Report an end to `owner`, and remember it for REMEMBER_S seconds: a dispatch of the same attempt, or of an
        older one, then gets it as its answer."""
        self.ended(owner, end)
        remembered = self._remembered
        remembered[end.rid] = _Remembered(end, owner, identity, now)
        remembered.move_to_end(end.rid)
        while len(remembered) > MAX_REMEMBERED or now - next(iter(remembered.values())).at > REMEMBER_S:
            remembered.popitem(last=False)

    def answered(self, owner: int, dispatch: Dispatch, current: Leg | None, now: float) -> bool:
        """Return true if this attempt is live or has ended here: then `owner` gets its report again, and the dispatch
        needs nothing else. `current` is the live leg of the same request (None: there is none)."""
        if current is not None and current.attempt == dispatch.attempt:
            current.owner = owner  # a controller that came back takes its request over
            if current.started:
                self.started(current)
            return True
        known = self.last_end(dispatch.rid, identity_of(dispatch), now)
        if known is not None and known.attempt == dispatch.attempt:
            self.ended(owner, known)
            return True
        return False

    def check_newest(self, dispatch: Dispatch, current: Leg | None, now: float) -> None:
        """Raise Refusal when a newer attempt of the same request is here, or was."""
        known = self.last_end(dispatch.rid, identity_of(dispatch), now)
        if max(current.attempt if current else 0, known.attempt if known else 0) > dispatch.attempt:
            raise Refusal("fenced", "a newer attempt was here")

    def last_end(self, rid: str, identity: Identity, now: float) -> Ended | None:
        """Return the remembered end of the request that `rid` and `identity` name; None: it is not remembered."""
        known = self._remembered.get(rid)
        if known is None or now - known.at > REMEMBER_S or not known.identity.agrees(identity):
            return None
        return known.end

    def restate(self, owner: int, live: Iterable[Leg]) -> None:
        """Report again to `owner` which of its live legs began and what ended lately: its controller may have missed
        reports."""
        report = self._report(owner)
        report.started += [(leg.rid, leg.attempt) for leg in live if leg.owner == owner and leg.started]
        recent = list(self._remembered.values())[-MAX_RESTATED:]
        report.ended += [each.end for each in recent if each.owner == owner and each.end not in report.ended]

    def take(self) -> dict[int, Report]:
        """Return the reports since the last call, by owner, to be sent now."""
        reports, self._reports = self._reports, {}
        return reports

    def _keep(self, number: int, ack: Ack) -> None:
        self._acks[ack.controller_epoch] = (number, ack)
        self._acks.move_to_end(ack.controller_epoch)
        if len(self._acks) > MAX_ACKS:
            living = self._epochs.values()  # a start that another took the place of goes before one that lives
            del self._acks[next((each for each in self._acks if each not in living), next(iter(self._acks)))]

    def _report(self, owner: int) -> Report:
        return self._reports.setdefault(owner, Report())
