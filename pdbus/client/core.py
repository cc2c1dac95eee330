"""All requests of one client, from submit to their single end. Pure: events and `now` (seconds of one clock) go in,
actions come out: messages to send, output and results to deliver.

A peer is an endpoint: `Send.peer` is the endpoint to connect to, and `received` gets the endpoint of the sender.

Output tokens are numbered from 0 over all attempts (tries of a request). A token that was delivered before is dropped;
where tokens are missing before one that comes, they are asked for. So no token is delivered twice or out of order. When
the rank that streams is lost, the request is submitted again under the same rid with the next attempt: the prompt frame
then has the prompt and the output so far, and `offset` is the number of output tokens in it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from math import inf

from bus.actions import Send
from bus.wire.codes import Code, client_retries, is_retryable
from bus.wire.messages import (
    MAX_ATTEMPT,
    Accepted,
    Attach,
    Cancel,
    Detach,
    Done,
    Failed,
    FinishReason,
    Location,
    MemberKey,
    Message,
    Submit,
    Tokens,
)
from pdbus.client.output import Deliver, Ended, Result
from pdbus.client.request import GAP_S, Event, Request, State, SubmitKey, SubmitState

SILENCE_S = 3.0  # a stream silent for this long is asked for again, and the next time given up
AVOID_S = 30.0  # for this long after a rank fell silent, requests avoid it
DEADLINE_GRACE_S = (
    0.25  # the controller gets this long to report the deadline itself; an earlier cancel would be counted
)
VERDICT_S = 2.0  # after a stream failed, how long the controller may take to decide about the request
RESEND_S = 1.0  # a submit without an answer is repeated (which is harmless), at doubling intervals
RESEND_MAX_S = 4.0
BACKOFF_S = 0.1
BACKOFF_MAX_S = 2.0
MAX_AVOID = 16  # the protocol's limit: ranks to avoid
USED_S = 60.0  # a rid used again this soon after its end continues its attempts, so that late messages are older
AHEAD = 32  # and leaves out so many: its controller may have made some that this client has not heard of
MAX_USED = 16_384
SUBMITS_A_TICK = 64  # that no queue took
UNTAKEN_S = 10.0  # a goodbye that a queue does not take is sent again for so long; ranks end unread legs by then
MAX_UNTAKEN = 1024


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of a client's retries; times in seconds.

    A failure is final after `retries` retries without a new token. A controller that does not answer for
    `connect_timeout_s` counts as lost. Before the first token there are two more limits: where the cluster
    is overloaded, tries go on until `overloaded_s` after the submit; where it has no rank for the request, until
    `no_rank_s` after the first answer that said so.
    """

    retries: int = 6
    connect_timeout_s: float = 10.0
    overloaded_s: float = inf
    no_rank_s: float = inf


Action = Send | Deliver | Ended


class ClientCore:
    """The live requests of one client. The caller carries out the actions in their order. `len` is the number of live
    requests."""

    def __init__(self, patience: Patience, rng: random.Random) -> None:
        self._patience = patience
        self._rng = rng
        self._requests: dict[str, Request] = {}
        self._by_key: dict[SubmitKey, Request] = {}  # each request by the keys of its submits
        self._used: dict[str, tuple[int, float]] = {}  # rids that ended lately: the last attempt, and when
        self._silent: dict[MemberKey, float] = {}  # ranks whose streams fell silent, and until when they are avoided
        # goodbyes that their queues did not take, by peer and rid, and until when they are sent again; those sent again
        self._untaken: dict[tuple[str, str], tuple[Send, float]] = {}
        self._sent_again: dict[tuple[str, str], float] = {}
        self._unsubmitted: dict[SubmitKey, None] = {}  # those whose `Submit` no queue took, in order
        self._unattached: dict[str, int] = {}  # rids whose `Attach` no queue took, and its attempt

    def __len__(self) -> int:
        return len(self._requests)

    def is_taken(self, request: Request) -> bool:
        """Return true if a live request has one of the rids of `request` (a pair at two controllers has two)."""
        return request.rid in self._requests or not self._by_key.keys().isdisjoint(request.submits)

    @property
    def endpoints(self) -> set[str]:
        """The endpoints of the nodes from which requests are streamed now."""
        return {request.endpoint for request in self._requests.values() if request.endpoint}

    # --- what happens -------------------------------------------------------------------------------------------

    def begin(self, request: Request, now: float) -> list[Action]:
        """Take a new request and submit it. The caller has checked that none of its rids is live (`is_taken`)."""
        assert not self.is_taken(request), f"{request.rid} is live already"
        self._requests[request.rid] = request
        self._by_key.update(dict.fromkeys(request.submits, request))
        request.began_at = now
        if deadline_s := request.main.deadline_s:
            request.deadline_at = now + deadline_s
        used = self._used.pop(request.rid, None)
        if used is not None and used[0] < MAX_ATTEMPT and now - used[1] < USED_S:
            request.first = min(used[0] + AHEAD, MAX_ATTEMPT)
        return self._submit(request, request.first, now)

    def received(self, peer: str, message: Message, now: float) -> list[Action]:
        """Handle `message` of the controller or node at `peer`. A message that comes too late, or that is for no live
        request, is ignored, but for `Accepted`: what runs for no live request is cancelled."""
        if isinstance(message, Tokens):
            request = self._requests.get(message.rid)
            actions = self._tokens(request, peer, message, now) if request is not None else []
            for other in message.others:
                if (request := self._requests.get(other.rid)) is not None:
                    actions += self._tokens(request, peer, other.alone(), now)
            return actions
        if not isinstance(message, (Accepted, Failed, Done)):
            return []
        key = peer, message.rid
        request = self._by_key.get(key)
        if request is None:  # over, and begun again there by a repeated submit, or by a controller that lost its rank
            return [Send(peer, Cancel(message.rid, message.bootstrap_room))] if isinstance(message, Accepted) else []
        if isinstance(message, Accepted):
            return self._accepted(request, key, message, now)
        if isinstance(message, Failed):
            return self._failed(request, key, message, now)
        return self._done(request, key, message, now)

    def cancel(self, rid: str, now: float) -> list[Action]:
        """End the request `rid` as cancelled: its result is among the actions. Nothing if it is not live."""
        request = self._requests.get(rid)
        return self._end(request, "cancelled", now, "cancelled", "cancelled by the caller") if request else []

    def untaken(self, send: Send, now: float) -> None:
        """Note that the queue of its peer did not take a message. A goodbye (`Detach`, `Cancel`) is sent again with the
        next tick, for UNTAKEN_S, an `Attach` while it is wanted, since ranks soon end a leg without a reader, and a
        `Submit` while it has no answer."""
        message = send.message
        if isinstance(message, Submit):
            self._unsubmitted[send.peer, message.rid] = None
        if isinstance(message, Attach):
            self._unattached[message.rid] = message.attempt
        if isinstance(message, (Detach, Cancel)):
            key = send.peer, message.rid
            until = self._sent_again.pop(key, now + UNTAKEN_S)
            if now < until and len(self._untaken) < MAX_UNTAKEN:
                self._untaken[key] = send, until

    def tick(self, now: float) -> list[Action]:
        """Check deadlines, silent streams, missing answers and waits before a retry, and send goodbyes, attaches and
        submits again that no queue took. Call it several times a second."""
        actions: list[Action] = self._send_again() if self._untaken or self._sent_again else []
        if self._unattached:
            actions += self._attach_again()
        if self._unsubmitted:
            actions += self._submit_again(now)
        for request in list(self._requests.values()):
            actions += self._tick(request, now)
        return actions

    def _send_again(self) -> list[Action]:
        """Return the goodbyes that no queue took, but for requests that are at that peer once more by now."""
        untaken, self._untaken, self._sent_again = self._untaken, {}, {}
        actions: list[Action] = []
        for key, (send, until) in untaken.items():
            peer, rid = key
            reads, asks = self._requests.get(rid), self._by_key.get(key)
            if reads is not None and reads.endpoint == peer:
                continue
            if asks is not None and asks.state is not State.BACKOFF:
                continue
            self._sent_again[key] = until
            actions.append(send)
        return actions

    def _attach_again(self) -> list[Action]:
        """Return the attaches that no queue took, but of requests that are not read there any more."""
        unattached, self._unattached = self._unattached, {}
        wanted = [(self._requests[rid], attempt) for rid, attempt in unattached.items() if rid in self._requests]
        return [
            self._ask_stream(request)
            for request, attempt in wanted
            if request.state is State.RUNNING and request.endpoint and request.attached == attempt
        ]

    def _submit_again(self, now: float) -> list[Action]:
        """Return submits that no queue took, but for those that have an answer by now: the first of them, because a
        queue that is full takes few."""
        keys = list(itertools.islice(self._unsubmitted, SUBMITS_A_TICK))
        for key in keys:
            del self._unsubmitted[key]
        wanted = [(self._by_key[key], key) for key in keys if key in self._by_key]
        return [
            self._submit_message(request, key, now)
            for request, key in wanted
            if request.submit_states[key] is SubmitState.ASKED and request.state is not State.BACKOFF
        ]

    # --- inside: of one request ---------------------------------------------------------------------------------

    def _accepted(self, request: Request, key: SubmitKey, message: Accepted, now: float) -> list[Action]:
        attempt = message.attempt
        if attempt < request.submits[key].attempt:
            return []
        room = message.bootstrap_room
        if room is not None and room != request.submits[key].bootstrap_room:
            request.number(key, min(attempt + 1, MAX_ATTEMPT))  # a former request of this rid, and its end follows
            return []
        is_repeat = attempt == request.submits[key].attempt and (request.submit_states[key] is not SubmitState.ASKED)
        request.number(key, attempt)
        if message.prefill is None and message.decode is None:
            request.move_at(key, Event.QUEUED)
            request.queued[key] = attempt
            request.asked_at[key] = now
            return []
        request.move_at(key, Event.ACCEPTED)
        request.ran, request.no_rank_at = True, None
        if message.prefill is not None:
            request.prefill = message.prefill
        elif request.prefill is not None and len(request.submits) == 1:  # of two controllers one names decode alone
            request.prefill = None
        if message.rid != request.rid or is_repeat or not request.takes(Event.ACCEPTED):
            return []
        if len(request.ids) > request.offset and (attempt, message.decode) != (request.attached, request.decode):
            # the controller started it from the beginning, so the answer may differ from the tokens we have
            return self._retry(request, "peer_lost", "the answer was begun again elsewhere", 0.0, now)
        request.move(Event.ACCEPTED)
        request.alive_at = now
        return self._attach(request, message.decode) if message.decode is not None else []

    def _done(self, request: Request, key: SubmitKey, message: Done, now: float) -> list[Action]:
        if message.attempt < request.submits[key].attempt or not request.takes_at(key, Event.DONE):
            return []
        request.move_at(key, Event.DONE)
        lone_prefill = message.rid == request.rid and request.main.leg == "prefill"
        return self._end(request, "stop", now) if lone_prefill else []

    def _failed(self, request: Request, key: SubmitKey, message: Failed, now: float) -> list[Action]:
        if 0 < message.attempt < request.submits[key].attempt or not request.takes_at(key, Event.FAILED):
            return []
        withdrawn_at = request.withdrawn_at.pop(key, -inf)
        answers_us = message.code == "cancelled" and now - withdrawn_at < self._patience.connect_timeout_s
        if answers_us and request.state is not State.BACKOFF:
            return []  # the answer to our cancel: the controller may have used the same attempt number as we did
        request.move_at(key, Event.FAILED)
        if request.state is State.BACKOFF and (client_retries(message.code) or message.code == "cancelled"):
            return []  # the other submit has failed already; only a final code changes anything
        return self._retry(request, message.code, message.message, message.retry_after_s, now)

    def _tokens(self, request: Request, endpoint: str, message: Tokens, now: float) -> list[Action]:
        if request.state is not State.RUNNING or endpoint != request.endpoint or message.attempt != request.attached:
            return []
        if request.wants_logprobs and len(message.logprobs) != len(message.ids):
            return []  # it breaks the protocol; treat it as silent
        if request.first_token_at is None:
            unread = request.prompt_logprobs == () and not message.start  # they come with the first message alone
            if unread and not self._take_prompt_logprobs(request, message):
                return []
            request.cached_tokens, request.written_tokens = message.cached_tokens, message.written_tokens
        request.alive_at = now
        request.asked_again = False
        if self._silent and request.decode is not None:
            self._silent.pop((request.decode.instance, request.decode.dp_rank), None)
        request.found_by = message.found_by or request.found_by
        have, most = len(request.ids), request.max_tokens
        if message.start > have:
            return self._ask_for_gap(request, now)
        actions: list[Action] = []
        if new := message.ids[have - message.start : most - message.start]:
            request.ids.extend(new)
            if request.wants_logprobs:
                request.logprobs.extend(message.logprobs[have - message.start : most - message.start])
            request.retries = 0
            if request.first_token_at is None:
                request.first_token_at = now
            actions.append(Deliver(request.rid, new))
        if message.finish in ("stop", "length"):
            request.cached_tokens, request.written_tokens = message.cached_tokens, message.written_tokens
            return actions + self._end(request, message.finish, now)
        if message.finish:
            request.move(Event.STREAM_FAILED)
            code = message.code if message.code != "ok" else "decode_failed"
            withdrawn_at = max(request.withdrawn_at.values(), default=-inf)
            if code == "cancelled" and now - withdrawn_at < self._patience.connect_timeout_s:
                code = "fenced"  # by us, as an attempt of the controller's own, whose number ours has now
            request.stream_failure = (code, message.message)
            request.due_at = now + VERDICT_S
            return actions
        return actions + self._end(request, "length", now) if len(request.ids) >= most else actions

    @staticmethod
    def _take_prompt_logprobs(request: Request, message: Tokens) -> bool:
        """Take the prompt's log probabilities. Return False for output that comes without them, which breaks the
        protocol."""
        if len(message.prompt_logprobs) == request.main.prompt_tokens - 1:
            request.prompt_logprobs = message.prompt_logprobs
            return True
        return not message.ids and message.finish not in ("stop", "length")

    def _tick(self, request: Request, now: float) -> list[Action]:
        grace_s = 0.0 if request.state is State.BACKOFF else DEADLINE_GRACE_S
        if request.deadline_at is not None and now >= request.deadline_at + grace_s:
            why = f"no end within {request.main.deadline_s:g} s"
            return self._end(request, "failed", now, "deadline", why)
        if request.state is State.BACKOFF:
            return self._submit(request, request.attempt + 1, now) if now >= request.due_at else []
        if request.state is State.AWAITING_VERDICT:
            return self._retry(request, *request.stream_failure, 0.0, now) if now >= request.due_at else []
        actions = self._resend(request, now)
        if request.state is State.RUNNING and now - request.alive_at >= SILENCE_S:
            actions += self._break_silence(request, now)
        return actions

    # --- inside: submitting -------------------------------------------------------------------------------------

    def _submit(self, request: Request, attempt: int, now: float) -> list[Action]:
        request.move(Event.SUBMIT)
        request.offset = len(request.ids)
        for key in request.submits:
            request.number(key, attempt)
        if len(request.submits) > 1:
            request.name_pair_attempt(attempt)
        return [self._send_submit(request, key, now) for key in request.submits]

    def _send_submit(self, request: Request, key: SubmitKey, now: float) -> Send:
        """Submit, and start the `connect_timeout_s` in which the controller must answer."""
        request.move_at(key, Event.SUBMIT)
        request.asked_at[key], request.resend_s, request.resend_at = now, RESEND_S, now + RESEND_S
        return self._submit_message(request, key, now)

    def _submit_message(self, request: Request, key: SubmitKey, now: float) -> Send:
        avoid: tuple[MemberKey, ...] = ()
        if self._silent:
            self._silent = {rank: until for rank, until in self._silent.items() if until > now}
            avoid = tuple(self._silent)[-MAX_AVOID:]
        return Send(key[0], request.header(key, now, avoid), request.frames())

    def _resend(self, request: Request, now: float) -> list[Action]:
        """Repeat submits without an answer. A restarted controller needs that; any other ignores a repetition."""
        unanswered = [key for key, state in request.submit_states.items() if state is SubmitState.ASKED]
        patience_s = self._patience.connect_timeout_s
        for key in unanswered:
            if now - request.asked_at[key] >= patience_s:
                why = f"no controller answers at {key[0]} (waited {patience_s:g} s)"
                return self._end(request, "failed", now, "peer_lost", why)
        if not unanswered or now < request.resend_at:
            return []
        request.resend_s = min(RESEND_MAX_S, 2 * request.resend_s)
        request.resend_at = now + request.resend_s
        return [self._submit_message(request, key, now) for key in unanswered]

    # --- inside: the stream -------------------------------------------------------------------------------------

    def _attach(self, request: Request, decode: Location) -> list[Action]:
        actions = self._detach(request) if request.endpoint != decode.endpoint else []
        request.decode, request.endpoint, request.attached = decode, decode.endpoint, request.main.attempt
        request.asked_again, request.gap_at = False, -GAP_S
        return [*actions, self._ask_stream(request)]

    @staticmethod
    def _ask_stream(request: Request) -> Send:
        """Ask for the stream from the first missing token on."""
        room = request.main.bootstrap_room
        return Send(request.endpoint, Attach(request.rid, request.attached, len(request.ids), True, room))

    def _detach(self, request: Request) -> list[Action]:
        if not request.endpoint:
            return []
        endpoint, request.endpoint = request.endpoint, ""
        return [Send(endpoint, Detach(request.rid, request.attached))]

    def _ask_for_gap(self, request: Request, now: float) -> list[Action]:
        if now - request.gap_at < GAP_S:
            return []
        request.gap_at = now
        return [self._ask_stream(request)]

    def _break_silence(self, request: Request, now: float) -> list[Action]:
        request.alive_at = now
        if not request.endpoint:  # a lone prefill leg; its controller may have been replaced, so submit again
            return [self._send_submit(request, next(iter(request.submits)), now)]
        if not request.asked_again:
            request.asked_again = True
            return [self._ask_stream(request)]
        assert request.decode is not None, "it is attached there"
        rank = request.decode.instance, request.decode.dp_rank
        self._silent.pop(rank, None)  # to the end of the order
        self._silent[rank] = now + AVOID_S
        return self._retry(request, "peer_lost", f"{rank[0]}/{rank[1]} fell silent", 0.0, now)

    # --- inside: trying again, and the end ----------------------------------------------------------------------

    def _retry(self, request: Request, code: Code, message: str, retry_after_s: float, now: float) -> list[Action]:
        """Submit again after a back-off if that can help; otherwise end the request."""
        if len(request.ids) >= request.max_tokens:
            return self._end(request, "length", now)  # only the last message was lost; the output is complete
        if request.ids and request.ids[-1] in request.stop_ids:
            return self._end(request, "stop", now)
        caller_chose = any(submit.routed_dp_rank is not None for submit in request.submits.values())
        if (
            not client_retries(code)
            or (code == "rank_unavailable" and caller_chose)
            or request.attempt >= MAX_ATTEMPT
            or request.retries >= self._patience.retries
        ):
            return self._end(request, "failed", now, code, message, retry_after_s)
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_S * 2**request.retries) * self._rng.uniform(0.5, 1.0)
        due_at = now + max(backoff_s, retry_after_s)
        if due_at > self._latest(request, code, now):
            return self._end(request, "failed", now, code, message, retry_after_s)
        actions = self._detach(request) + self._cancel_submits(request)
        for key, state in request.submit_states.items():
            if state is not SubmitState.OVER:
                request.withdrawn_at[key] = now
        request.retries += 1
        request.due_at = due_at
        request.move(Event.RETRY)
        return actions

    def _latest(self, request: Request, code: Code, now: float) -> float:
        """Return the latest time for another try after a failure with this code."""
        if request.ids:
            return inf
        if code == "overloaded":
            return request.began_at + self._patience.overloaded_s
        if code == "no_rank":
            if request.no_rank_at is None:
                request.no_rank_at = now
            return request.no_rank_at + self._patience.no_rank_s
        return inf

    def _end(
        self, request: Request, finish: FinishReason, now: float, code: Code = "ok", message: str = "",
        retry_after_s: float = 0.0,
    ) -> list[Action]:  # fmt: skip
        actions = self._detach(request)
        if code != "ok":
            actions += self._cancel_submits(request)
        request.move(Event.END)
        del self._requests[request.rid]
        for key in request.submits:
            del self._by_key[key]
        main = request.main
        self._used[request.rid] = request.attempt, now
        if len(self._used) > MAX_USED:
            del self._used[next(iter(self._used))]
        result = Result(
            rid=request.rid,
            finish=finish,
            ids=tuple(request.ids),
            attempts=request.attempt - request.first + 1,
            bootstrap_room=main.bootstrap_room,
            prefill=request.prefill,
            decode=request.decode,
            found_by=request.found_by,
            cached_tokens=min(request.cached_tokens, main.prompt_tokens),
            written_tokens=request.written_tokens,
            ttft_s=request.first_token_at - request.began_at if request.first_token_at is not None else 0.0,
            total_s=now - request.began_at,
            code=code,
            message=message,
            retry_after_s=retry_after_s,
            retryable=code != "ok" and is_retryable(code),
            logprobs=tuple(request.logprobs),
            prompt_logprobs=request.prompt_logprobs or (),
            ran=request.ran or request.may_run,
        )
        return [*actions, Ended(request.rid, result)]

    @staticmethod
    def _cancel_submits(request: Request) -> list[Action]:
        """Cancel the submits that are not over."""
        return [
            Send(key[0], Cancel(key[1], request.submits[key].bootstrap_room))
            for key, state in request.submit_states.items()
            if state is not SubmitState.OVER
        ]
