"""The health of ranks (a rank is one copy of the model, at a node): which may get dispatches (requests to run), and why
the others may not. Pure: `now` is an argument.

Three independent signs decide (the direct connection, the bus, the step counter):

| state | sign |
| --- | --- |
| starting | the node states it; or it runs something and has not reported yet, so its load is not known |
| ready | connected, seen within its lease, reporting, moving |
| draining | the node states it, or an operator asked |
| silent | connected, but the bus carried nothing of it for a lease (and 3 of its intervals), but loads of others |
| lost | nothing came over its connection for a lease, or the connection is gone (a moment later where it drains) |
| hung | connected and busy, but its step counter stood still for `hang_s` |
| gone | it said goodbye |

When the bus carries no rank's loads (the broker died, or ranks cannot reach it), no rank becomes silent. If this
process itself was paused, the pause does not count as silence of the ranks, and connections that closed meanwhile have
a lease to come back. This module owns these verdicts; it sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.defaults import SILENT_INTERVALS
from bus.wire.messages import Load, MemberKey, NodeState, RankState

MOMENT_S = 0.5  # for a rank whose connection closed to say hello over another one; a sixth of the lease at most
DEAD: frozenset[RankState] = frozenset({"lost", "hung", "gone"})  # what runs there is given up


@dataclass(slots=True)
class Liveness:
    """The signs of life of one rank's epoch (start). Times are seconds of the caller's clock."""

    key: MemberKey
    epoch: int
    declared: NodeState
    known: bool  # its load is known: it reported, or it said hello with nothing running
    hello_at: float
    last_seen_at: float
    reported_at: float
    interval_s: float = 0.0  # within which it says that it will publish again
    step: int = -1
    step_at: float = 0.0
    busy: bool = False
    drain: bool = False  # an operator asked
    cut_at: float | None = None  # since when its connection is gone
    returning: bool = False  # it was dead since it was last ready, or is another start of a rank that is known
    state: RankState = "starting"  # the last verdict
    state_at: float = 0.0  # since when

    def moved(self, step: int, busy: bool, now: float) -> None:
        """Record the step counter; only a rise counts as movement."""
        if step > self.step:
            self.step = step
            self.step_at = now
        elif not busy or not self.busy:
            self.step_at = now
        self.busy = busy


@dataclass(frozen=True, slots=True)
class Change:
    """A rank's state has changed, from `old` to `new`."""

    key: MemberKey
    old: RankState
    new: RankState


class Health:
    """The health of all ranks, by key. It takes signs of life (`hello`, `seen`, `moved`, `report`, ...) and gives
    verdicts (`assess`, `sweep`). Signs of unknown ranks are ignored. `lease_s`: how long a rank may be silent;
    `hang_s`: how long a busy rank's steps may stand still; `settle_s`: see `settled`. Times are in seconds."""

    def __init__(self, *, lease_s: float, hang_s: float, settle_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._pause_s = lease_s / 3  # of our own, or of the bus
        self._moment_s = min(MOMENT_S, lease_s / 6)
        self._woke_at = float("-inf")  # after an absence of our own
        self.hang_s = hang_s
        self._settle_s = settle_s
        self._started_at = now
        self._settled = False
        self._bus_at = now  # the bus last carried anything
        self._bus_since = now  # without a pause
        self.loads_at = now  # it last carried the load of a rank that is here
        self._swept_at = now
        self.liveness: dict[MemberKey, Liveness] = {}

    # --- signs ------------------------------------------------------------------------------------------------

    def hello(self, key: MemberKey, epoch: int, declared: NodeState, *, idle: bool, now: float) -> Liveness:
        """Record that a node introduced or restated itself; return its signs of life, new ones for another epoch.
        `idle`: nothing runs there, so its load is known."""
        pulse = self.liveness.get(key)
        if pulse is None or pulse.epoch != epoch:
            pulse = self.liveness[key] = Liveness(key, epoch, declared, idle, now, now, now, step_at=now, state_at=now)
        pulse.declared = declared
        pulse.last_seen_at = now
        pulse.cut_at = None
        return pulse

    def seen(self, key: MemberKey, now: float) -> None:
        """Record that anything came over the rank's connection."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.last_seen_at = now

    def moved(self, key: MemberKey, step: int, busy: bool, now: float) -> None:
        """Record the step counter from a pong or a report. These overtake each other, so only a rise counts as
        movement."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.moved(step, busy, now)

    def set_back(self, key: MemberKey) -> None:
        """Drop what was recorded of the rank's steps, because another peer had sent it under its name."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.step = -1

    def report(self, key: MemberKey, load: Load, now: float, interval_s: float = 0.0) -> None:
        """Record a load report over the bus; the next one comes within `interval_s`, if the rank stated it."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.reported_at = now
            pulse.known = True
            pulse.interval_s = interval_s
            pulse.moved(load.step, load.running > 0, now)

    def bus_seen(self, now: float) -> None:
        """Record that the bus carried a message of any rank."""
        if now - self._bus_at > self._pause_s:
            self._bus_since = now  # it was away: what the ranks said meanwhile is lost, and not their fault
        self._bus_at = now

    def unreachable(self, key: MemberKey, now: float) -> None:
        """Record that the rank's connection is gone; `hello` ends that."""
        pulse = self.liveness.get(key)
        if pulse is not None and pulse.cut_at is None:
            pulse.cut_at = now

    def silent_with(self, key: MemberKey, other: MemberKey, now: float) -> None:
        """Record that a rank is as silent as `other`, a lost one of its process, if it was not heard for half a lease.
        A live one answers sooner."""
        pulse, lost = self.liveness[key], self.liveness[other]
        if now - pulse.last_seen_at > self._lease_s / 2:
            pulse.last_seen_at = min(pulse.last_seen_at, lost.last_seen_at)

    def drain(self, key: MemberKey) -> None:
        """Record that an operator wants the rank to take nothing new, until its next start."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.drain = True

    def bye(self, key: MemberKey) -> None:
        """Record the rank's goodbye."""
        pulse = self.liveness.get(key)
        if pulse is not None:
            pulse.declared = "gone"

    def forget(self, key: MemberKey) -> None:
        """Drop a rank; an unknown one is no error."""
        self.liveness.pop(key, None)

    # --- verdicts ---------------------------------------------------------------------------------------------

    def state(self, pulse: Liveness, now: float) -> RankState:
        """Return the verdict on one rank now, without recording it; the worst sign decides."""
        if pulse.declared == "gone":
            return "gone"
        draining = pulse.declared == "draining" or pulse.drain
        if pulse.cut_at is not None and not (draining and self.may_return(pulse, now)):
            return "lost"
        if now - pulse.last_seen_at > self._lease_s:
            return "lost"
        if pulse.busy and now - pulse.step_at > self.hang_s:
            return "hung"
        if draining:
            return "draining"
        allowed_s = max(self._lease_s, SILENT_INTERVALS * pulse.interval_s)
        if self.loads_at - max(pulse.reported_at, self._bus_since) > allowed_s >= now - self.loads_at:
            return "silent"
        if pulse.declared == "starting" or not (pulse.known or now - pulse.hello_at > self._lease_s):
            return "starting"
        return "ready"

    def assess(self, key: MemberKey, now: float) -> Change | None:
        """Record the verdict on one rank and return its change since the last one; None: no change, or unknown."""
        pulse = self.liveness.get(key)
        if pulse is None:
            return None
        self._excuse_absence(now)
        state = self.state(pulse, now)
        if state == pulse.state:
            return None
        change = Change(key, pulse.state, state)
        pulse.state, pulse.state_at = state, now
        return change

    def sweep(self, now: float) -> list[Change]:
        """Record the verdicts on all ranks and return the changes. Call it several times a lease: a longer pause
        between two calls counts as our own absence."""
        self._excuse_absence(now)
        self._swept_at = now
        return [change for key in list(self.liveness) if (change := self.assess(key, now))]

    def _excuse_absence(self, now: float) -> None:
        """Let a pause of this process count for no rank, before the first verdict after it."""
        away_s = now - self._swept_at
        if away_s > self._pause_s:
            self._swept_at = self._woke_at = now
            for pulse in self.liveness.values():
                pulse.last_seen_at = min(now, pulse.last_seen_at + away_s)
                pulse.step_at = min(now, pulse.step_at + away_s)

    def may_return(self, pulse: Liveness, now: float) -> bool:
        """Return true if a rank without a connection may still say hello over another one before its work is given
        up."""
        since = pulse.cut_at
        return since is not None and now < max(since + self._moment_s, self._woke_at + self._lease_s)

    def is_dead(self, pulse: Liveness, now: float) -> bool:
        """Return true if a lost rank has said nothing for a lease since its connection closed, or since it was found to
        be silent."""
        since = pulse.cut_at if pulse.cut_at is not None else pulse.last_seen_at + self._lease_s
        return now >= max(since, self._woke_at) + self._lease_s

    def young(self, now: float) -> bool:
        """Return true for a lease after the start: until then, ranks that were here before this process may be
        missing."""
        return self._settle_s > 0 and now - self._started_at < self._lease_s

    def settled(self, now: float) -> bool:
        """Return true if enough is known to decide: `settle_s` after the start (time for nodes to reconnect), and no
        known rank still owes a report; after a lease in any case. Once settled, it stays settled."""
        if not self._settled:
            age_s = now - self._started_at
            waiting = any(not pulse.known for pulse in self.liveness.values())
            self._settled = age_s >= self._lease_s or (age_s >= self._settle_s and not waiting)
        return self._settled

    def quiet_s(self, key: MemberKey, now: float) -> float:
        """Return the seconds for which the rank's connection has carried nothing. The rank must be known."""
        return now - self.liveness[key].last_seen_at
