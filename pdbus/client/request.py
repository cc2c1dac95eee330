"""One request at the client: its record, and the tables that decide its next state and that of each of its submits.

Owns what is kept of a request. Who is told what, and when, is for `core`.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from bus.wire.codes import Code
from bus.wire.hashing import token_bytes
from bus.wire.messages import FoundBy, Location, MemberKey, Rid, Submit, TokenLogprobs

GAP_S = 0.25  # between two requests to fill the same gap
SubmitKey: TypeAlias = tuple[str, Rid]  # a controller's client endpoint, and the rid that was submitted there


class Event(Enum):
    """What moves a request, or one of its submits, to another state."""

    SUBMIT = "submit"  # submitted, or submitted again
    QUEUED = "queued"  # `accepted` without a rank: known there, and waits for one
    ACCEPTED = "accepted"
    DONE = "done"
    FAILED = "failed"
    STREAM_FAILED = "stream failed"
    RETRY = "retry"  # to be submitted again, after a while
    END = "end"

    __hash__ = object.__hash__  # Enum's own takes a call in Python; one object a member is all that counts


class State(Enum):
    NEW = "new"
    SUBMITTED = "submitted"  # waits for `accepted`
    RUNNING = "running"  # accepted; attached, where there is a stream
    AWAITING_VERDICT = "awaiting verdict"  # the stream failed; the controller may still mend it
    BACKOFF = "backoff"  # waits to be submitted again
    ENDED = "ended"

    __hash__ = object.__hash__


class SubmitState(Enum):
    ASKED = "asked"  # waits for its controller's answer, and is repeated until it comes
    TAKEN = "taken"  # its controller gave it to a rank
    OVER = "over"  # done, or failed

    __hash__ = object.__hash__


_S, _L, _E = State, SubmitState, Event
NEXT: dict[State, dict[Event, State]] = {
    _S.NEW: {_E.SUBMIT: _S.SUBMITTED},
    _S.SUBMITTED: {_E.ACCEPTED: _S.RUNNING, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED},
    _S.RUNNING: {
        _E.ACCEPTED: _S.RUNNING, _E.STREAM_FAILED: _S.AWAITING_VERDICT, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED,
    },
    _S.AWAITING_VERDICT: {_E.ACCEPTED: _S.RUNNING, _E.RETRY: _S.BACKOFF, _E.END: _S.ENDED},
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


class Request:
    """A request and how it goes. Its main submit, the first and nearly always the only one, has its rid and streams the
    tokens unless it is a lone prefill leg; its end is the request's. With a controller for each leg there is another,
    which shares its fate."""

    __slots__ = (
        "alive_at", "asked_again", "asked_at", "attached", "began_at", "cached_tokens", "deadline_at", "decode",
        "due_at", "endpoint", "first", "first_token_at", "found_by", "gap_at", "ids", "logprobs", "max_tokens",
        "no_rank_at", "offset", "params", "prefill", "prompt", "queued", "ran", "resend_at", "resend_s", "retries",
        "rid", "state", "stop_ids", "stream_failure", "submit_states", "submits", "wants_logprobs", "withdrawn_at",
    )  # fmt: skip

    def __init__(
        self, rid: str, submits: dict[SubmitKey, Submit], prompt: bytes, params: bytes, stop_ids: frozenset[int],
        wants_logprobs: bool = False,
    ) -> None:  # fmt: skip
        self.rid = rid
        # as they were said first, but for the number of the attempt: that is the last one submitted or heard of
        self.submits = submits
        self.prompt = prompt  # int32 little-endian
        self.params = params  # the frame
        self.stop_ids = stop_ids  # the tokens that are known to end the output
        self.wants_logprobs = wants_logprobs
        self.max_tokens: int = self.main.max_tokens  # looked at with every token
        self.state = State.NEW
        self.submit_states = dict.fromkeys(submits, SubmitState.ASKED)
        self.queued: dict[SubmitKey, int] = {}  # the last attempt of which a controller said that it waits
        self.withdrawn_at: dict[SubmitKey, float] = {}  # of attempts that we gave up; not answered yet
        self.asked_at = dict.fromkeys(submits, 0.0)  # this attempt, or when its controller last said that it waits
        self.resend_at = 0.0  # when those without an answer are said again
        self.resend_s = 0.0
        self.ids: list[int] = []  # the output so far
        self.logprobs: list[TokenLogprobs] = []  # of each of `ids`, where they are wanted
        self.offset = 0  # how many of them the run goes on from that was asked for last
        self.first = 1  # attempt
        self.began_at = 0.0
        self.deadline_at: float | None = None
        self.first_token_at: float | None = None
        self.retries = 0  # since the last new token
        self.due_at = 0.0  # of AWAITING_VERDICT and BACKOFF
        self.ran = False  # a leg of it was given to a rank
        self.no_rank_at: float | None = None  # when there was none for it first, since then
        self.stream_failure: tuple[Code, str] = ("ok", "")  # of AWAITING_VERDICT: why the stream failed
        self.endpoint = ""  # where it is attached, or empty
        self.attached = 0  # to this attempt
        self.alive_at = 0.0
        self.asked_again = False  # the silent stream was
        self.gap_at = -GAP_S  # when a gap was asked for
        self.prefill: Location | None = None
        self.decode: Location | None = None
        self.found_by: FoundBy = ""
        self.cached_tokens = 0

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
        return max([submit.attempt for submit in self.submits.values()])

    def begin_try(self, attempt: int) -> None:
        """All submits are of this attempt now; those at two controllers say so, as each of these may count on."""
        pair_attempt = attempt if len(self.submits) > 1 else 0
        for key, submit in self.submits.items():
            self.submits[key] = msgspec.structs.replace(submit, attempt=attempt, pair_attempt=pair_attempt)

    def number(self, key: SubmitKey, attempt: int) -> None:
        """The submit at `key` is of this attempt now."""
        if attempt != self.submits[key].attempt:
            self.submits[key] = msgspec.structs.replace(self.submits[key], attempt=attempt)

    @property
    def may_run(self) -> bool:
        """Whether a controller has not said yet what becomes of the last attempt, so that a rank may have it."""
        return any(
            state is SubmitState.ASKED and self.queued.get(key) != self.submits[key].attempt
            for key, state in self.submit_states.items()
        )

    def takes(self, event: Event) -> bool:
        return event in NEXT[self.state]

    def move(self, event: Event) -> None:
        state = NEXT[self.state].get(event)
        assert state is not None, f"{self} cannot take {event}"
        self.state = state

    def takes_at(self, key: SubmitKey, event: Event) -> bool:
        """Whether `event` means anything to the submit at `key` now; what peers say late does not."""
        return event in SUBMIT_NEXT[self.submit_states[key]]

    def move_at(self, key: SubmitKey, event: Event) -> None:
        state = SUBMIT_NEXT[self.submit_states[key]].get(event)
        assert state is not None, f"{self} cannot take {event} at {key}"
        self.submit_states[key] = state

    def header(self, key: SubmitKey, now: float, avoid: tuple[MemberKey, ...] = ()) -> Submit:
        """What is said at `key` now: the output so far follows the prompt in its frame, and ranks to avoid."""
        first, have = self.submits[key], len(self.ids)
        if not have and not avoid and now == self.began_at:
            return first
        return msgspec.structs.replace(
            first,
            prompt_tokens=first.prompt_tokens + have,
            max_tokens=first.max_tokens - have,
            offset=have,
            deadline_s=max(0.001, self.deadline_at - now) if self.deadline_at is not None else 0.0,
            avoid=avoid,
        )

    def frames(self) -> tuple[bytes, bytes]:
        """What follows the header."""
        return (self.prompt + token_bytes(self.ids) if self.ids else self.prompt, self.params)
