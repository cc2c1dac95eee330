"""Decides when a part of a cluster (broker, controller, node or edge process) that ended is started again, and when to
give up. Pure: time is an argument in seconds; `supervisor` (or another launcher) carries the decisions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from bus.errors import ConfigError
from bus.runtime.cli import EXIT_CONFIG, EXIT_REPLACED

# Exit codes after which a restart cannot help: the part was asked to leave or has drained (0), its settings are
# bad (2), or a later start of its rank has replaced it (4). A part that could not start (3) may succeed the next time.
FINAL = frozenset({0, EXIT_CONFIG, EXIT_REPLACED})
ROLES = frozenset({"prefill", "decode", "unified"})


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The rules for restarts: at most `limit` restarts of a part within `window_s` seconds of service.

    Time in which the part waits or starts is not service; otherwise a part that loads for minutes and then fails would
    never reach the limit. The wait before a restart is `first_delay_s`, doubled for each further restart within the
    window, at most `max_delay_s`. A part that is not READY `start_timeout_s` after its start is killed, which counts as
    a failure.
    """

    limit: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"restarts must be 0 or more, not {self.limit}")
        if not (self.window_s > 0 and self.start_timeout_s > 0 and 0 <= self.first_delay_s <= self.max_delay_s):
            raise ConfigError("a restart's times must be above 0, and its first delay no longer than its longest")


@dataclass(frozen=True, slots=True)
class Again:
    """A verdict: the part will be started again after `delay_s`, for the `number`-th time within the window. `due`
    returns its Start then."""

    part: str
    cause: str
    delay_s: float
    number: int


@dataclass(frozen=True, slots=True)
class Left:
    """A verdict: the part stays away for good; the others go on."""

    part: str
    cause: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A verdict: the cluster cannot go on without the part, and must be stopped; `why` is the reason why it is not
    started again."""

    part: str
    cause: str
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """An action: start the part now, then call `ready` when it is READY, or `exited`."""

    part: str
    cause: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """An action: the part has not become READY in time; kill it, then call `exited`."""

    part: str
    cause: str


Verdict: TypeAlias = Again | Left | GiveUp
Due: TypeAlias = Start | Overdue


class PartState(Enum):
    """The state of a part; `_NEXT` has the allowed transitions."""

    SERVING = "serving"
    WAITING = "waiting"  # for its restart
    STARTING = "starting"
    LEFT = "left"


_NEXT: dict[PartState, frozenset[PartState]] = {
    PartState.SERVING: frozenset({PartState.WAITING, PartState.LEFT}),
    PartState.WAITING: frozenset({PartState.STARTING}),
    PartState.STARTING: frozenset({PartState.SERVING, PartState.WAITING, PartState.LEFT}),
    PartState.LEFT: frozenset(),
}


@dataclass(slots=True)
class _Part:
    name: str
    duty: str
    since: float  # when `state` began
    state: PartState = PartState.SERVING
    due: float = 0.0  # while waiting: when to start; while starting: when it is overdue
    cause: str = ""  # the cause of its last end
    served_s: float = 0.0  # total service time up to `since`
    failed_at: deque[float] = field(default_factory=deque)  # readings of `served_s`

    def move(self, state: PartState, now: float) -> None:
        assert state in _NEXT[self.state], f"{self.name} was {self.state.value} and cannot be {state.value}; {self}"
        if self.state is PartState.SERVING:
            self.served_s += now - self.since
        self.state, self.since = state, now


class Restarts:
    """The restarts of one cluster's parts, from the time when all of them serve. Call `exited` when a part ends,
    `ready` when a restarted one serves, and `due` after each `wait_s`."""

    def __init__(self, duties: Mapping[str, str], policy: RestartPolicy, now: float) -> None:
        """`duties` gives the duty of each part by name: `broker`, `controller`, `edge`, or a node's role."""
        self.policy = policy
        self._parts = {name: _Part(name, duty, now) for name, duty in duties.items()}

    def state(self, part: str) -> PartState:
        """Return the state of a part."""
        return self._parts[part].state

    def exited(self, part: str, code: int | None, cause: str, now: float) -> Verdict:
        """Note that a part has ended with `code` (negative: by a signal; None: it could not be started) and with
        `cause` in words; return what follows: Again, Left or GiveUp. Exit codes of FINAL are never restarted."""
        it = self._parts[part]
        it.cause = cause
        if code in FINAL:
            it.move(PartState.LEFT, now)
            missed = self._missed(it.duty, failed=bool(code))
            return GiveUp(part, cause, f"no {missed} is left") if missed else Left(part, cause)
        policy = self.policy
        serving_s = now - it.since if it.state is PartState.SERVING else 0.0
        while it.failed_at and it.served_s + serving_s - it.failed_at[0] > policy.window_s:
            it.failed_at.popleft()
        count = len(it.failed_at)
        if count >= policy.limit:
            it.move(PartState.LEFT, now)
            why = (
                f"it was started again {count} times within {policy.window_s:g} s of service"
                if count
                else "it may not be started again"
            )
            return GiveUp(part, cause, why)
        it.move(PartState.WAITING, now)
        it.failed_at.append(it.served_s)
        delay_s = min(policy.max_delay_s, policy.first_delay_s * 2.0**count)
        it.due = now + delay_s
        return Again(part, cause, delay_s, count + 1)

    def _missed(self, duty: str, *, failed: bool) -> str:
        """Return the duty that the cluster cannot do without, now that a part with `duty` has left for good; empty: it
        can go on. Draining the last rank of a role is intended; after a failure, the other role would serve nothing."""
        left = {each.duty for each in self._parts.values() if each.state is not PartState.LEFT}
        if duty not in ROLES:
            return "" if duty in left else duty
        if not left & ROLES:
            return "node"
        serves = "unified" in left or {"prefill", "decode"} <= left
        return "" if serves or not failed else f"{duty} node"

    def ready(self, part: str, now: float) -> None:
        """Note that a restarted part serves."""
        self._parts[part].move(PartState.SERVING, now)

    def due(self, now: float) -> list[Due]:
        """Return the actions for now: Start for waiting parts whose delay is over, Overdue for starts that take too
        long. An Overdue is returned each time, until `exited` is called for it."""
        todo: list[Due] = []
        for it in self._parts.values():
            if it.state not in (PartState.WAITING, PartState.STARTING) or it.due > now:
                continue
            if it.state is PartState.WAITING:
                it.move(PartState.STARTING, now)
                it.due = now + self.policy.start_timeout_s
                todo.append(Start(it.name, it.cause))
            else:
                todo.append(Overdue(it.name, f"not ready after {self.policy.start_timeout_s:g} s"))
        return todo

    def wait_s(self, now: float) -> float:
        """Return the seconds until `due` has something (infinite: only the end of a part changes that)."""
        dues = [it.due for it in self._parts.values() if it.state in (PartState.WAITING, PartState.STARTING)]
        return max(0.0, min(dues, default=float("inf")) - now)
