"""One leg of a request at a node: its record and the table of its life. Decides nothing (`nodes.link.core` does)."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from bus.wire.messages import Code, Ended, FoundBy, Location, Params, Role
from nodes.own.fetch import Fetch


class LegState(enum.Enum):
    """Where a leg is. Decode legs pass from LOCATING to SCHEDULED; the others begin there."""

    LOCATING = "locating"  # decode: which rank prefills the room?
    LOCATED = "located"  # decode: asked that rank, which has not finished the prompt yet
    ADMITTING = "admitting"  # decode: first token known; waits for a run slot and KV blocks
    FETCHING = "fetching"  # decode: KV blocks are coming in
    SCHEDULED = "scheduled"  # the scheduler computes it, or will
    HOLDING = "holding"  # prefill: computed; the KV cache waits to be fetched
    ENDED = "ended"


_S = LegState
TRANSITIONS: dict[LegState, frozenset[LegState]] = {
    _S.LOCATING: frozenset({_S.LOCATED, _S.ENDED}),
    _S.LOCATED: frozenset({_S.ADMITTING, _S.ENDED}),
    _S.ADMITTING: frozenset({_S.FETCHING, _S.ENDED}),
    _S.FETCHING: frozenset({_S.SCHEDULED, _S.ENDED}),
    _S.SCHEDULED: frozenset({_S.HOLDING, _S.ENDED}),
    _S.HOLDING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}

NO_ROOM = -1


class IllegalTransition(AssertionError):
    """A bug of ours; the message tells the leg's whole life."""


@dataclass(slots=True, eq=False)
class Leg:
    """`owner` is the connection whose controller hears of its progress; `seq` names it to the scheduler."""

    rid: str
    attempt: int
    kind: Role
    owner: int
    seq: int
    room: int  # NO_ROOM for unified legs
    prompt: array[int]
    prompt_tokens: int
    max_tokens: int
    offset: int
    priority: int
    params: Params
    state: LegState
    began: float
    deadline: float | None
    stop_ids: frozenset[int] = frozenset()
    prefill_instance: str = ""

    story: list[tuple[str, str]] = field(default_factory=list)  # (state, cause), as it went
    started: bool = False
    first_token: int = 0
    first_token_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    found_by: FoundBy = ""
    location: Location | None = None  # decode: of the prefill leg
    told: bool = False  # decode: its controller dispatched the prefill leg too
    kv_attempt: int = 0  # decode: the attempt under which the room was registered
    kv_open: bool = False  # decode: the prefill rank has been asked and not been told that we are done
    asked_at: float = 0.0
    heard_at: float = 0.0
    fetch: Fetch | None = None

    def move(self, to: LegState, cause: str) -> None:
        """IllegalTransition when the table does not allow it."""
        if to not in TRANSITIONS[self.state]:
            steps = " -> ".join(f"{state} ({why})" for state, why in self.story)
            raise IllegalTransition(
                f"{self.kind} leg {self.rid}/{self.attempt} cannot go from {self.state.value} to {to.value} "
                f"on {cause}; so far: {steps or 'nothing'}"
            )
        self.story.append((to.value, cause))
        self.state = to

    def ended(self, code: Code, message: str) -> Ended:
        return Ended(
            self.rid,
            self.attempt,
            self.kind,
            code,
            message[:1024],
            self.output_tokens,
            self.found_by,
            self.first_token_s,
            self.cached_tokens,
        )
