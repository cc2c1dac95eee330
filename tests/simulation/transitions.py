"""Which transitions the cores make in a trial, and which they may make and never did.

What may be is read from the code: from the tables of cores that have one, else from the states or answers that a type
names, each of which has to be entered or given at least once. Parts are watched where they take a transition, and only
while they are asked for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args, get_type_hints

import controller.requests.life
import controller.requests.request as at_controller
import nodes.link.leg as at_rank
import pdbus.client.request as at_client
from bus.broker.rooms import RoomTable
from bus.wire.messages import NodeState, RankState
from controller.members import Members
from nodes.link.rank import LinkedRank
from nodes.link.reports import Reports
from nodes.own.sequence import Phase, Sequence

Transition: TypeAlias = tuple[str, str, str, str]  # core, state, event, next state; the two in the middle may be open
SEP = " | "


@dataclass(frozen=True)
class Watched:
    """A function that takes transitions: `before` tells its arguments' state and event, `after` the next state, from
    what it returned and its arguments. `may_be`: what is declared."""

    core: str
    owner: Any
    name: str
    before: Callable[..., tuple[str, str]]
    after: Callable[..., str]
    may_be: frozenset[Transition]


def _steps(core: str, table: Iterable[tuple[str, str, str]]) -> frozenset[Transition]:
    return frozenset((core, *each) for each in table)


def _states(core: str, states: Iterable[str]) -> frozenset[Transition]:
    return frozenset((core, "", "", state) for state in states)


def _answers(core: str, function: Any) -> frozenset[Transition]:
    return _states(core, get_args(get_type_hints(function)["return"]))


def _nested(table: Mapping[Any, Mapping[Any, Any]]) -> list[tuple[str, str, str]]:
    return [(was.value, event.value, now.value) for was, events in table.items() for event, now in events.items()]


def _flat(table: Mapping[Any, Any]) -> list[tuple[str, str, str]]:
    return [(was.value, event, now.value) for (was, event), now in table.items()]


def _leg(it: Any) -> str:
    return f"{it.role} {it.state.value}"


WATCHED = (
    Watched(
        "request at its client", at_client.Request, "move",
        lambda it, event: (it.state.value, event.value), lambda result, it, event: it.state.value,
        _steps("request at its client", _nested(at_client.NEXT)),
    ),
    Watched(
        "submit at its client", at_client.Request, "move_at",
        lambda it, key, event: (it.submit_states[key].value, event.value),
        lambda result, it, key, event: it.submit_states[key].value,
        _steps("submit at its client", _nested(at_client.SUBMIT_NEXT)),
    ),
    Watched(
        "request at its controller", at_controller.Request, "step",
        lambda it, what: (it.state.value, what), lambda result, it, what: it.state.value,
        _steps("request at its controller", _flat(at_controller.NEXT)),
    ),
    Watched(
        "leg at its controller", at_controller.LegRun, "step",
        lambda it, what: (it.state.value, what), lambda result, it, what: it.state.value,
        _steps("leg at its controller", _flat(at_controller.LEG_NEXT)),
    ),
    Watched(
        "leg at its rank", at_rank.Leg, "step",
        lambda it, step: (_leg(it), step), lambda result, it, step: _leg(it),
        _steps(
            "leg at its rank",
            [(f"{role} {was.value}", step, f"{role} {now.value}") for (role, was, step), now in at_rank.NEXT.items()],
        ),
    ),
    Watched(
        "rank at a controller", Members, "_act",
        lambda it, change, now, out, sign: (change.old, sign), lambda result, it, change, now, out, sign: change.new,
        _states("rank at a controller", get_args(RankState)),
    ),
    Watched(
        "rank of itself", LinkedRank, "_set_state",
        lambda it, state: (it.state, "said"), lambda result, it, state: state,
        _states("rank of itself", set(get_args(NodeState)) - {"starting", "ready"}),  # in which it begins
    ),
    Watched(
        "what becomes of a failed try", controller.requests.life, "verdict",
        lambda request, code, *more: (request.state.value, code), lambda result, *_: result,
        _answers("what becomes of a failed try", at_controller.verdict),
    ),
    Watched(
        "dispatch at its rank", Reports, "acknowledge",
        lambda it, dispatch: ("sent", dispatch.leg), lambda result, *_: result,
        _answers("dispatch at its rank", Reports.acknowledge),
    ),
    Watched(
        "room at the broker", RoomTable, "register",
        lambda *_: ("claimed", "registered"), lambda result, *_: result,
        _answers("room at the broker", RoomTable.register),
    ),
)  # fmt: skip
PHASES = "sequence at its scheduler"
MAY_BE: frozenset[Transition] = frozenset().union(*(each.may_be for each in WATCHED)) | _states(
    PHASES, [phase.value for phase in Phase]
)


@contextmanager
def watched() -> Iterator[Counter[Transition]]:
    """Count the transitions that all cores make meanwhile."""
    met: Counter[Transition] = Counter()
    plain = [(each.owner, each.name, getattr(each.owner, each.name)) for each in WATCHED]
    sequences: Any = Sequence
    phase = sequences.phase
    try:
        for each, (owner, name, function) in zip(WATCHED, plain, strict=True):
            setattr(owner, name, _counted(each, function, met))
        sequences.phase = property(phase.__get__, _counted_phase(phase, met))
        yield met
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)
        sequences.phase = phase


def _counted(of: Watched, function: Callable[..., Any], met: Counter[Transition]) -> Callable[..., Any]:
    core, before, after = of.core, of.before, of.after

    def counted(*arguments: Any) -> Any:
        was, event = before(*arguments)
        result = function(*arguments)
        met[core, was, event, after(result, *arguments)] += 1
        return result

    return counted


def _counted_phase(slot: Any, met: Counter[Transition]) -> Callable[[Sequence, Phase], None]:
    """Return how a sequence's phase is set: its events are the functions of the scheduler that do so."""

    def counted(sequence: Sequence, phase: Phase) -> None:
        try:
            was = slot.__get__(sequence).value
        except AttributeError:
            was = "new"
        slot.__set__(sequence, phase)
        met[PHASES, was, sys._getframe(1).f_code.co_name, phase.value] += 1

    return counted


def never(met: Iterable[Transition]) -> list[Transition]:
    """Return what may be and was never met."""
    some = set(met)
    entered = {(core, "", "", now) for core, _, _, now in some}
    return sorted(MAY_BE - some - entered)


def line_of(each: Transition) -> str:
    """Return a transition as a line of the table."""
    core, was, event, now = each
    return f"{core}: {was}, {event}: {now}" if was else f"{core}: {now}"
