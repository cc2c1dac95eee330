"""One request at the client: its record, and the tables that decide its next state and that of each of its submits.

Owns what is kept of a request. Who is told what, and when, is for `core`.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from bus.wire.hashing import token_bytes
from bus.wire.messages import Code, FoundBy, Location, Rid, Submit, TokenLogprobs

GAP_S = 0.25  # between two requests to fill the same gap
Place: TypeAlias = tuple[str, Rid]  # a controller's client endpoint, and the rid that was submitted there


class _Identity(Enum):
    """Members are one each: without this their hash is that of their names, computed in Python at each look-up."""

    __hash__ = object.__hash__


class Event(_Identity):
    """What moves a request, or one of its submits, to another state."""

    SUBMIT = "submit"  # submitted, or submitted again
    QUEUED = "queued"  # `accepted` without a rank: known there, and waits for one
    ACCEPTED = "accepted"
    DONE = "done"
    FAILED = "failed"
    STREAM_FAILED = "stream failed"
    RETRY = "retry"  # to be submitted again, after a while
    END = "end"


class State(_Identity):
    NEW = "new"
    SUBMITTED = "submitted"  # waits for `accepted`
    RUNNING = "running"  # accepted; attached, where there is a stream
    DOUBTFUL = "doubtful"  # the stream failed; the controller may still mend it
    BACKOFF = "backoff"  # waits to be submitted again
    ENDED = "ended"


class SubmitState(_Identity):
    ASKED = "asked"  # waits for its controller's answer, and is repeated until it comes
    TAKEN = "taken"  # its controller gave it to a rank
    OVER = "over"  # done, or failed


_S, _L, _E = State, SubmitState, Event
NEXT: dict[State, dict[Event, State]] = {
    _S.NEW: {_E.SUBMIT: _S.SUBMITTED},
    _S.SUBMITTED: {_E.ACCEPTED: _S.RUNNING, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED},
    _S.RUNNING: {
        _E.ACCEPTED: _S.RUNNING, _E.STREAM_FAILED: _S.DOUBTFUL, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED,
    },
    _S.DOUBTFUL: {_E.ACCEPTED: _S.RUNNING, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED},
    _S.BACKOFF: {_E.SUBMIT: _S.SUBMITTED, _E.END: _S.ENDED},
    _S.ENDED: {},
}  # fmt: skip
SUBMIT_NEXT: dict[SubmitState, dict[Event, SubmitState]] = {
    _L.ASKED: {  # done without `accepted`: that was lost, and with it where the output is; so it is asked again
        _E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN, _E.DONE: _L.ASKED, _E.FAILED: _L.OVER,
    },
    _L.TAKEN: {
        _E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN, _E.DONE: _L.OVER, _E.FAILED: _L.OVER,
    },
    _L.OVER: {_E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN},
}  # fmt: skip


class Request(Struct, eq=False):
    """A request and how it goes. Its main submit, the first and nearly always the only one, has its rid and streams the
    tokens unless it is a lone prefill leg; its end is the request's. With a controller for each leg there is another,
    which shares its fate."""

    rid: str
    # as they were said first, but for the number of the attempt: that is the last one submitted or heard of
    submits: dict[Place, Submit]
    prompt: bytes  # int32 little-endian
    params: bytes  # the frame
    stop_ids: frozenset[int]  # the tokens that are known to end the output
    max_tokens: int = 0  # of the main submit, looked at with every token
    wants_logprobs: bool = False
    state: State = State.NEW
    submit_states: dict[Place, SubmitState] = {}
    asked_at: dict[Place, float] = {}  # this attempt, or when its controller last said that it waits
    resend_at: float = 0.0  # when those without an answer are said again
    resend_s: float = 0.0
    ids: list[int] = []  # the output so far
    logprobs: list[TokenLogprobs] = []  # of each of `ids`, where they are wanted
    began_at: float = 0.0
    deadline_at: float | None = None
    first_token_at: float | None = None
    retries: int = 0  # since the last new token
    due_at: float = 0.0  # of DOUBTFUL and BACKOFF
    doubt: tuple[Code, str] = ("ok", "")  # of DOUBTFUL: why the stream failed
    endpoint: str = ""  # where it is attached, or empty
    attached: int = 0  # to this attempt
    heard_at: float = 0.0
    asked_again: bool = False  # the silent stream was
    gap_at: float = -GAP_S  # when a gap was asked for
    prefill: Location | None = None
    decode: Location | None = None
    found_by: FoundBy = ""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.submit_states = dict.fromkeys(self.submits, SubmitState.ASKED)
        self.asked_at = dict.fromkeys(self.submits, 0.0)
        self.max_tokens = self.main.max_tokens

    def __repr__(self) -> str:
        return f"Request(rid={self.rid!r}, {self.state}, {self.submit_states}, {len(self.ids)} tokens)"

    @property
    def main(self) -> Submit:
        for submit in self.submits.values():
            return submit
        raise AssertionError

    @property
    def attempt(self) -> int:
        """The last of any submit."""
        return max(submit.attempt for submit in self.submits.values())

    def number(self, place: Place, attempt: int) -> None:
        """The submit at `place` is of this attempt now."""
        if attempt != self.submits[place].attempt:
            self.submits[place] = msgspec.structs.replace(self.submits[place], attempt=attempt)

    def takes(self, event: Event) -> bool:
        return event in NEXT[self.state]

    def move(self, event: Event) -> None:
        state = NEXT[self.state].get(event)
        assert state is not None, f"{self} cannot take {event}"
        self.state = state

    def takes_at(self, place: Place, event: Event) -> bool:
        """Whether `event` means anything to the submit at `place` now; what peers say late does not."""
        return event in SUBMIT_NEXT[self.submit_states[place]]

    def move_at(self, place: Place, event: Event) -> None:
        state = SUBMIT_NEXT[self.submit_states[place]].get(event)
        assert state is not None, f"{self} cannot take {event} at {place}"
        self.submit_states[place] = state

    def header(self, place: Place, now: float) -> Submit:
        """What is said at `place` now: the output so far follows the prompt in its frame."""
        first, have = self.submits[place], len(self.ids)
        return msgspec.structs.replace(
            first,
            prompt_tokens=first.prompt_tokens + have,
            max_tokens=first.max_tokens - have,
            offset=have,
            deadline_s=max(0.001, self.deadline_at - now) if self.deadline_at is not None else 0.0,
        )

    def frames(self) -> tuple[bytes, bytes]:
        """What follows the header."""
        return (self.prompt + token_bytes(self.ids) if self.ids else self.prompt, self.params)
