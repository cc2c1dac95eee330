"""Output tokens on their way to clients. Owns a buffer per request and where its reader stands; pure, sends nothing.

Tokens are kept from the leg's first until the reader says Detach (or a while after the end), so a reader that is slow,
late, or reconnects gets every token once and in order, and never holds up the engine: a buffer is bounded by the
request's own `max_tokens`. Attach and the leg may come in either order.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bus.actions import Send
from bus.wire.messages import MAX_TOKENS_PER_MESSAGE, Attach, Code, Detach, FinishReason, FoundBy, Tokens

KEEPALIVE_S = 1.0
KEEP_FINISHED_S = 30.0
ATTACH_WAIT_S = 5.0
RETRY_S = 0.02
MAX_PENDING_ATTACHES = 8192
MAX_FINISHED = 16_384


class SendFailure(enum.Enum):
    FULL = "full"  # the reader's queue is full: try again later
    GONE = "gone"  # the reader's connection is gone: wait for another Attach


@dataclass(slots=True, eq=False)
class _Stream:
    rid: str
    attempt: int
    offset: int
    ids: list[int] = field(default_factory=list)
    found_by: FoundBy = ""
    reader: bytes | None = None
    sent: int = 0  # index of the next token to send, counted from the request's first output token
    finish: FinishReason = ""
    code: Code = "ok"
    message: str = ""
    cached_tokens: int = 0
    finish_sent: bool = False
    ended_at: float = 0.0
    last_send: float = 0.0
    blocked_until: float = 0.0

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)

    @property
    def owes(self) -> bool:
        return self.reader is not None and (self.sent < self.end or (bool(self.finish) and not self.finish_sent))


class Streams:
    """All streams of one process, by request. Every method that may send returns nothing: `flush` hands out the
    messages, and what could not be sent comes back through `unsent`."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()  # in order of their end
        self._pending: OrderedDict[str, tuple[bytes, Attach, float]] = OrderedDict()  # attached before the leg came
        self._answers: list[Send] = []
        self.resent_total = 0
        self.pending_dropped_total = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def untaken(self) -> int:
        """Finished streams whose reader has yet to take the end (a draining process waits for these)."""
        return sum(1 for rid in self._finished if not self._streams[rid].finish_sent)

    # --- the leg's side -----------------------------------------------------------------------------------------

    def open(self, rid: str, attempt: int, offset: int, now: float) -> None:
        """A leg that will produce output from index `offset` on. Replaces a lower attempt's stream."""
        old = self._streams.get(rid)
        if old is not None:
            if old.attempt >= attempt:
                return
            if old.reader is not None and not old.finish_sent:
                self._answer(old.reader, _fenced(rid, old.attempt, old.sent))
            self._forget(rid)
        stream = self._streams[rid] = _Stream(rid, attempt, offset, sent=offset, last_send=now)
        if (waiting := self._pending.get(rid)) is not None and waiting[1].attempt <= attempt:
            peer, request, _ = self._pending.pop(rid)
            self._attach(stream, peer, request, now)

    def push(self, rid: str, attempt: int, ids: Sequence[int], found_by: FoundBy = "") -> None:
        stream = self._streams.get(rid)
        if stream is None or stream.attempt != attempt or stream.finish:
            return
        stream.ids.extend(ids)
        stream.found_by = found_by or stream.found_by
        self._dirty[rid] = None

    def finish(
        self, rid: str, attempt: int, reason: FinishReason, now: float, code: Code = "ok", message: str = "",
        cached_tokens: int = 0,
    ) -> None:  # fmt: skip
        """No more tokens will come. Repeats and other attempts are ignored."""
        stream = self._streams.get(rid)
        if stream is None or stream.attempt != attempt or stream.finish:
            return
        stream.finish, stream.code, stream.message = reason, code, message[:1024]
        stream.cached_tokens = cached_tokens
        stream.ended_at = now
        self._dirty[rid] = None
        self._finished[rid] = None
        if len(self._finished) > MAX_FINISHED:
            self._forget(next(iter(self._finished)))

    # --- the reader's side --------------------------------------------------------------------------------------

    def attach(self, peer: bytes, request: Attach, now: float) -> None:
        """`peer` reads from index `request.have` on; the last one to attach is the reader."""
        stream = self._streams.get(request.rid)
        if stream is not None and request.attempt <= stream.attempt:
            self._attach(stream, peer, request, now)
            return
        if request.rid not in self._pending and len(self._pending) >= MAX_PENDING_ATTACHES:
            self._pending.popitem(last=False)
            self.pending_dropped_total += 1
        first = self._pending.get(request.rid)
        since = first[2] if first is not None and first[1].attempt == request.attempt else now
        self._pending[request.rid] = (peer, request, since)

    def detach(self, peer: bytes, request: Detach) -> None:
        waiting = self._pending.get(request.rid)
        if waiting is not None and waiting[0] == peer:
            del self._pending[request.rid]
        stream = self._streams.get(request.rid)
        if stream is None or stream.reader != peer:
            return
        if stream.finish:
            self._forget(request.rid)
        else:
            stream.reader = None

    def flush(self, now: float) -> list[Send]:
        """The messages to send now. Each counts as sent unless `unsent` brings it back."""
        sends, self._answers = self._answers, []
        for rid in list(self._dirty):
            stream = self._streams[rid]
            if stream.blocked_until > now:
                continue
            del self._dirty[rid]
            while stream.owes:
                sends.append(self._next(stream, now))
        return sends

    def unsent(self, send: Send, failure: SendFailure, now: float) -> None:
        message = send.message
        assert isinstance(message, Tokens)
        stream = self._streams.get(message.rid)
        if stream is None or stream.reader != send.peer or stream.attempt != message.attempt:
            return
        self.resent_total += 1
        stream.sent = min(stream.sent, message.start)
        stream.finish_sent = False
        if failure is SendFailure.GONE:
            stream.reader = None
        else:
            stream.blocked_until = now + RETRY_S
            self._dirty[stream.rid] = None

    def tick(self, now: float) -> None:
        """A few times a second: signs of life, answers to hopeless attaches, forgetting."""
        for stream in self._streams.values():
            if stream.reader is not None and not stream.finish and now - stream.last_send >= KEEPALIVE_S:
                stream.last_send = now
                self._answer(stream.reader, Tokens(stream.rid, stream.attempt, stream.sent, ()))
        while self._finished:
            rid = next(iter(self._finished))
            if now - self._streams[rid].ended_at < KEEP_FINISHED_S:
                break
            self._forget(rid)
        for rid, (peer, request, since) in list(self._pending.items()):
            if now - since >= ATTACH_WAIT_S:
                del self._pending[rid]
                self._answer(
                    peer,
                    Tokens(rid, request.attempt, request.have, (), "failed", "peer_lost",
                           "this rank knows nothing of the request: it restarted, or the request went elsewhere"),
                )  # fmt: skip

    # --- inside -------------------------------------------------------------------------------------------------

    def _attach(self, stream: _Stream, peer: bytes, request: Attach, now: float) -> None:
        if request.attempt < stream.attempt:
            self._answer(peer, _fenced(stream.rid, request.attempt, request.have))
            return
        stream.reader = peer
        stream.sent = max(stream.offset, min(request.have, stream.end))
        stream.finish_sent = False
        stream.blocked_until = 0.0
        stream.last_send = now
        self._dirty[stream.rid] = None
        if not stream.owes:  # the reader learns at once that it is attached
            self._answer(peer, Tokens(stream.rid, stream.attempt, stream.sent, ()))

    def _next(self, stream: _Stream, now: float) -> Send:
        start = stream.sent
        ids = stream.ids[start - stream.offset : start - stream.offset + MAX_TOKENS_PER_MESSAGE]
        stream.sent += len(ids)
        stream.last_send = now
        peer, found_by = stream.reader, stream.found_by
        if not stream.finish or stream.sent < stream.end:
            return Send(peer, Tokens(stream.rid, stream.attempt, start, tuple(ids), found_by=found_by))
        stream.finish_sent = True
        end = (stream.finish, stream.code, stream.message, found_by, stream.cached_tokens)
        return Send(peer, Tokens(stream.rid, stream.attempt, start, tuple(ids), *end))

    def _answer(self, peer: bytes, message: Tokens) -> None:
        self._answers.append(Send(peer, message))

    def _forget(self, rid: str) -> None:
        del self._streams[rid]
        self._dirty.pop(rid, None)
        self._finished.pop(rid, None)

    def validate(self) -> None:
        """AssertionError when the table contradicts itself (for tests)."""
        assert self._dirty.keys() <= self._streams.keys()
        assert self._finished.keys() == {rid for rid, s in self._streams.items() if s.finish}
        for rid, stream in self._streams.items():
            assert stream.rid == rid
            assert stream.offset <= stream.sent <= stream.end
            if stream.owes:
                assert rid in self._dirty, f"{rid} owes tokens and nobody will send them"


def _fenced(rid: str, attempt: int, have: int) -> Tokens:
    return Tokens(rid, attempt, have, (), "failed", "fenced", "a newer attempt of this request exists")
