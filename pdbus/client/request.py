"""One request at the client, from submit to its single end. Pure: events and `now` in, actions out.

Tokens are numbered from 0, the request's first output token, over all attempts; what is not the next one is dropped or
asked for again, so none is delivered twice or out of order. When the rank that streams is lost, the request is
submitted under the same rid and the next attempt: the prompt frame is prompt and output so far, `offset` counts the
latter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from bus.actions import Send
from bus.wire.codec import encode
from bus.wire.hashing import token_bytes
from bus.wire.messages import (
    RETRYABLE,
    Accepted,
    Attach,
    Cancel,
    Code,
    Detach,
    Done,
    Failed,
    FinishReason,
    FoundBy,
    Leg,
    Location,
    Params,
    Submit,
    Tokens,
)
from pdbus.client.output import Result

SILENCE_S = 3.0  # a stream that shows no sign of life for so long is asked again, and then given up
VERDICT_S = 2.0  # after a stream failed, how long its controller may take to say what becomes of the request
RESEND_S = 1.0  # a submit without an answer is repeated (which is harmless), at doubling intervals
RESEND_MAX_S = 4.0
GAP_S = 0.25  # between two requests to fill the same gap
BACKOFF_S = 0.1
MAX_ATTEMPT = 1_000_000  # of the protocol
BACKOFF_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One submit: `leg` to the controller whose client endpoint is `controller`. `suffix` keeps rids apart."""

    controller: str
    leg: Leg
    suffix: str = ""
    instance: str = ""
    prefill_instance: str = ""
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """`legs[0]` is the leg whose end is the request's: it streams the tokens, unless it is a lone prefill leg."""

    prompt: bytes  # int32 little-endian
    max_tokens: int
    params: Params
    legs: tuple[LegPlan, ...]
    bootstrap_room: int | None
    model: str = ""
    deadline_s: float = 0.0
    priority: int = 0
    block_tokens: int = 0
    block_hashes: bytes = b""
    stop_ids: frozenset[int] = frozenset()  # known end tokens, beside those in `params`

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


def submit_header(plan: RequestPlan, leg: LegPlan, rid: str, attempt: int, have: int, deadline_s: float) -> Submit:
    """The header for one leg; `have` output tokens are there already and follow the prompt in its frame."""
    return Submit(
        rid=rid + leg.suffix,
        leg=leg.leg,
        prompt_tokens=plan.prompt_tokens + have,
        max_tokens=plan.max_tokens - have,
        bootstrap_room=plan.bootstrap_room,
        routed_dp_rank=leg.routed_dp_rank,
        disagg_prefill_dp_rank=leg.disagg_prefill_dp_rank,
        instance=leg.instance,
        prefill_instance=leg.prefill_instance,
        model=plan.model,
        attempt=attempt,
        offset=have,
        deadline_s=deadline_s,
        priority=plan.priority,
        block_tokens=plan.block_tokens,
        block_hashes=plan.block_hashes,
    )


@dataclass(frozen=True, slots=True)
class Patience:
    """`retries` without a new token in between, then the failure is final; `connect_timeout_s` for a controller that
    does not answer."""

    retries: int = 6
    connect_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Deliver:
    """New output tokens, in order."""

    rid: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last action of every request."""

    rid: str
    result: Result


Action = Send | Deliver | Ended


class State(Enum):
    NEW = "new"
    SUBMITTED = "submitted"  # waits for `accepted`
    RUNNING = "running"  # accepted; attached, where there is a stream
    DOUBTFUL = "doubtful"  # the stream failed; the controller may still mend it
    BACKOFF = "backoff"  # waits to be submitted again
    ENDED = "ended"


_S = State
TRANSITIONS: dict[State, frozenset[State]] = {
    _S.NEW: frozenset({_S.SUBMITTED}),
    _S.SUBMITTED: frozenset({_S.RUNNING, _S.BACKOFF, _S.ENDED}),
    _S.RUNNING: frozenset({_S.RUNNING, _S.DOUBTFUL, _S.BACKOFF, _S.ENDED}),
    _S.DOUBTFUL: frozenset({_S.RUNNING, _S.BACKOFF, _S.ENDED}),
    _S.BACKOFF: frozenset({_S.RUNNING, _S.SUBMITTED, _S.BACKOFF, _S.ENDED}),
    _S.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class LegRun:
    """One submit and what its controller said of it."""

    plan: LegPlan
    rid: str
    attempt: int = 1
    answered: bool = False
    over: bool = False  # done, or failed
    asked_at: float = 0.0  # first submit of this attempt
    resend_at: float = 0.0
    resend_s: float = RESEND_S


class Request:
    def __init__(self, rid: str, plan: RequestPlan, patience: Patience, rng: random.Random, now: float) -> None:
        self.rid = rid
        self.plan = plan
        self.state = State.NEW
        self.ids: list[int] = []
        self.legs = [LegRun(leg, rid + leg.suffix) for leg in plan.legs]
        self._patience = patience
        self._rng = rng
        self._params = encode(plan.params)
        self._began = now
        self._deadline = now + plan.deadline_s if plan.deadline_s else None
        self._retries = 0
        self._due = 0.0  # of DOUBTFUL and BACKOFF
        self._trouble: tuple[Code, str, float] = ("ok", "", 0.0)  # why it is in doubt: code, sentence, retry_after_s
        self._endpoint = ""  # attached there,
        self._attached = 0  # to this attempt
        self._heard_at = 0.0
        self._asked_again = False
        self._gap_at = -GAP_S
        self._first_at: float | None = None
        self._prefill: Location | None = None
        self._decode: Location | None = None
        self._found_by: FoundBy = ""

    @property
    def endpoint(self) -> str:
        """Where it is attached, or empty."""
        return self._endpoint

    # --- events -------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        return self._submit(now)

    def accepted(self, leg: LegRun, message: Accepted, now: float) -> list[Action]:
        if message.attempt < leg.attempt:
            return []
        news = message.attempt > leg.attempt or not leg.answered
        leg.attempt, leg.over = message.attempt, False
        if message.prefill is None and message.decode is None:  # known there, and waits for a rank
            leg.answered, leg.asked_at = False, now
            return []
        leg.answered = True
        self._prefill = message.prefill or self._prefill
        if leg is not self.legs[0] or not (news or self.state is State.SUBMITTED):
            return []
        if message.decode is None:
            self._to(State.RUNNING)
            self._heard_at = now
            return []
        return self._attach(message.decode, now)

    def done(self, leg: LegRun, message: Done, now: float) -> list[Action]:
        if message.attempt < leg.attempt:
            return []
        leg.over = True
        if leg.plan.leg == "prefill" and leg is self.legs[0]:
            return self._end("stop", now)
        return []

    def failed(self, leg: LegRun, message: Failed, now: float) -> list[Action]:
        waiting = self.state is State.BACKOFF  # the other leg may still have the graver reason
        if leg.over or 0 < message.attempt < leg.attempt - waiting:
            return []
        if waiting and (message.code in RETRYABLE or message.code in ("cancelled", "fenced")):
            return []
        leg.over = leg.answered = True
        return self._retry(message.code, message.message, message.retry_after_s, now)

    def tokens(self, endpoint: str, message: Tokens, now: float) -> list[Action]:
        if self.state is not State.RUNNING or endpoint != self._endpoint or message.attempt != self._attached:
            return []
        self._heard_at = now
        self._asked_again = False
        self._found_by = message.found_by or self._found_by
        have = len(self.ids)
        if message.start > have:
            return self._ask_for_gap(now)
        actions: list[Action] = []
        if new := message.ids[have - message.start : self.plan.max_tokens - message.start]:
            self.ids.extend(new)
            self._retries = 0
            if self._first_at is None:
                self._first_at = now
            actions.append(Deliver(self.rid, new))
        if message.finish in ("stop", "length"):
            return actions + self._end(message.finish, now)
        if message.finish:
            return actions + self._doubt(message, now)
        return actions + self._end("length", now) if len(self.ids) >= self.plan.max_tokens else actions

    def cancel(self, now: float) -> list[Action]:
        return self._end("cancelled", now, "cancelled", "cancelled by the caller")

    def tick(self, now: float) -> list[Action]:
        if self._deadline is not None and now >= self._deadline:
            return self._end("failed", now, "deadline", f"no end within {self.plan.deadline_s:g} s")
        if self.state is State.BACKOFF:
            return self._submit(now) if now >= self._due else []
        if self.state is State.DOUBTFUL:
            return self._retry(*self._trouble, now) if now >= self._due else []
        actions = self._resend(now)
        if self.state is State.RUNNING and now - self._heard_at >= SILENCE_S:
            actions += self._break_silence(now)
        return actions

    # --- inside: submitting -------------------------------------------------------------------------------------

    def _submit(self, now: float) -> list[Action]:
        self._to(State.SUBMITTED)
        for leg in self.legs:
            leg.answered = leg.over = False
            leg.asked_at, leg.resend_s, leg.resend_at = now, RESEND_S, now + RESEND_S
        return [self._submit_leg(leg, now) for leg in self.legs]

    def _submit_leg(self, leg: LegRun, now: float) -> Send:
        plan, have = self.plan, len(self.ids)
        left_s = max(0.001, self._deadline - now) if self._deadline is not None else 0.0
        header = submit_header(plan, leg.plan, self.rid, leg.attempt, have, left_s)
        prompt = plan.prompt + token_bytes(self.ids) if have else plan.prompt
        return Send(leg.plan.controller, header, (prompt, self._params), cause="submit")

    def _resend(self, now: float) -> list[Action]:
        """Say again what was not answered; a controller that came back knows nothing of it, another ignores it."""
        actions: list[Action] = []
        for leg in self.legs:
            if leg.answered:
                continue
            if now - leg.asked_at >= self._patience.connect_timeout_s:
                waited = f"{self._patience.connect_timeout_s:g} s"
                why = f"no controller answers at {leg.plan.controller} (waited {waited})"
                return self._end("failed", now, "peer_lost", why)
            if now < leg.resend_at:
                continue
            leg.resend_s = min(RESEND_MAX_S, 2 * leg.resend_s)
            leg.resend_at = now + leg.resend_s
            actions.append(self._submit_leg(leg, now))
        return actions

    # --- inside: the stream -------------------------------------------------------------------------------------

    def _attach(self, decode: Location, now: float) -> list[Action]:
        actions = self._detach() if self._endpoint != decode.endpoint else []
        self._to(State.RUNNING)
        self._decode, self._endpoint, self._attached = decode, decode.endpoint, self.legs[0].attempt
        self._heard_at, self._asked_again, self._gap_at = now, False, -GAP_S
        return [*actions, self._ask("accepted")]

    def _ask(self, cause: str) -> Send:
        return Send(self._endpoint, Attach(self.legs[0].rid, self._attached, len(self.ids)), cause=cause)

    def _detach(self) -> list[Action]:
        if not self._endpoint:
            return []
        endpoint, self._endpoint = self._endpoint, ""
        return [Send(endpoint, Detach(self.legs[0].rid, self._attached), cause="detach")]

    def _ask_for_gap(self, now: float) -> list[Action]:
        if now - self._gap_at < GAP_S:
            return []
        self._gap_at = now
        return [self._ask("gap")]

    def _break_silence(self, now: float) -> list[Action]:
        self._heard_at = now
        main = self.legs[0]
        if not self._endpoint:  # a lone prefill leg: its controller may have been replaced; ask it by submitting again
            main.answered, main.asked_at, main.resend_at = False, now, now + RESEND_S
            return [self._submit_leg(main, now)]
        if not self._asked_again:
            self._asked_again = True
            return [self._ask("silence")]
        where = f"{self._decode.instance}/{self._decode.dp_rank}" if self._decode else self._endpoint
        return self._retry("peer_lost", f"{where} fell silent", 0.0, now)

    def _doubt(self, message: Tokens, now: float) -> list[Action]:
        self._to(State.DOUBTFUL)
        self._trouble = (message.code if message.code != "ok" else "decode_failed", message.message, 0.0)
        self._due = now + VERDICT_S
        return []

    # --- inside: trying again, and the end ----------------------------------------------------------------------

    def _retry(self, code: Code, message: str, retry_after_s: float, now: float) -> list[Action]:
        """Submit again after a while, if that can help; else this is the end."""
        caller_chose = code == "rank_unavailable" and any(leg.plan.routed_dp_rank is not None for leg in self.legs)
        if len(self.ids) >= self.plan.max_tokens:
            return self._end("length", now)  # the last message was lost, the output is whole
        if self.ids and self.ids[-1] in self.plan.stop_ids:
            return self._end("stop", now)
        attempt = max(leg.attempt for leg in self.legs) + 1
        final = code not in RETRYABLE | {"fenced"} or attempt > MAX_ATTEMPT
        if final or caller_chose or self._retries >= self._patience.retries:
            return self._end("failed", now, code, message, retry_after_s)
        actions = self._detach() + self._cancel_legs(code)
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_S * 2**self._retries) * self._rng.uniform(0.5, 1.0)
        self._retries += 1
        for leg in self.legs:
            leg.attempt = attempt
            leg.answered, leg.over = True, False
        self._due = now + max(backoff_s, retry_after_s)
        self._to(State.BACKOFF)
        return actions

    def _end(
        self, finish: FinishReason, now: float, code: Code = "ok", message: str = "", retry_after_s: float = 0.0
    ) -> list[Action]:
        actions = self._detach()
        if code != "ok":
            actions += self._cancel_legs(code)
        self._to(State.ENDED)
        result = Result(
            rid=self.rid,
            finish=finish,
            ids=tuple(self.ids),
            attempts=max(leg.attempt for leg in self.legs),
            bootstrap_room=self.plan.bootstrap_room,
            prefill=self._prefill,
            decode=self._decode,
            found_by=self._found_by,
            ttft_s=self._first_at - self._began if self._first_at is not None else 0.0,
            total_s=now - self._began,
            code=code,
            message=message,
            retry_after_s=retry_after_s,
            retryable=code in RETRYABLE,
        )
        return [*actions, Ended(self.rid, result)]

    def _cancel_legs(self, cause: str) -> list[Action]:
        """The legs of one request share its fate."""
        return [Send(leg.plan.controller, Cancel(leg.rid), cause=cause) for leg in self.legs if not leg.over]

    def _to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], (
            f"{self.rid}: {self.state.value} -> {state.value}; {len(self.ids)} tokens, attempts "
            f"{[(leg.plan.leg, leg.attempt, leg.answered, leg.over) for leg in self.legs]}"
        )
        self.state = state
