"""Output tokens on their way to clients: what each leg owes its reader (the client's connection), and when. Pure; it
sends nothing.

Tokens are kept from the leg's first until the reader detaches (or a while after the end). So a reader that is slow,
late, or reconnects gets every token once and in order, and never delays the engine: a buffer is bounded by the
request's own `max_tokens`. Attach and the leg may come in either order.
"""

from __future__ import annotations

import enum
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy

from bus.actions import Send
from bus.rights import key_of, owns
from bus.wire.codes import Refusal
from bus.wire.messages import (
    MAX_LOGPROBS_PER_MESSAGE,
    MAX_OTHERS_PER_MESSAGE,
    MAX_TOKENS_PER_MESSAGE,
    Attach,
    Detach,
    MoreTokens,
    TokenLogprobs,
    Tokens,
)
from nodes.link.leg import Identity, Leg

KEEPALIVE_S = 1.0
UNREAD_S = 10.0  # longer than a client that lives looks for its rank
KEEP_FINISHED_S = 30.0
ATTACH_WAIT_S = 5.0
ATTACH_GRACE_S = 1.0  # a client attaches when it is told where its request runs, about when the rank is told
RETRY_S = 0.02
MAX_SHARED_IDS = 64  # more tokens than that have a message of their own
MAX_PENDING_ATTACHES = 8192
MAX_FINISHED = 16_384


class SendFailure(enum.Enum):
    """The reason why a message of `flush` could not be sent."""

    FULL = "full"  # the reader's queue is full: try again later
    GONE = "gone"  # the reader's connection is gone: wait for another Attach


class _Early:
    """An attach that waits for its leg."""

    __slots__ = ("peer", "request", "since")

    def __init__(self, peer: bytes, request: Attach, since: float) -> None:
        self.peer = peer
        self.request = request
        self.since = since


class Streams:
    """The output of all legs of one process, by rid. Methods that cause messages return none: `flush` returns them all,
    and what could not be sent comes back through `unsent`. `now` is seconds on the process's clock."""

    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()  # in order of their end
        self._replaced: list[Leg] = []  # legs whose stream a later one took the place of
        self._early: OrderedDict[str, list[_Early]] = OrderedDict()  # by rid; one of each key and room
        self._early_count = 0
        self._answers: list[Send] = []
        self.resent_total = 0
        self.pending_dropped_total = 0

    def __len__(self) -> int:
        return len(self._legs)

    def untaken(self, now: float) -> int:
        """Return how many finished streams still have a reader that must take the end (a draining process waits for
        these). A stream that no reader has attached to, or whose reader has left, counts for `ATTACH_GRACE_S` from its
        end."""
        finished = (self._legs[rid] for rid in self._finished)
        return sum(
            leg.reader is not None or leg.lost or now - leg.ended_at < ATTACH_GRACE_S
            for leg in finished
            if not leg.finish_sent
        )

    # --- the leg's side -----------------------------------------------------------------------------------------

    def check(self, rid: str, identity: Identity) -> None:
        """Raise Refusal when `rid` is that of another request which is being read, or of another client's live
        request."""
        leg = self._legs.get(rid)
        if leg is None or leg.identity.agrees(identity):
            return
        reads = leg.reader is not None and not leg.finish_sent
        if reads or (not leg.finish and leg.client != identity.client):
            raise Refusal("duplicate_rid", "the rid belongs to another live request")

    def at_another(self, rid: str, identity: Identity, dp_rank: int) -> Leg | None:
        """Return the leg with the stream of this request, if another rank of the process has it."""
        leg = self._legs.get(rid)
        return leg if leg is not None and leg.dp_rank != dp_rank and leg.identity.agrees(identity) else None

    def open(self, leg: Leg, now: float) -> None:
        """Open the stream of a leg, which will produce output from its `offset` on. It replaces the stream of a lower
        attempt, whose reader is told that it is `fenced`, and that of another request."""
        old = self._legs.get(leg.rid)
        if old is not None:
            if old.attempt >= leg.attempt and old.identity.agrees(leg.identity):
                return
            if old.reader is not None and not old.finish_sent:
                self._answer(old.reader, _fenced(old.rid, old.attempt, old.sent))
            self._forget(old.rid)
            if old.live:
                self._replaced.append(old)
        self._legs[leg.rid] = leg
        leg.sent, leg.sent_at, leg.unread_since = leg.offset, now, now
        for early in self._early.get(leg.rid, ()):
            if _meant(early.request, leg):
                self._attach(leg, early.peer, early.request, now)
        self._keep_early(leg.rid, lambda early: not _meant(early.request, leg))

    def push(self, leg: Leg, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add the next tokens of a live leg, with one of `logprobs` each where it wants them. The core calls it for
        each Output."""
        leg.output.extend(tokens)
        if logprobs:
            leg.logprobs.extend(logprobs)
        if leg.reader is not None:
            self._dirty[leg.rid] = None

    def finish(self, leg: Leg) -> None:
        """End the stream of a leg that has ended; its reader still gets what is left. The copy that is kept for the
        reader has neither prompt nor handle, which are large; the leg itself keeps them, since an engine's thread may
        still read them."""
        rid = leg.rid
        if self._legs.get(rid) is not leg:
            return
        if leg.detached:
            self._forget(rid)
            return
        kept = self._legs[rid] = copy(leg)
        kept.prompt, kept.handle = array("i"), None
        self._dirty[rid] = None
        self._finished[rid] = None
        if len(self._finished) > MAX_FINISHED:
            self._forget(next(iter(self._finished)))

    # --- the reader's side --------------------------------------------------------------------------------------

    def attach(self, peer: bytes, request: Attach, now: float) -> None:
        """Let `peer` read from index `request.have` on; the last peer to attach is the reader. An attach whose leg has
        not come yet (or which names another room) waits for it, ATTACH_WAIT_S at most. Another client's peer is
        refused."""
        leg = self._legs.get(request.rid)
        if leg is not None and _meant(request, leg):
            self._attach(leg, peer, request, now)
            return
        whose = key_of(peer), request.room
        for early in self._early.get(request.rid, ()):
            if (key_of(early.peer), early.request.room) == whose:
                if early.request.attempt != request.attempt:
                    early.since = now
                early.peer, early.request = peer, request
                return
        if self._early_count >= MAX_PENDING_ATTACHES:
            oldest, waiting = next(iter(self._early.items()))
            self._keep_early(oldest, lambda early: early is not waiting[0])
            self.pending_dropped_total += 1
        self._early.setdefault(request.rid, []).append(_Early(peer, request, now))
        self._early_count += 1

    def detach(self, peer: bytes, request: Detach) -> None:
        """Detach the reader: it has all that it wants, and the rest is not kept."""
        self._keep_early(request.rid, lambda early: early.peer != peer)
        leg = self._legs.get(request.rid)
        if leg is None or leg.reader != peer:
            return
        if leg.finish:
            self._forget(request.rid)
        else:
            leg.reader, leg.unread_since, leg.detached = None, leg.sent_at, True

    def flush(self, now: float) -> list[Send]:
        """Return the messages to send now. Each counts as sent unless `unsent` brings it back. The tokens that a
        step made for many requests of one reader leave in one message, because sending and waking cost more than the
        tokens."""
        sends, self._answers = self._answers, []
        shared: dict[bytes, list[Tokens]] = {}
        for rid in list(self._dirty):
            leg = self._legs[rid]
            if leg.blocked_until > now:
                continue
            del self._dirty[rid]
            while leg.owes:
                peer, message = leg.reader, self._next(leg, now)
                if peer is not None and leg.shares and _plain(message, leg):
                    shared.setdefault(peer, []).append(message)
                else:
                    sends.append(Send(peer, message))
        for peer, messages in shared.items():
            for at in range(0, len(messages), 1 + MAX_OTHERS_PER_MESSAGE):
                sends.append(Send(peer, _together(messages[at : at + 1 + MAX_OTHERS_PER_MESSAGE])))
        return sends

    def unsent(self, send: Send, failure: SendFailure, now: float) -> None:
        """Take back a message of `flush` that could not be sent: its tokens are sent again, after RETRY_S or to the
        next reader."""
        assert isinstance(send.message, Tokens)
        self._unsent(send.peer, send.message, failure, now)
        for other in send.message.others:
            self._unsent(send.peer, other, failure, now)

    def _unsent(self, peer: bytes, message: Tokens | MoreTokens, failure: SendFailure, now: float) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or leg.reader != peer or leg.attempt != message.attempt:
            return
        self.resent_total += 1
        leg.sent = min(leg.sent, message.start)
        leg.finish_sent = False
        if failure is SendFailure.GONE:
            leg.reader, leg.lost, leg.unread_since = None, True, now
        else:
            leg.blocked_until = now + RETRY_S
            self._dirty[leg.rid] = None

    def tick(self, now: float) -> None:
        """Do what is due by time: signs of life to readers, answers to attaches whose leg never came, and old streams.
        Call it a few times a second."""
        for leg in self._legs.values():
            if leg.reader is not None and not leg.finish and now - leg.sent_at >= KEEPALIVE_S:
                leg.sent_at = now
                self._answer(leg.reader, Tokens(leg.rid, leg.attempt, leg.sent, ()))
        while self._finished:
            rid = next(iter(self._finished))
            if now - self._legs[rid].ended_at < KEEP_FINISHED_S:
                break
            self._forget(rid)
        why = "this rank knows nothing of the request: it restarted, or the request went elsewhere"
        for rid, waiting in list(self._early.items()):
            late = [early for early in waiting if now - early.since >= ATTACH_WAIT_S]
            for early in late:
                attempt, have = early.request.attempt, early.request.have
                self._answer(early.peer, Tokens(rid, attempt, have, (), "failed", "peer_lost", why))
            if late:
                self._keep_early(rid, lambda early: now - early.since < ATTACH_WAIT_S)

    def unread(self, now: float) -> list[Leg]:
        """Return the running legs without a reader: those whose stream another leg's has replaced, and those that
        had none for UNREAD_S and do not have `continue_on_disconnect`."""
        self._replaced = [leg for leg in self._replaced if leg.live]
        return self._replaced + [
            leg
            for leg in self._legs.values()
            if leg.reader is None
            and not (leg.finish or leg.continue_on_disconnect)
            and now - leg.unread_since >= UNREAD_S
        ]

    @staticmethod
    def unclaimed_s(leg: Leg, now: float) -> float:
        """Return for how many seconds a live leg has waited for a reader; 0: it has or needs none."""
        claimed = leg.reader is not None or leg.lost or leg.continue_on_disconnect or leg.role == "prefill"
        return 0.0 if claimed else now - leg.unread_since

    # --- inside -------------------------------------------------------------------------------------------------

    def _attach(self, leg: Leg, peer: bytes, request: Attach, now: float) -> None:
        if not owns(peer, leg.client):
            why = "the request is another client's"
            self._answer(peer, Tokens(leg.rid, request.attempt, request.have, (), "failed", "bad_identity", why))
            return
        if request.attempt < leg.attempt:
            self._answer(peer, _fenced(leg.rid, request.attempt, request.have))
            return
        if leg.reader != peer:
            leg.add_event("attached", now)
        leg.reader, leg.lost, leg.detached, leg.shares = peer, False, False, request.several
        leg.sent = max(leg.offset, min(request.have, leg.produced))
        leg.finish_sent = False
        leg.blocked_until = 0.0
        leg.sent_at = now
        self._dirty[leg.rid] = None
        if not leg.owes:  # the reader learns at once that it is attached
            self._answer(peer, Tokens(leg.rid, leg.attempt, leg.sent, ()))

    def _next(self, leg: Leg, now: float) -> Tokens:
        start = leg.sent
        first = start - leg.offset
        end = first + (MAX_LOGPROBS_PER_MESSAGE if leg.logprobs else MAX_TOKENS_PER_MESSAGE)
        if not first and leg.prompt_logprobs:
            end = MAX_SHARED_IDS  # so that both fit in a frame
        ids, logprobs = tuple(leg.output[first:end]), tuple(leg.logprobs[first:end])
        leg.sent += len(ids)
        leg.sent_at = now
        if first and not leg.finish:
            return Tokens(leg.rid, leg.attempt, start, ids, found_by=leg.found_by, logprobs=logprobs)
        found_by = leg.found_by if leg.output else ""
        cached, written = leg.cached_tokens, leg.written_tokens
        if leg.role == "decode":
            cached, written = leg.cached_at_prefill, leg.written_at_prefill
        of_prompt = leg.prompt_logprobs if not first else ()
        if not leg.finish or leg.sent < leg.produced:
            if first or not ids:  # with the first tokens, as some readers state it before the end
                cached = written = 0
            return Tokens(
                leg.rid, leg.attempt, start, ids, found_by=found_by, cached_tokens=cached, logprobs=logprobs,
                prompt_logprobs=of_prompt, written_tokens=written,
            )  # fmt: skip
        leg.finish_sent = True
        return Tokens(
            leg.rid, leg.attempt, start, ids, leg.finish, leg.code, leg.message, found_by, cached, logprobs,
            prompt_logprobs=of_prompt, written_tokens=written,
        )  # fmt: skip

    def _keep_early(self, rid: str, keep: Callable[[_Early], bool]) -> None:
        waiting = self._early.get(rid)
        if waiting is not None:
            kept = [early for early in waiting if keep(early)]
            self._early_count -= len(waiting) - len(kept)
            if kept:
                self._early[rid] = kept
            else:
                del self._early[rid]

    def _answer(self, peer: bytes, message: Tokens) -> None:
        self._answers.append(Send(peer, message))

    def _forget(self, rid: str) -> None:
        self._legs.pop(rid).reader = None  # it may still run, where another rank took the newer attempt
        self._dirty.pop(rid, None)
        self._finished.pop(rid, None)

    def validate(self) -> None:
        """Check that the table is consistent; AssertionError if not (for tests)."""
        assert self._dirty.keys() <= self._legs.keys()
        assert self._early_count == sum(map(len, self._early.values()))
        assert all(self._early.values())
        assert self._finished.keys() == {rid for rid, leg in self._legs.items() if leg.finish}
        for rid, leg in self._legs.items():
            assert leg.rid == rid
            assert leg.offset <= leg.sent <= leg.produced
            if leg.owes:
                assert rid in self._dirty, f"{rid} owes tokens that will not be sent"


def _meant(request: Attach, leg: Leg) -> bool:
    """Return true if the attach names this leg, or the leg is a later attempt of the named one."""
    rooms = request.room, leg.submit_room
    return request.attempt <= leg.attempt and (None in rooms or rooms[0] == rooms[1])


def _plain(message: Tokens, leg: Leg) -> bool:
    """Return true if the message only has the next tokens (the first of an attempt also has `found_by`), and no
    later message of this stream could overtake it."""
    few, last = len(message.ids) <= MAX_SHARED_IDS, leg.sent == leg.produced and not leg.finish
    return few and last and not message.logprobs and message.start > leg.offset


def _together(messages: Sequence[Tokens]) -> Tokens:
    first, *others = messages
    if not others:
        return first
    more = tuple(MoreTokens(each.rid, each.attempt, each.start, each.ids) for each in others)
    return Tokens(first.rid, first.attempt, first.start, first.ids, found_by=first.found_by, others=more)


def _fenced(rid: str, attempt: int, have: int) -> Tokens:
    return Tokens(rid, attempt, have, (), "failed", "fenced", "a newer attempt of this request exists")
