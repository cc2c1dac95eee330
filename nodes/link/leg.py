"""The legs at a rank (a leg is what it runs of a request: the prefill, the decode, or all of it as a unified leg): a
leg's record, the table of its states, the checks of a dispatch, and the limit on legs. Pure."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from bus.errors import RemoteProtocolError
from bus.tracecontext import trace_id_of
from bus.wire.codec import decode
from bus.wire.codes import Code, Refusal
from bus.wire.hashing import tokens_of
from bus.wire.messages import (
    MAX_LOGPROBS_PER_MESSAGE,
    PARAMS,
    Dispatch,
    Ended,
    FinishReason,
    FoundBy,
    Location,
    Params,
    Role,
    TokenLogprobs,
    TraceContext,
)
from nodes.link.config import Limits
from nodes.link.facts import FOR_EVER, KvHandle, RankFacts

NO_ROOM = -1
MAX_LIVE = 65_535  # legs, and bytes of their names, that one hello can list
MAX_NAMES_BYTES = 1_000_000
MAX_LEG_EVENTS = 24
IDS_MAX = 1 << 31  # token ids are below it
BATCH = 1024  # token ids that are checked together


class LegState(enum.Enum):
    """The state of a leg. Decode legs begin at LOCATING, the others at RUNNING."""

    LOCATING = "locating"  # decode: which rank prefills the room?
    ASKING = "asking"  # decode: that rank was asked for the KV cache, and has not finished the prompt yet
    RUNNING = "running"  # the runner has it
    HOLDING = "holding"  # prefill: the prompt is computed; the KV cache waits to be fetched
    ENDED = "ended"


Step: TypeAlias = Literal["located", "handed", "held", "over"]
_S = LegState
NEXT: dict[tuple[Role, LegState, Step], LegState] = {
    ("decode", _S.LOCATING, "located"): _S.ASKING,
    ("decode", _S.LOCATING, "over"): _S.ENDED,
    ("decode", _S.ASKING, "handed"): _S.RUNNING,
    ("decode", _S.ASKING, "over"): _S.ENDED,
    ("decode", _S.RUNNING, "over"): _S.ENDED,
    ("prefill", _S.RUNNING, "held"): _S.HOLDING,
    ("prefill", _S.RUNNING, "over"): _S.ENDED,
    ("prefill", _S.HOLDING, "over"): _S.ENDED,
    ("unified", _S.RUNNING, "over"): _S.ENDED,
}


class Identity(NamedTuple):
    """The identity of a request among all with its rid, which may follow each other or run at two controllers. A
    field that is None is unknown, and agrees with every value."""

    client: str | None
    room: int | None
    prompt_tokens: int | None  # without the output so far, which grows

    def agrees(self, other: Identity) -> bool:
        """Return true if both may be the same request."""
        return all(mine is None or its is None or mine == its for mine, its in zip(self, other, strict=True))


def identity_of(dispatch: Dispatch) -> Identity:
    """Return the identity of the request that is dispatched."""
    return Identity(dispatch.client, dispatch.bootstrap_room, dispatch.prompt_tokens - dispatch.offset)


class IllegalStep(AssertionError):
    """A bug of ours, or of a runner; the message has the leg's state."""


@dataclass(slots=True, eq=False)
class Leg:
    """One leg: what a runner is given, and what the link keeps of it (from `owner` on; a runner must not touch that).
    The rank's core makes it from a dispatch."""

    rid: str  # the request's id
    attempt: int  # of the request, from 1 on
    role: Role  # what is to be done of it
    dp_rank: int  # of this process's ranks, which
    seq: int  # names the leg at its rank; never used twice
    room: int  # NO_ROOM for unified legs
    prompt: array[int]  # token ids; empty for a decode leg unless the rank wants the prompt
    prompt_tokens: int  # how many the prompt has, also where `prompt` is empty
    max_tokens: int  # output tokens wanted, those of a resumed request's past not counted
    offset: int  # index of the first output token among all of the request's
    priority: int  # higher first
    params: Params  # sampling
    stop_ids: frozenset[int]  # end the output, and are the last of it
    deadline: float | None  # on this process's monotonic clock
    handle: KvHandle | None = None  # decode: the KV cache to fetch; prefill: what an engine's own connector reads back

    client: str = ""  # the key whose request it is; empty: there are none
    submit_room: int | None = None  # the room of its submit, also of a unified leg; None: it has none
    trace: TraceContext | None = None  # of a request that is traced
    trace_events: list[tuple[float, str, str]] = field(default_factory=list)  # what happened to it, when, and a detail
    continue_on_disconnect: bool = False  # run to the end even if the output is not read
    owner: int = 0  # the connection of the controller that gets its reports
    state: LegState = LegState.RUNNING  # moved by `step` alone
    ingested_at: float = 0.0  # on this process's monotonic clock, as all times here
    started: bool = False  # its first output exists
    first_token_s: float = 0.0  # from `ingested_at`
    cached_tokens: int = 0  # of the prompt, in the prefix cache
    written_tokens: int = 0  # of the prompt, computed and written to the prefix cache
    found_by: FoundBy = ""  # how its prefill rank was found

    # how it ended, in the words of its reader
    finish: FinishReason = ""  # empty while it runs
    code: Code = "ok"  # ok, or why it failed
    message: str = ""  # the same in a sentence
    ended_at: float = 0.0  # when

    # decode and unified: its output, and its reader (streams)
    output: list[int] = field(default_factory=list)  # kept until the reader has all of it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each of `output`, where they are wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of each of `prompt` but the first, where they are wanted
    reader: bytes | None = None  # the client that is sent the output, by its connection
    unread_since: float = 0.0  # while it has no reader
    lost: bool = False  # the reader's connection is gone: it may attach again over another
    detached: bool = False  # its reader has detached: it wants no more
    shares: bool = False  # the reader takes its tokens in a message together with those of other requests
    sent: int = 0  # the next token to send, counted from the request's first output token
    sent_at: float = 0.0  # when something was sent last
    finish_sent: bool = False  # the end was sent to the reader
    blocked_until: float = 0.0  # the reader's queue was full

    # decode: its way to the KV cache (puller)
    location: Location | None = None  # of the prefill leg; of a prefill leg that reads back: of the decode leg
    paired: bool = False  # its controller dispatched the prefill leg too, under the same attempt
    waits_tokens: int = 0  # what it counts as in the load until its KV cache is ready
    kv_attempt: int = 0  # under which the room was registered
    cached_at_prefill: int = 0  # of the prompt, as the prefill rank says
    written_at_prefill: int = 0  # the same
    kv_wanted: bool = False  # the prefill rank has been asked and not been told that we are done
    asked_at: float = 0.0  # when the prefill rank was asked last
    asks: list[float] = field(default_factory=list)  # when it was asked for the handle, each time

    # prefill: the KV cache that it holds (sender); the last four as the runner said them
    pullers: dict[bytes, int] = field(default_factory=dict)  # its pulling peers, with the number of their last pull
    registered: int = 0  # the attempt under which the bus knows its room, which other clients may name too
    given: bool = False  # its meta was sent to a decode rank; an engine's own connector serves only one
    first_token: int = 0  # sampled with the prompt
    first_logprobs: TokenLogprobs | None = None  # of it
    handle_data: bytes = b""  # opaque; of a decode leg: of what it lends, and so is `valid_until`
    valid_until: float = FOR_EVER  # a later fetch may give another prompt's cache

    # prefill: what it reads back (KvReader); decode: what it lends (KvLender)
    read_tokens: int = 0  # of the prompt, that the decode rank is thought to cache; vLLM: then that it reads of it
    reads: bool = False  # the decode rank has answered
    read_until: float = 0.0  # how long its answer is waited for
    borrower: bytes | None = None  # the prefill rank that reads, by its connection
    lent: int = 0  # blocks that it may read
    borrowed_at: float = 0.0  # when it asked last
    borrower_asked: int = 0  # the number of its last question

    last_seen_at: float = 0.0  # when the rank at the other end of the KV transfer gave a sign of life

    @property
    def live(self) -> bool:
        """True until the leg is over."""
        return self.state is not LegState.ENDED

    def add_event(self, what: str, now: float, detail: str = "") -> None:
        """Record an event of the leg, for `pdbus trace`. Beyond MAX_LEG_EVENTS nothing is recorded."""
        if len(self.trace_events) < MAX_LEG_EVENTS:
            self.trace_events.append((now, what, detail))

    @property
    def identity(self) -> Identity:
        """The identity of the leg's request."""
        return Identity(self.client, self.submit_room, self.prompt_tokens - self.offset)

    @property
    def about(self) -> dict[str, object]:
        """The fields of each log line about this leg; the logger adds the rank."""
        room = None if self.room == NO_ROOM else self.room
        about: dict[str, object] = {"rid": self.rid, "attempt": self.attempt, "leg": self.role, "room": room}
        return about if self.trace is None else about | {"trace_id": trace_id_of(self.trace)}

    @property
    def produced(self) -> int:
        """The index after the last token of `output`, counted as `sent` is."""
        return self.offset + len(self.output)

    @property
    def owes(self) -> bool:
        """True while something is still to be sent to the reader."""
        unsent = self.sent - self.offset < len(self.output) or (self.finish and not self.finish_sent)
        return bool(unsent) and self.reader is not None

    @property
    def wants_logprobs(self) -> bool:
        """True if each output token must come with its log probabilities."""
        return self.params.logprobs >= 0

    def step(self, step: Step) -> None:
        """Move the state as the table NEXT says; IllegalStep where it has no such step."""
        to = NEXT.get((self.role, self.state, step))
        if to is None:
            raise IllegalStep(
                f"{self.role} leg {self.rid}/{self.attempt} is {self.state.value} and cannot be {step} "
                f"(started {self.started}, {len(self.output)} tokens, found by {self.found_by or 'nothing'})"
            )
        self.state = to

    def end(self, code: Code, message: str, now: float) -> Ended:
        """Set the leg's end (its `code`, `message` and `finish`) and return the message about it for its controller.
        With `ok`, `message` is why a decode or unified leg stopped."""
        self.step("over")
        self.code, self.message, self.ended_at = code, "" if code == "ok" else message[:1024], now
        if code == "ok":
            self.finish = "stop" if message == "stop" else "length"
        else:
            self.finish = "cancelled" if code == "cancelled" else "failed"
        return self.report

    @property
    def report(self) -> Ended:
        """The message about the leg's end for its controller; before `end`, its fields are those of a leg that has not
        ended."""
        return Ended(
            self.rid,
            self.attempt,
            self.role,
            self.code,
            self.message,
            len(self.output),
            self.found_by,
            self.first_token_s,
            self.cached_tokens,
            self.submit_room,
        )


# --- what a dispatch must be ------------------------------------------------------------------------------------


def leg_of(
    dispatch: Dispatch, frames: Sequence[bytes], *, role: Role, dp_rank: int, facts: RankFacts, now: float
) -> Leg:
    """Return the leg that `dispatch` asks for at this rank, not yet in the table; raise Refusal if it is invalid or too
    long for the rank. `frames` are those after the header: prompt and parameters. A decode rank that prefills takes
    unified legs too."""
    if dispatch.leg != role:
        if role != "decode" or dispatch.leg != "unified" or not facts.prefills:
            raise Refusal("bad_request", f"a {dispatch.leg} leg for a {role} rank")
        role = "unified"
    if dispatch.dp_rank != dp_rank:
        raise Refusal("bad_rank", f"a leg for dp_rank {dispatch.dp_rank} came to {dp_rank}")
    if dispatch.prompt_tokens < 1:
        raise Refusal("empty_prompt", "the prompt is empty")
    if dispatch.max_tokens < 1:
        raise Refusal("bad_request", "max_tokens must be at least 1")
    if role != "unified" and dispatch.bootstrap_room is None:
        raise Refusal("bad_room", f"a {role} leg needs a bootstrap_room")
    _check_length(dispatch, role, facts)
    prompt, params = _payload(dispatch, frames, role, facts)
    stop_ids = frozenset(params.stop_token_ids)
    leg = Leg(
        rid=dispatch.rid,
        attempt=dispatch.attempt,
        role=role,
        dp_rank=dp_rank,
        seq=0,
        room=NO_ROOM if dispatch.bootstrap_room is None or role == "unified" else dispatch.bootstrap_room,
        prompt=prompt,
        prompt_tokens=dispatch.prompt_tokens,
        max_tokens=dispatch.max_tokens,
        offset=dispatch.offset,
        priority=dispatch.priority,
        params=params,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | frozenset(facts.eos_ids),
        deadline=now + dispatch.deadline_s if dispatch.deadline_s else None,
        state=LegState.LOCATING if role == "decode" else LegState.RUNNING,
        ingested_at=now,
        client=dispatch.client,
        submit_room=dispatch.bootstrap_room,
        continue_on_disconnect=dispatch.continue_on_disconnect,
        trace=dispatch.trace,
    )
    if role == "prefill" and facts.reads_back and dispatch.read_back is not None:
        leg.location = dispatch.read_back.at
        leg.read_tokens = min(dispatch.read_back.tokens, dispatch.prompt_tokens - 1)
    return leg


def _check_length(dispatch: Dispatch, role: Role, facts: RankFacts) -> None:
    context = dispatch.prompt_tokens + (1 if role == "prefill" else dispatch.max_tokens)
    if context > facts.max_context:
        raise Refusal("too_long", f"{context} tokens exceed the context of {facts.max_context}")
    kv_tokens = context - 1  # the last token's KV is never needed
    block = facts.block_tokens or 1
    if facts.kv_capacity and -(-kv_tokens // block) * block > facts.kv_capacity:
        raise Refusal("too_long", f"{kv_tokens} tokens exceed this rank's KV capacity of {facts.kv_capacity}")


def _payload(dispatch: Dispatch, frames: Sequence[bytes], role: Role, facts: RankFacts) -> tuple[array[int], Params]:
    bare = role == "decode" and not facts.wants_prompt
    expected = 1 if bare else 2
    if len(frames) != expected:
        raise Refusal("bad_message", f"{len(frames)} payload frames, not {expected}")
    try:
        params = decode(frames[-1], PARAMS)
    except RemoteProtocolError as error:
        raise Refusal("bad_message", f"sampling parameters: {error}") from None
    assert isinstance(params, Params)
    if unknown := sorted(set(params.needs) - set(facts.params)):
        raise Refusal(
            "bad_request", f"this rank does not know {', '.join(unknown)} (the submit did not say it needs it)"
        )
    if params.prompt_logprobs >= 0:
        if role != "unified":
            raise Refusal("bad_request", f"prompt_logprobs: unified ranks alone have them, not a {role} rank")
        if dispatch.prompt_tokens - dispatch.offset - 1 > MAX_LOGPROBS_PER_MESSAGE:
            raise Refusal(
                "bad_request", f"prompt_logprobs: the prompt has more than {MAX_LOGPROBS_PER_MESSAGE + 1} tokens"
            )
    if bare:
        return array("i"), params
    if len(frames[0]) != 4 * dispatch.prompt_tokens:
        raise Refusal("bad_message", f"{len(frames[0])} prompt bytes for {dispatch.prompt_tokens} tokens")
    vocab_size = facts.vocab_size or IDS_MAX
    if not _are_below(frames[0], vocab_size):
        raise Refusal("bad_message", f"a token id outside 0..{vocab_size - 1}")
    return tokens_of(frames[0]), params


def _are_below(prompt: bytes, vocab_size: int) -> bool:
    """Return true if every token id of a prompt frame is at least 0 and below `vocab_size`."""
    if not prompt[3::4].isascii():  # an id has its highest bit set: it is negative
        return False
    # As many ids as BATCH are one number with digits of 32 bits: one addition for all, in a third of the time of max().
    # It sets the highest bit of each id that is too high, and no digit carries into the next.
    added, highest = _batch_numbers(vocab_size)
    for start in range(0, len(prompt), 4 * BATCH):
        if (int.from_bytes(prompt[start : start + 4 * BATCH], "little") + added) & highest:
            return False
    return True


@lru_cache
def _batch_numbers(vocab_size: int) -> tuple[int, int]:
    """Return what `_are_below` adds to a batch of ids, and the highest bits of all its ids."""
    ones = int.from_bytes(b"\1\0\0\0" * BATCH, "little")
    return ones * (IDS_MAX - min(vocab_size, IDS_MAX)), ones * IDS_MAX


class Legs:
    """The live legs of a rank, one for each rid. They may be removed while a caller iterates over them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._legs: dict[str, Leg] = {}
        self._prompt_bytes = 0
        self._names_bytes = 0
        self._seq = 0

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[Leg]:
        return iter(list(self._legs.values()))

    def get(self, rid: str) -> Leg | None:
        """Return the live leg of this rid; None if there is none."""
        return self._legs.get(rid)

    def check_space(self, leg: Leg, waiting: int) -> None:
        """Raise Refusal (`overloaded`) when there is no space for `leg` beside the `waiting` requests that wait at this
        rank."""
        prompt_bytes = self._prompt_bytes + 4 * len(leg.prompt)
        if waiting >= self.limits.max_waiting or prompt_bytes > self.limits.max_waiting_bytes:
            raise Refusal("overloaded", f"{waiting} requests are waiting at this rank")
        if len(self._legs) >= MAX_LIVE or self._names_bytes + _name_bytes(leg.rid) > MAX_NAMES_BYTES:
            raise Refusal("overloaded", f"{len(self._legs)} requests are at this rank")

    def add(self, leg: Leg) -> None:
        """Add a leg, and give it a `seq` of its own."""
        self._seq += 1
        leg.seq = self._seq
        self._legs[leg.rid] = leg
        self._prompt_bytes += 4 * len(leg.prompt)
        self._names_bytes += _name_bytes(leg.rid)

    def remove(self, leg: Leg) -> None:
        """Remove a leg that has ended."""
        del self._legs[leg.rid]
        self._prompt_bytes -= 4 * len(leg.prompt)
        self._names_bytes -= _name_bytes(leg.rid)


def _name_bytes(rid: str) -> int:
    """Return the size of `(rid, attempt)` in a hello, at most."""
    return len(rid.encode()) + 9
