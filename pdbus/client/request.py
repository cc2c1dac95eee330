"""One request at the client: its record, and the tables that give the next state of it and of each of its submits. A
submit is the message that gives a request to a controller; an attempt is one try of it, counted from 1.

Owns the data of a request. Which messages are sent, and when, is decided by `core`.
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
    """An event that moves a request, or one of its submits, to another state."""

    SUBMIT = "submit"  # submitted, or submitted again
    QUEUED = "queued"  # `accepted` without a rank: the controller knows it, and it waits for one
    ACCEPTED = "accepted"
    DONE = "done"
    FAILED = "failed"
    STREAM_FAILED = "stream failed"
    RETRY = "retry"  # to be submitted again, after a while
    END = "end"

    __hash__ = object.__hash__  # Enum's own is a Python function; identity is enough, as each member is one object


class State(Enum):
    """The state of a request."""

    NEW = "new"
    SUBMITTED = "submitted"  # waits for `accepted`
    RUNNING = "running"  # accepted; attached, where there is a stream
    AWAITING_VERDICT = "awaiting verdict"  # the stream failed; the controller may still retry the leg
    BACKOFF = "backoff"  # waits to be submitted again
    ENDED = "ended"

    __hash__ = object.__hash__


class SubmitState(Enum):
    """The state of one of a request's submits."""

    ASKED = "asked"  # waits for its controller's answer; repeated until it comes
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
    _L.ASKED: {  # `done` without `accepted`: that was lost, and with it the address of the output; so submit again
        _E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN, _E.DONE: _L.ASKED, _E.FAILED: _L.OVER,
    },
    _L.TAKEN: {
        _E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN, _E.DONE: _L.OVER, _E.FAILED: _L.OVER,
    },
    _L.OVER: {_E.SUBMIT: _L.ASKED, _E.QUEUED: _L.ASKED, _E.ACCEPTED: _L.TAKEN},
}  # fmt: skip


class Request:
    """A request and its progress.

    The main submit is the first one, and nearly always the only one. It has the request's rid, it streams the tokens
    (unless it is a lone prefill leg), and the request ends when it ends. With one controller for each leg (prefill and
    decode) there is a second submit, which is cancelled or retried together with the main one.
    """

    __slots__ = (
        "alive_at", "asked_again", "asked_at", "attached", "began_at", "cached_tokens", "deadline_at",
        "decode", "due_at", "endpoint", "first", "first_token_at", "found_by", "gap_at", "ids", "logprobs",
        "max_tokens", "no_rank_at", "offset", "params", "prefill", "prompt", "prompt_logprobs", "queued",
        "ran", "resend_at", "resend_s", "retries", "rid", "state", "stop_ids", "stream_failure",
        "submit_states", "submits", "wants_logprobs", "withdrawn_at", "written_tokens",
    )  # fmt: skip

    def __init__(
        self, rid: str, submits: dict[SubmitKey, Submit], prompt: bytes, params: bytes, stop_ids: frozenset[int],
        wants_logprobs: bool = False,
    ) -> None:  # fmt: skip
        self.rid = rid
        # as they were submitted first, except for `attempt`, which is the last one submitted or seen in a message
        self.submits = submits
        self.prompt = prompt  # int32 little-endian
        self.params = params  # the frame
        self.stop_ids = stop_ids  # the tokens that are known to end the output
        self.wants_logprobs = wants_logprobs
        self.max_tokens: int = self.main.max_tokens  # read for every token, so kept here
        self.state = State.NEW
        self.submit_states = dict.fromkeys(submits, SubmitState.ASKED)
        self.queued: dict[SubmitKey, int] = {}  # the last attempt that a controller reported as waiting
        self.withdrawn_at: dict[SubmitKey, float] = {}  # when we cancelled an attempt whose answer is still missing
        self.asked_at = dict.fromkeys(submits, 0.0)  # when this attempt was sent, or last reported as waiting
        self.resend_at = 0.0  # when submits without an answer are sent again
        self.resend_s = 0.0
        self.ids: list[int] = []  # the output so far
        self.logprobs: list[TokenLogprobs] = []  # one for each of `ids`, where the request wants them
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # None: unwanted; else they come before `ids`
        self.offset = 0  # how many of `ids` the last submit already had
        self.first = 1  # the first attempt
        self.began_at = 0.0
        self.deadline_at: float | None = None
        self.first_token_at: float | None = None
        self.retries = 0  # since the last new token
        self.due_at = 0.0  # the end of AWAITING_VERDICT or BACKOFF
        self.ran = False  # a leg was dispatched to a rank
        self.no_rank_at: float | None = None  # since when there has been no rank for it
        self.stream_failure: tuple[Code, str] = ("ok", "")  # in AWAITING_VERDICT: why the stream failed
        self.endpoint = ""  # of the node where it is attached; empty: nowhere
        self.attached = 0  # the attempt that it is attached to
        self.alive_at = 0.0
        self.asked_again = False  # the silent stream was asked for once more
        self.gap_at = -GAP_S  # when missing tokens were last asked for
        self.prefill: Location | None = None
        self.decode: Location | None = None
        self.found_by: FoundBy = ""
        self.cached_tokens = self.written_tokens = 0  # of the prompt, in a prefix cache

    def __repr__(self) -> str:
        return f"Request(rid={self.rid!r}, {self.state}, {self.submit_states}, {len(self.ids)} tokens)"

    @property
    def main(self) -> Submit:
        """The main submit."""
        for submit in self.submits.values():
            return submit
        raise AssertionError

    @property
    def attempt(self) -> int:
        """The highest attempt of its submits."""
        return max([submit.attempt for submit in self.submits.values()])

    def name_pair_attempt(self, attempt: int) -> None:
        """Write this attempt into each submit of a pair at two controllers; each of these may count on by itself."""
        for key, submit in self.submits.items():
            self.submits[key] = msgspec.structs.replace(submit, pair_attempt=attempt)

    def number(self, key: SubmitKey, attempt: int) -> None:
        """Set the attempt of the submit `key`: that of a new try, or the one that its controller has named."""
        if attempt != self.submits[key].attempt:
            self.submits[key] = msgspec.structs.replace(self.submits[key], attempt=attempt)

    @property
    def may_run(self) -> bool:
        """True while a rank may have the last attempt without our knowledge: a controller has not answered yet."""
        return any(
            state is SubmitState.ASKED and self.queued.get(key) != self.submits[key].attempt
            for key, state in self.submit_states.items()
        )

    def takes(self, event: Event) -> bool:
        """Return true if `event` is valid for the request now."""
        return event in NEXT[self.state]

    def move(self, event: Event) -> None:
        """Take `event` to the next state; AssertionError if it is not valid."""
        state = NEXT[self.state].get(event)
        assert state is not None, f"{self} cannot take {event}"
        self.state = state

    def takes_at(self, key: SubmitKey, event: Event) -> bool:
        """Return true if `event` is valid for the submit `key` now. A late message of a peer is not."""
        return event in SUBMIT_NEXT[self.submit_states[key]]

    def move_at(self, key: SubmitKey, event: Event) -> None:
        """Take `event` to the next state of the submit `key`; AssertionError if it is not valid."""
        state = SUBMIT_NEXT[self.submit_states[key]].get(event)
        assert state is not None, f"{self} cannot take {event} at {key}"
        self.submit_states[key] = state

    def header(self, key: SubmitKey, now: float, avoid: tuple[MemberKey, ...] = ()) -> Submit:
        """Return the header to submit now: the output so far counts as prompt, `deadline_s` is what is left of it, and
        `avoid` names ranks to avoid."""
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
        """Return the frames after the header: prompt with the output so far, and sampling parameters."""
        return (self.prompt + token_bytes(self.ids) if self.ids else self.prompt, self.params)
