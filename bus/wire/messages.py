"""Every message of the protocol, typed and immutable, in one place.

This module owns shapes and bounds; it must not encode, send or decide anything. On the wire each message is a
MessagePack array whose first element is the tag below (`bus.wire.codec`, `docs/protocol.md`). Fields are only ever
appended, with a default, so that old and new peers understand each other within one protocol version.

An instance is a deployment of one model with `dp_size` ranks (engine processes, `dp_rank` 0, 1, ...). A request runs as
one unified leg, or as a pair: a prefill leg and a decode leg, joined by a room. An attempt is one try at a request; an
epoch is a random number that names one start of a part; a `rid` names a request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from bus.wire.codes import Code

MAX_ROOM = 2**63 - 1
MAX_ROOMS_PER_MESSAGE = 4096
MAX_TOKENS_PER_MESSAGE = 16384
MAX_OTHERS_PER_MESSAGE = 63  # streams whose tokens come along with those of another
MAX_LOGPROBS_PER_MESSAGE = 2048  # each of the largest possible: two thirds of a frame
MAX_DP_SIZE = 4096
MAX_ATTEMPT = 1_000_000
MAX_TRACE_EVENTS = 64  # of one part and one request; with MAX_TRACE_PARTS they all fit in one frame
MAX_TRACE_PARTS = 16
MAX_PHRASE = 192
MAX_WORD = 32
MAX_EVENTS = 1000
MAX_QUEUED_KINDS = 32
MAX_LISTED = 20
MAX_WANTED = 256
MAX_STEPS_PER_MESSAGE = 1024
MAX_WORK_PER_MESSAGE = 512
OVER_THE_BUS = "blocks"  # how KV caches travel that a node sends block by block

Role: TypeAlias = Literal["prefill", "decode", "unified"]
Legs: TypeAlias = Literal["pair", "prefill", "decode", "unified"]  # what a request asks for
NodeState: TypeAlias = Literal["starting", "ready", "draining", "gone"]
RankState: TypeAlias = Literal["starting", "ready", "draining", "gone", "silent", "lost", "hung"]
FoundBy: TypeAlias = Literal["", "told", "computed", "asked", "local"]
FinishReason: TypeAlias = Literal["", "stop", "length", "cancelled", "failed"]

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ENDPOINT = re.compile(r"[!-~]{0,150}")
# The alphabets of these two are checked by the messages that carry them (`_Named`, `_At`), once for each string: a
# pattern in Meta would run for every message again.
Name: TypeAlias = Annotated[str, Meta(extra={"alphabet": NAME})]
Rid: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Room: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Epoch: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ROOM)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
DpRank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
DpSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_DP_SIZE)]
Attempt: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
AgeSeconds: TypeAlias = Annotated[float, Meta(ge=-1, le=1e9)]  # -1: never
# Printable ASCII, and short enough that an Answer of MAX_ROOMS_PER_MESSAGE locations always fits in a frame.
Endpoint: TypeAlias = Annotated[str, Meta(extra={"alphabet": ENDPOINT})]
InstanceOrEmpty: TypeAlias = Annotated[str, Meta(max_length=64)]  # empty: any, or the only one
Word: TypeAlias = Annotated[str, Meta(max_length=MAX_WORD)]
Layout: TypeAlias = Annotated[str, Meta(max_length=128)]
Model: TypeAlias = Annotated[str, Meta(max_length=128)]
KeyName: TypeAlias = Annotated[str, Meta(max_length=80)]  # `clients/alice`; empty: there are no keys
Priority: TypeAlias = Annotated[int, Meta(ge=-1000, le=1000)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
LogProb: TypeAlias = Annotated[float, Meta(ge=-9999, le=0)]  # -9999: impossible
Grammar: TypeAlias = Annotated[str, Meta(max_length=65536)]  # opaque here; an engine's own dialect
Choice: TypeAlias = Annotated[str, Meta(max_length=1024)]
BadWord: TypeAlias = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]  # the tokens of it
Salt: TypeAlias = Annotated[str, Meta(max_length=256)]
ParserName: TypeAlias = Annotated[str, Meta(max_length=25)]  # `parser_word` of it is a Word
Session: TypeAlias = Annotated[str, Meta(max_length=256)]  # so 1,024 bytes at most
LatencyCounts: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=64)]  # by bound of `bus.histogram`
Sentence: TypeAlias = Annotated[str, Meta(max_length=1024)]
Phrase: TypeAlias = Annotated[str, Meta(max_length=MAX_PHRASE)]
HostPort: TypeAlias = Annotated[str, Meta(max_length=150)]  # `host:port`; empty: none
Traceparent: TypeAlias = Annotated[str, Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
Tracestate: TypeAlias = Annotated[str, Meta(max_length=512)]
MemberKey: TypeAlias = tuple[str, int]  # (instance, dp_rank)


class Message(Struct, frozen=True, array_like=True, gc=False):
    """The base of all messages: immutable, an array on the wire. Messages are trees, so the garbage collector need
    not look at them."""


_SEEN_MAX = 65_536
_seen: dict[re.Pattern[str], set[str]] = {NAME: set(), ENDPOINT: set()}  # strings that were checked and are right
_names, _endpoints = _seen[NAME], _seen[ENDPOINT]


def _check(alphabet: re.Pattern[str], text: str) -> None:
    """Check `text`; ValueError, which decoding turns into its own error."""
    if alphabet.fullmatch(text) is None:
        raise ValueError(f"{text[:80]!r} does not match {alphabet.pattern}")
    if len(_seen[alphabet]) < _SEEN_MAX:
        _seen[alphabet].add(text)


class _Named(Message, frozen=True):
    """A message with an `instance`, which must be a Name."""

    def __post_init__(self) -> None:
        if self.instance not in _names:  # type: ignore[attr-defined]
            _check(NAME, self.instance)  # type: ignore[attr-defined]


class _At(Message, frozen=True):
    """A message with an `endpoint`."""

    def __post_init__(self) -> None:
        if self.endpoint not in _endpoints:  # type: ignore[attr-defined]
            _check(ENDPOINT, self.endpoint)  # type: ignore[attr-defined]


class _NamedAt(Message, frozen=True):
    """A message with an `instance` and an `endpoint`."""

    def __post_init__(self) -> None:
        if self.instance not in _names:  # type: ignore[attr-defined]
            _check(NAME, self.instance)  # type: ignore[attr-defined]
        if self.endpoint not in _endpoints:  # type: ignore[attr-defined]
            _check(ENDPOINT, self.endpoint)  # type: ignore[attr-defined]


class _OfController(Message, frozen=True):
    """A message with a `controller`, which must be a Name."""

    def __post_init__(self) -> None:
        if self.controller not in _names:  # type: ignore[attr-defined]
            _check(NAME, self.controller)  # type: ignore[attr-defined]


class Location(_NamedAt, frozen=True):
    """The place of a rank: `endpoint` is its data socket, `epoch` names this start of it."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    endpoint: Endpoint


# --- load ---------------------------------------------------------------------------------------------------


class Ack(Message, frozen=True):
    """The work that a node has ingested from one controller since the node's epoch began (cumulative)."""

    controller_epoch: Epoch  # names the controller
    dispatches: Count  # ingested, cancelled ones included
    tokens: Count  # sum of `Dispatch.charge`


class Load(Message, frozen=True, kw_only=True):
    """A scheduler's load, read together with `acks` at one point of its loop, after it ingested its inbox."""

    seq: Count  # rises with every report of this epoch
    step: Count  # forward steps completed; stands still when the engine hangs
    running: Count  # requests that hold a run slot
    waiting: Count  # requests ingested that do not run yet
    waiting_tokens: Count  # prompt tokens not yet computed or not yet fetched, of running and waiting requests
    kv_tokens: Count  # KV tokens held by live requests (reclaimable prefix-cache blocks are not counted)
    kv_capacity: Count  # KV tokens that the rank can hold
    max_running: Count  # run slots
    acks: Annotated[tuple[Ack, ...], Meta(max_length=64)] = ()
    prompt_tokens_total: Count = 0  # prompt tokens ingested since the epoch began
    cached_tokens_total: Count = 0  # of those, served from the prefix cache
    busy_us_total: Count = 0  # microseconds spent in forward steps
    output_tokens_total: Count = 0  # output tokens of decode and unified legs since the epoch began
    admitted_tokens_total: Count = 0  # prompt tokens of requests that have begun, some from the prefix cache
    computed_tokens_total: Count = 0  # prompt tokens computed since the epoch began
    fetches_total: Count = 0  # KV caches, or parts of them, that came from other ranks
    fetched_tokens_total: Count = 0  # tokens in them
    fetch_us_total: Count = 0  # microseconds from each one's beginning to its end, added up
    # None: the rank does not say it, as one of an older version, or of an engine that does not know it.
    kv_cached: Count | None = None  # KV tokens in reclaimable prefix-cache blocks
    kv_pinned: Count | None = None  # KV tokens kept for other ranks alone: of prompts that are computed and not yet
    # fetched, part of `kv_tokens`; and at a decode rank of blocks lent for read back, part of neither of these two, or
    # kept for that by an engine with a connector of its own, part of `kv_tokens`
    kv_sent_bytes_total: Count | None = None  # of KV blocks sent to other ranks since the epoch began
    kv_received_bytes_total: Count | None = None  # of KV blocks that came from other ranks, damaged ones too
    to_compute_tokens: Count | None = None  # of `waiting_tokens`, those that the rank is to compute itself


# --- publications (PUB -> XSUB/XPUB -> SUB); `seq` rises by one per message of that tag and epoch -------------


class LoadReport(_Named, frozen=True, tag="load"):
    """A rank's load alone, published when no other message of the rank carries it."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    seq: Count
    load: Load


class Registration(Message, frozen=True):
    """The sender prefills `room`, or will, as this attempt of its request."""

    room: Room
    attempt: Attempt = 1


class Drop(Message, frozen=True):
    """The sender is done with `room`; `code` is `ok`, or why no KV cache will come."""

    room: Room
    attempt: Attempt = 1
    code: Code = "ok"


class Rooms(_NamedAt, frozen=True, tag="rooms"):
    """The rooms registered and dropped since the last message; a `snapshot` answers a resync and restates live
    rooms."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    seq: Count
    load: Load | None
    endpoint: Endpoint
    register: Annotated[tuple[Registration, ...], Meta(max_length=MAX_ROOMS_PER_MESSAGE)] = ()
    drop: Annotated[tuple[Drop, ...], Meta(max_length=MAX_ROOMS_PER_MESSAGE)] = ()
    snapshot: bool = False


class Member(_NamedAt, frozen=True, tag="member"):
    """The sender's description, published at least each `interval_s`. By `rooms_seq` the broker notices a lost last
    message."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    seq: Count
    load: Load | None
    role: Role
    model: Model
    dp_size: DpSize
    state: NodeState
    endpoint: Endpoint
    follow_bootstrap_room: bool
    rooms_seq: Count
    interval_s: Seconds
    started_us: Count = 0  # as in the rank's `hello`


class SentTo(_Named, frozen=True):
    """The dispatches, and the tokens charged for them, that a controller sent to one start of a rank."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    dispatches: Count
    tokens: Count


class Sent(_OfController, frozen=True, tag="sent"):
    """A controller's cumulative counters of what it sent to each rank, published for the other controllers: state, not
    events."""

    controller: Name
    epoch: Epoch
    seq: Count
    counters: Annotated[tuple[SentTo, ...], Meta(max_length=MAX_DP_SIZE)]
    metrics: HostPort = ""  # where its metrics are


class Beacon(Message, frozen=True, tag="beacon"):
    """The broker lives; it is published each `interval_s`. A new epoch asks every publisher to state its membership and
    rooms again."""

    epoch: Epoch
    seq: Count
    interval_s: Seconds
    metrics: HostPort = ""  # where the broker's metrics are


class Resync(_Named, frozen=True, tag="resync"):
    """Broker to one publisher (topic `to/<instance>/<dp_rank>/`): restate your membership and live rooms."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch  # of the publisher concerned


class Conflict(_Named, frozen=True, tag="conflict"):
    """Broker to one publisher: two live epochs claim `room` with one attempt; the later claim was refused."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    room: Room
    attempt: Attempt
    other: Location
    kept: bool  # whether the claim of the publisher addressed stands


# --- bootstrap (REQ or DEALER -> ROUTER) ---------------------------------------------------------------------


class Query(Message, frozen=True, tag="query"):
    """A question for the ranks that prefill these rooms. With `watch_s` > 0, unknown rooms are watched and sent when
    known."""

    id: Count
    rooms: Annotated[tuple[Room, ...], Meta(min_length=1, max_length=MAX_ROOMS_PER_MESSAGE)]
    watch_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class Found(Message, frozen=True):
    """Rooms that one rank holds, each registered as `attempt`: a location is named once, not once a room."""

    at: Location
    attempt: Attempt
    rooms: Annotated[tuple[Room, ...], Meta(min_length=1, max_length=MAX_ROOMS_PER_MESSAGE)]


class Lost(Message, frozen=True):
    """A room without a location: `unknown_room` (deadline passed), or the reason that its prefill leg gave."""

    room: Room
    code: Code
    attempt: Count = 0  # the attempt that ended so; 0: not known


class Answer(Message, frozen=True, tag="answer"):
    """The answer to a query. `pending` rooms are watched; a later Answer with the same id settles each of them."""

    id: Count
    found: Annotated[tuple[Found, ...], Meta(max_length=MAX_ROOMS_PER_MESSAGE)] = ()
    pending: Annotated[tuple[Room, ...], Meta(max_length=MAX_ROOMS_PER_MESSAGE)] = ()
    lost: Annotated[tuple[Lost, ...], Meta(max_length=MAX_ROOMS_PER_MESSAGE)] = ()


class Unwatch(Message, frozen=True, tag="unwatch"):
    """A request to the broker: end the watches of this connection for these rooms. There is no answer."""

    rooms: Annotated[tuple[Room, ...], Meta(min_length=1, max_length=MAX_ROOMS_PER_MESSAGE)]


class TopologyQuery(Message, frozen=True, tag="topology"):
    """A question for an instance and its ranks, or for all instances; Topology answers it."""

    id: Count
    instance: InstanceOrEmpty = ""  # empty: all


class MemberInfo(_At, frozen=True):
    """One rank of an instance, as the broker knows it."""

    dp_rank: DpRank
    epoch: Epoch
    state: NodeState
    endpoint: Endpoint
    age_s: Seconds  # since the broker last heard of it


class InstanceInfo(_Named, frozen=True):
    """One instance, as the broker knows it from what its ranks state."""

    instance: Name
    role: Role
    model: Model
    dp_size: DpSize
    ready: bool  # every dp_rank in 0..dp_size-1 is present and ready
    follow_bootstrap_room: bool  # every rank says so
    ranks: Annotated[tuple[MemberInfo, ...], Meta(max_length=MAX_DP_SIZE)]


class Topology(Message, frozen=True, tag="instances"):
    """The answer to a TopologyQuery. An instance that the broker does not know is missing."""

    id: Count
    broker_epoch: Epoch
    instances: Annotated[tuple[InstanceInfo, ...], Meta(max_length=1024)]


class BrokerStatusQuery(Message, frozen=True, tag="broker_status"):
    """An operator's question for the broker's counts."""

    id: Count


class BrokerStatus(Message, frozen=True, tag="broker_counts"):
    """The answer to a BrokerStatusQuery: counts by name since the broker's start, and gauges."""

    id: Count
    epoch: Epoch
    uptime_s: Seconds
    counts: dict[str, int]


class Refused(Message, frozen=True, tag="refused"):
    """The answer to a message that was invalid or not allowed; the connection stays usable."""

    code: Code
    message: Sentence
    id: Count = 0


# --- controller <-> node (DEALER -> ROUTER) ------------------------------------------------------------------


class Hello(_NamedAt, frozen=True, kw_only=True, tag="hello"):
    """A rank introduces itself to a controller: first message on a connection, repeated on `who` and on each change of
    state."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    role: Role
    model: Model
    dp_size: DpSize
    state: NodeState
    endpoint: Endpoint
    max_context: Count
    kv_capacity: Count
    max_running: Count
    block_tokens: Count
    running: Annotated[tuple[tuple[Rid, Attempt], ...], Meta(max_length=65536)] = ()  # what it still runs
    started_us: Count = 0  # when this epoch began, since 1970: shows which of two starts is the later. 0: unknown
    wants_prompt: bool = False  # decode: its dispatches carry the prompt frame too
    kv_transfer: Word = OVER_THE_BUS  # how KV caches travel; prefill and decode ranks that differ are never paired
    kv_layout: Layout = (
        ""  # model revision, dtype, block shape ...; it must be equal too, unless one of the two is empty
    )
    params: Annotated[
        tuple[Word, ...], Meta(max_length=64)
    ] = ()  # sampling parameters it knows of those that not every rank does
    metrics: HostPort = ""  # where those of its process are
    # the owners of `running`, in its order: (key, number of legs) each; legs beyond that have no stated owner
    clients: Annotated[tuple[tuple[KeyName, Count], ...], Meta(max_length=256)] = ()
    prefills: bool = False  # decode: it takes unified legs too, whose prompts it computes itself
    reads_back: bool = False  # prefill: it can read what decode ranks cache of a prompt; decode: it lends that
    records: bool = False  # it answers `record`


class Welcome(_OfController, frozen=True, tag="welcome"):
    """Controller to rank: your hello is accepted. A side that is silent for `lease_s` counts as lost."""

    controller: Name
    epoch: Epoch
    follow_bootstrap_room: bool
    lease_s: Seconds
    dp_rank: DpRank


class Who(Message, frozen=True, tag="who"):
    """Controller to rank: I do not know you (the controller restarted, or the connection is new); send hello again."""


class Ping(Message, frozen=True, tag="ping"):
    """Controller to rank: answer with a pong that has the same `n`."""

    n: Count
    restate: bool = False  # KV events of this rank were missed: it shall name again what it has cached


class Pong(Message, frozen=True, tag="pong"):
    """The answer to a ping. `step` counts forward steps; if it stands still while `busy`, the engine hangs."""

    n: Count
    step: Count
    busy: bool
    load_seq: Count = 0  # of the newest load that the rank has made, published or not. 0: unknown
    at_us: Count = 0  # when it was sent, by the node's clock. 0: unknown


class TraceContext(Message, frozen=True):
    """The W3C Trace Context of a traced request: its span is the parent of the following spans."""

    traceparent: Traceparent
    tracestate: Tracestate = ""


class ReadBack(Message, frozen=True):
    """The rank of a request's decode leg, and how many of the first tokens of its prompt that caches, as far as the
    controller knows: the prefill rank may read them there instead of computing them."""

    at: Location
    tokens: Count


class Dispatch(Message, frozen=True, tag="dispatch"):
    """Controller to rank: run one leg. Frames: header, [prompt,] params; decode legs carry no prompt frame unless the
    rank wants it."""

    rid: Rid
    attempt: Attempt
    leg: Role
    dp_rank: DpRank  # which rank of the receiving process
    controller_epoch: Epoch
    number: Count  # 1, 2, 3 ... for this (controller epoch, node epoch)
    charge: Count  # tokens charged to the rank's estimate, to be acknowledged
    prompt_tokens: Count
    max_tokens: Count
    offset: Count = 0  # output tokens the client already has; streaming starts at this index
    bootstrap_room: Room | None = None
    prefill: Location | None = None  # the prefill leg's rank, where the controller knows it
    prefill_instance: InstanceOrEmpty = ""  # for `room % dp_size` where `prefill` is missing
    disagg_prefill_dp_rank: DpRank | None = None  # given by the caller; the location must be looked up
    deadline_s: Seconds = 0.0  # left when sent; 0: none
    priority: Priority = 0
    client: KeyName = ""  # the owner of the request; only this key may attach
    continue_on_disconnect: bool = False  # as in `Submit`
    trace: TraceContext | None = None  # as in `Submit`
    pair_attempt: Count = 0  # as in `Submit`
    read_back: ReadBack | None = None  # prefill: what the decode leg's rank caches of the prompt


class CancelLeg(Message, frozen=True, tag="cancel_leg"):
    """Controller to rank: end the leg of this request, with `code`."""

    rid: Rid
    attempt: Attempt  # this and all older attempts
    code: Code = "cancelled"
    if_unfetched: bool = False  # decode: only while its KV cache is still to be fetched (the prefill rank is lost)
    client: KeyName = ""  # the key that asks for it, where the controller does not know the request's owner
    room: Room | None = None  # of its submit: a leg of another room is another request's. None: not known


class Drain(Message, frozen=True, tag="drain"):
    """Controller to rank: take no new legs, finish those that run, and leave."""

    dp_rank: DpRank


class Ended(Message, frozen=True):
    """One leg is over at the node; `code` is `ok`, or why not."""

    rid: Rid
    attempt: Attempt
    leg: Role
    code: Code
    message: Sentence = ""
    output_tokens: Count = 0
    found_by: FoundBy = ""
    first_token_s: Seconds = 0.0  # ingest to first token, at the node
    cached_tokens: Count = 0
    room: Room | None = None  # of its submit: a leg of another room is another request's. None: not known


class Progress(_Named, frozen=True, tag="progress"):
    """Rank to controller, at most one per step: legs that produced their first output, and legs that ended."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch
    started: Annotated[tuple[tuple[Rid, Attempt], ...], Meta(max_length=65536)] = ()
    ended: Annotated[tuple[Ended, ...], Meta(max_length=65536)] = ()


class Bye(_Named, frozen=True, tag="bye"):
    """Rank to controller: it leaves; legs that are not known to have ended are over."""

    instance: Name
    dp_rank: DpRank
    epoch: Epoch


class HistoryQuery(Message, frozen=True, tag="recall"):
    """A controller's question for the rank's record of the request `rid`; HistoryReply answers it."""

    id: Count
    rid: Rid


class TraceEvent(Message, frozen=True):
    """An event in the life of a request, at `at_us` (microseconds since 1970, by the clock of the part that records
    it)."""

    at_us: Count
    what: Word
    attempt: Count = 0
    leg: Role | None = None
    detail: Phrase = ""


class HistoryReply(Message, frozen=True, tag="recalled"):
    """The answer to a HistoryQuery: the events of the request's legs at this rank."""

    id: Count
    events: Annotated[
        tuple[TraceEvent, ...], Meta(max_length=MAX_TRACE_EVENTS)
    ] = ()  # none: it knows nothing of the request


# --- recordings: client <-> controller, controller <-> node --------------------------------------------------


class RecordQuery(_Named, frozen=True, tag="record"):
    """A viewer's question for what a rank does, which its controller passes on: record for `lease_s` from now on, and
    say what is recorded from these numbers on. RecordReply answers it."""

    id: Count
    instance: Name
    dp_rank: DpRank
    lease_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    steps_from: Count = 0  # the number of a step
    work_from: Count = 0  # the number of a piece of work; ranks count them from 0


class RankStep(Message, frozen=True):
    """A forward step of a rank: the rows that decode in it, the prompt tokens that it computes, and the KV tokens of
    live requests while it runs. Times are microseconds, since 1970 by the rank's clock."""

    number: Count  # 1, 2, 3 ... in each epoch
    began_us: Count
    duration_us: Count
    decode_rows: Count
    prompt_tokens: Count
    kv_tokens: Count


class RankWork(Message, frozen=True):
    """A rank's work on one request: a `chunk` of its prompt that a step computes, or where steps are not said, its
    whole `prompt` since it came; a `fetch` of its KV cache from a prefill rank; a `read` of a part of it from a decode
    rank; or that it begins to `lend` or send its KV cache, which takes no time here.

    `tokens` of the prompt are concerned; of a chunk, `before` are computed before it and the prompt has
    `prompt_tokens`. The rank at the other end of a fetch or read is `instance/dp_rank`.
    """

    what: Word  # words may be added
    rid: Rid
    attempt: Attempt
    began_us: Count
    duration_us: Count
    tokens: Count
    before: Count = 0
    prompt_tokens: Count = 0
    instance: InstanceOrEmpty = ""
    dp_rank: DpRank = 0


class RecordReply(Message, frozen=True, tag="recorded"):
    """The answer to a RecordQuery: what the rank has recorded, in order. The controller adds what only it knows."""

    id: Count
    steps: Annotated[tuple[RankStep, ...], Meta(max_length=MAX_STEPS_PER_MESSAGE)] = ()
    work: Annotated[tuple[RankWork, ...], Meta(max_length=MAX_WORK_PER_MESSAGE)] = ()
    work_first: Count = 0  # the number of the first of `work`, or of the next one
    more: bool = False  # there was no space for all
    # from the controller on
    records: bool = True  # false: this rank's engine does not say what it does
    silent: bool = False  # the rank did not answer in time
    at_us: Count = 0  # when this was sent, microseconds since 1970 by the controller's clock
    offset_us: int = 0  # how far the rank's clock is ahead of the controller's,
    rtt_us: int = 0  # known to within half of this; -1: not known
    epoch: Count = 0  # the start of the rank that answered: each numbers its own
    no_steps: bool = False  # the rank's engine does not say its steps; its work is said, as far as it knows it


# --- client <-> controller (DEALER -> ROUTER) ----------------------------------------------------------------


class Submit(Message, frozen=True, tag="submit"):
    """Client to controller: a request. Frames: header, prompt (int32 little-endian token ids), params (`Params`). The
    controller reads the header.

    `routed_dp_rank` fixes this leg's rank (in a pair: the decode leg's). `disagg_prefill_dp_rank` fixes the prefill
    leg's rank in a pair, and gives a lone decode leg the rank of its prefill. `instance` and `prefill_instance` name
    instances where there are several. Without `model` the request gets the model that ready ranks serve; while they
    serve several, it fails with `no_rank`.
    """

    rid: Rid
    leg: Legs
    prompt_tokens: int
    max_tokens: Count
    bootstrap_room: int | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    instance: InstanceOrEmpty = ""
    prefill_instance: InstanceOrEmpty = ""
    model: Model = ""
    attempt: Attempt = 1
    offset: Count = 0
    deadline_s: Seconds = 0.0  # 0: none
    priority: Priority = 0
    block_tokens: Count = 0
    block_hashes: Annotated[bytes, Meta(max_length=1 << 19)] = b""  # 8 bytes a full prompt block
    needs: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()  # sampling parameters that its ranks must know
    continue_on_disconnect: bool = False  # run to the end even if the client is gone and the output is not read
    ttft_slo_s: Seconds = 0.0  # wanted time to the first token; 0: the controller's default
    tpot_slo_s: Seconds = 0.0  # wanted time per further token, on average; 0: the controller's default
    slo_class: Word = ""  # the name of the class from which these two come, where they are 0
    trace: TraceContext | None = None  # where it is traced
    asked_us: Count = 0  # when the caller asked, microseconds since 1970 by the client's clock. 0: unknown
    # (instance, dp_rank) of ranks whose streams do not reach the client: other ranks are preferred
    avoid: Annotated[tuple[tuple[InstanceOrEmpty, DpRank], ...], Meta(max_length=16)] = ()
    # for a single leg whose other leg is at another controller: the attempt with which the client submitted
    # both; each controller may count on from there. 0: unknown
    pair_attempt: Count = 0
    session: Session = ""  # what the requests of one conversation have in common; empty: not said


class Params(Message, frozen=True, tag="params"):
    """The engine's sampling parameters; opaque to the controller. Temperature 0 is greedy."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Count = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False
    # From here on not every rank knows them: a submit whose params set one names it in `needs`.
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    min_tokens: Count = 0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Meta(max_length=1024)] = ()
    json_schema: Grammar = ""
    regex: Grammar = ""
    ebnf: Grammar = ""
    logprobs: Annotated[
        int, Meta(ge=-1, le=20)
    ] = -1  # of each output token, and of this many most likely tokens; -1: none
    # Every rank may look at it, and none need know it, so it is not among `needs`.
    seed_drawn: bool = False  # the seed was drawn, not chosen: an engine for which a seed is costly may ignore it
    structural_tag: Grammar = ""
    choice: Annotated[tuple[Choice, ...], Meta(max_length=1024)] = ()  # the output is one of these texts
    bad_words: Annotated[
        tuple[BadWord, ...], Meta(max_length=1024)
    ] = ()  # the output has none of these tokens in a row
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=16384)] = ()  # the output has only these; (): all
    cache_salt: Salt = ""  # prompts share a KV cache only with those of the same salt
    reasoning_parser: ParserName = (
        ""  # with which a rank tells a model's reasoning from its answer, where grammars apply
    )
    reasoning_ended: bool | None = None  # the prompt ends behind the reasoning; None: the engine looks by itself
    reasoning_parser_kwargs: Annotated[str, Meta(max_length=4096)] = ""  # a JSON object; empty: none
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31)] = -1  # -1: none
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=20)] = -1  # as `logprobs`, of each prompt token but the first

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the parameters set here that not every rank knows, as `Submit.needs` must list them. Ranks know
        a reasoning parser by its name."""
        names = tuple(name for name, default in OPTIONAL_PARAMS if getattr(self, name) != default)
        return (*names, parser_word(self.reasoning_parser)) if self.reasoning_parser else names


def parser_word(name: str) -> str:
    """Return the word by which a rank says, and a submit needs, that it has the reasoning parser `name`."""
    return f"parser:{name}"


OPTIONAL_PARAMS: tuple[tuple[str, object], ...] = tuple(
    (name, default)
    for name, default in zip(Params.__struct_fields__, Params.__struct_defaults__, strict=True)
    if name not in Params.__struct_fields__[:6] and name not in ("seed_drawn", "reasoning_parser")
)  # with their defaults


class Accepted(Message, frozen=True, tag="accepted"):
    """Controller to client: the request was dispatched to these ranks (None: it has no such leg). The client attaches
    to `decode.endpoint` for its tokens. It is sent again for a new attempt."""

    rid: Rid
    attempt: Attempt
    bootstrap_room: Room | None
    prefill: Location | None
    decode: Location | None


class Failed(Message, frozen=True, tag="failed"):
    """Controller to client: the request has ended without its answer, or was not taken. `retryable`: the same request
    may succeed later, after `retry_after_s`."""

    rid: Annotated[str, Meta(max_length=128)]
    attempt: Count
    code: Code
    message: Sentence
    retryable: bool
    retry_after_s: Seconds = 0.0


class Done(Message, frozen=True, tag="done"):
    """Controller to client: the request has ended well. `legs` are those that ended with `ok`, so a lost prefill leg is
    not among them."""

    rid: Rid
    attempt: Attempt
    legs: Annotated[tuple[Ended, ...], Meta(max_length=2)]


class Cancel(Message, frozen=True, tag="cancel"):
    """Client to controller: end my request. It ends with `failed` and the code `cancelled`."""

    rid: Rid
    room: Room | None = None  # of its submit: a request with another room is another request. None: unknown


class StatusQuery(Message, frozen=True, tag="status"):
    """A question for a controller's status; one or several Status messages answer it."""

    id: Count
    events_from: Count | None = None  # the events from this number on are wanted too; None: none
    requests: bool = False  # the lists of requests are wanted too


class RankStatus(_NamedAt, frozen=True):
    """One rank in a controller's status. An estimate is the load that the controller believes: the last report and what
    it does not cover yet."""

    instance: Name
    dp_rank: DpRank
    role: Role
    model: Model
    state: RankState
    epoch: Epoch
    endpoint: Endpoint
    max_context: Count
    report_age_s: AgeSeconds  # -1: none yet
    load: Load | None
    in_flight_requests: Count  # sent and not acknowledged
    in_flight_tokens: Count
    estimate_requests: Count
    estimate_tokens: Count
    outstanding: Count  # dispatched by this controller and not ended
    dispatched_total: Count
    ended_total: Count
    failed_total: Count
    block_tokens: Count = 0  # of its KV blocks; what `Submit.block_hashes` must be made with to be of use there
    state_age_s: AgeSeconds = -1.0  # time in this state; -1: unknown
    epoch_age_s: AgeSeconds = -1.0  # since this start introduced itself; -1: unknown
    restarts: Count = 0  # starts of it that took the place of an earlier one since the controller began
    ttft_counts: LatencyCounts = ()  # since the controller began: time to first token,
    tpot_counts: LatencyCounts = ()  # and time per output token after the first
    metrics: HostPort = ""  # where those of its process are


class Scraped(Message, frozen=True):
    """A broker or controller that has metrics."""

    part: Word
    name: KeyName
    metrics: HostPort


class WantedRole(Message, frozen=True):
    """A role of a model (empty: of any) that should be served, and how many ranks are ready for it."""

    role: Role
    model: Model
    ready: Count
    declared: bool = False


class ControllerEvent(Message, frozen=True):
    """An event, as a controller saw it happen; `instance` is empty where it is of no rank alone."""

    number: Count  # 1, 2, 3 ... since the controller's epoch began
    at_us: Count  # microseconds since 1970, by the controller's clock
    what: Word  # words may be added
    instance: InstanceOrEmpty = ""
    dp_rank: DpRank = 0
    code: Word = ""  # why, for programs
    phrase: Phrase = ""  # why, for people
    bad: bool = False  # it is trouble


Events: TypeAlias = Annotated[tuple[ControllerEvent, ...], Meta(max_length=MAX_EVENTS)]


class QueuedKind(Message, frozen=True):
    """The number of waiting requests of one model, for ranks of these roles; `pinned`: for a rank that their caller
    chose."""

    model: Model  # empty: of any
    roles: Annotated[tuple[Role, ...], Meta(max_length=2)]
    requests: Count
    pinned: bool = False


class QueueStatus(Message, frozen=True):
    """The requests that wait in a controller's central queue."""

    requests: Count
    oldest_s: Seconds  # since the first of them came
    kinds: Annotated[tuple[QueuedKind, ...], Meta(max_length=MAX_QUEUED_KINDS)] = ()  # those with most
    # (priority, requests) of those with most, the highest priority first
    priorities: Annotated[tuple[tuple[Priority, Count], ...], Meta(max_length=MAX_QUEUED_KINDS)] = ()
    keys: Annotated[tuple[tuple[KeyName, Count], ...], Meta(max_length=10)] = ()  # those with most


class ListedRequest(Message, frozen=True):
    """A request in a list, as its controller knows it."""

    rid: Rid
    came_us: Count  # microseconds since 1970, by the controller's clock
    first_token_s: Seconds  # from then to its first token; 0: there is none yet, or it is not known
    model: Model
    prompt_tokens: Count
    attempt: Attempt
    ranks: Annotated[tuple[KeyName, ...], Meta(max_length=2)] = ()  # of its legs, prefill first: `prefill-0/1`
    late: bool = False  # its first token is later than its SLO wants it, or was


class RequestLists(Message, frozen=True):
    """The requests that people look for first; each list has its first MAX_LISTED alone."""

    # live and at ranks, the one that came first at the head
    running: Annotated[tuple[ListedRequest, ...], Meta(max_length=MAX_LISTED)] = ()
    # in the central queue, the same
    waiting: Annotated[tuple[ListedRequest, ...], Meta(max_length=MAX_LISTED)] = ()
    # to their first token, in the last 15 minutes, the slowest at the head
    slowest: Annotated[tuple[ListedRequest, ...], Meta(max_length=MAX_LISTED)] = ()


class Status(_OfController, frozen=True, tag="status_is"):
    """The answer to a StatusQuery, or a part of it (`remaining`): the controller, its counts by name, and its ranks."""

    id: Count
    controller: Name
    epoch: Epoch
    uptime_s: Seconds
    methods: dict[str, str]  # role -> load_balance_method in force
    counts: dict[str, int]
    ranks: Annotated[tuple[RankStatus, ...], Meta(max_length=MAX_DP_SIZE)]
    remaining: Count = 0  # ranks that further messages of this id bring
    uses_hashes: Annotated[tuple[Role, ...], Meta(max_length=3)] = ()  # roles whose methods use `Submit.block_hashes`
    scraped: Annotated[tuple[Scraped, ...], Meta(max_length=64)] = ()  # parts without ranks that have metrics
    wanted: Annotated[tuple[WantedRole, ...], Meta(max_length=MAX_WANTED)] = ()
    # of the last part alone; None: not asked for, not for this peer, or the controller is too old
    events: Events | None = None
    queue: QueueStatus | None = None
    total: Count = 0  # ranks in all parts of this answer; 0: not said
    requests: RequestLists | None = None  # as `events`
    # of requests that state none: the wanted time to the first token, and per further token; 0: there is none
    ttft_slo_s: Seconds = 0.0
    tpot_slo_s: Seconds = 0.0


class TraceQuery(Message, frozen=True, tag="trace"):
    """An operator's question for the history of a request."""

    id: Count
    rid: Rid


class PartTrace(Message, frozen=True):
    """The events of a request that one part remembers. `offset_us`: how far its clock is ahead of the controller's,
    known to within half of `rtt_us` (-1: unknown)."""

    part: KeyName
    events: Annotated[tuple[TraceEvent, ...], Meta(max_length=MAX_TRACE_EVENTS)]
    offset_us: int = 0
    rtt_us: int = 0


class TraceReply(_OfController, frozen=True, tag="trace_is"):
    """The answer to a trace query; `parts` is empty where no part remembers the request."""

    id: Count
    controller: Name
    parts: Annotated[tuple[PartTrace, ...], Meta(max_length=MAX_TRACE_PARTS)]
    silent: Annotated[tuple[KeyName, ...], Meta(max_length=256)] = ()  # ranks that did not answer, or the first of them
    kept: Count = 0  # requests that the controller remembers
    kept_s: Seconds = 0.0  # the time that they span
    rid: Annotated[str, Meta(max_length=128)] = ""  # the request of this trace; empty: the one that was asked for
    others: Annotated[
        tuple[Rid, ...], Meta(max_length=64)
    ] = ()  # other rids that begin with the one asked for, the newest first


class DrainRank(_Named, frozen=True, tag="drain_rank"):
    """An operator's order to drain one rank."""

    id: Count
    instance: Name
    dp_rank: DpRank


class DrainRole(Message, frozen=True, tag="drain_role"):
    """An operator's order to drain a role's ranks, of one model or of all (empty), and not to expect them back."""

    id: Count
    role: Role
    model: Model = ""


# --- data plane: client -> node (token streams), node -> node (KV cache), all on the node's ROUTER --------------


class Attach(Message, frozen=True, tag="attach"):
    """Client to rank: send me the tokens of `rid` from index `have` on. It is repeated to ask again."""

    rid: Rid
    attempt: Attempt
    have: Count = 0
    several: bool = False  # `Tokens.others` are read too
    room: Room | None = None  # of the submit whose tokens are wanted, under a rid that may be another's too


class TokenLogprobs(Message, frozen=True):
    """The model's own probability of an output token, as a natural logarithm: before temperature, penalties and
    cuts."""

    logprob: LogProb  # of the token
    top: Annotated[tuple[tuple[TokenId, LogProb], ...], Meta(max_length=20)] = ()  # the likeliest there, first first
    rank: Count = 0  # of the token among all of the vocabulary, the likeliest is 1; 0: not said


class MoreTokens(Message, frozen=True):
    """Tokens of another request, with the same fields as `Tokens`."""

    rid: Rid
    attempt: Attempt
    start: Count
    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS_PER_MESSAGE)]

    def alone(self) -> Tokens:
        """Return these tokens as a Tokens message of their own."""
        return Tokens(self.rid, self.attempt, self.start, self.ids)


class Tokens(Message, frozen=True, tag="tokens"):
    """Rank to client: output tokens `start`, `start`+1, ...; empty as a sign of life. `finish` closes the stream."""

    rid: Rid
    attempt: Attempt
    start: Count
    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS_PER_MESSAGE)]
    finish: FinishReason = ""
    code: Code = "ok"
    message: Sentence = ""
    found_by: FoundBy = ""
    # with the first tokens and with `finish`: how much of the prompt came from the prefix cache
    cached_tokens: Count = 0
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Meta(max_length=MAX_LOGPROBS_PER_MESSAGE)
    ] = ()  # if asked for, one each
    others: Annotated[
        tuple[MoreTokens, ...], Meta(max_length=MAX_OTHERS_PER_MESSAGE)
    ] = ()  # where the reader's `attach` of each says `several`
    # if asked for, one for each prompt token from the second on, with the first output tokens
    prompt_logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_LOGPROBS_PER_MESSAGE)] = ()
    written_tokens: Count = 0  # as `cached_tokens`: how much of the prompt was computed and written to the prefix cache


class Detach(Message, frozen=True, tag="detach"):
    """Client to rank: I have all I want of `rid`; forget its output."""

    rid: Rid
    attempt: Attempt


class KvPull(Message, frozen=True, tag="kv_pull"):
    """Decode rank to prefill rank: send meta (when `first` is 0) and blocks `first` .. `first`+`count`-1 of `room` as
    they become ready. Prefill rank to decode rank: the same of what that caches of the room's prompt."""

    room: Room
    attempt: Attempt
    epoch: Epoch  # the asked node's, as located: fences a restarted node
    first: Count
    count: Annotated[int, Meta(ge=0, le=1024)]
    asked: Count = 0  # 1, 2, 3 ... of this leg's pulls that ask for no block; 0: not counted
    client: KeyName = ""  # of its leg's dispatch; empty: no keys, a Dispatcher's, or not said


class KvMeta(Message, frozen=True, tag="kv_meta"):
    """Prefill rank to decode rank: the description of a KV cache; one frame follows, the engine's own handle, where KV
    caches do not travel as blocks."""

    room: Room
    attempt: Attempt
    prompt_tokens: Count
    first_token: TokenId
    blocks: Count
    block_tokens: Count
    layout: Layout  # must equal the receiver's own
    ready: bool = True  # false: a sign of life while the prompt is still being computed; the rest says nothing yet
    valid_s: Seconds = (
        0.0  # how long the KV cache is still kept, whether it is pulled or not; 0: as long as it is pulled
    )
    asked: Count = 0  # of the receiver's last pull that had come when this was sent: it is no older than that pull
    cached_tokens: Count = 0  # how much of the prompt came from the prefix cache
    first_logprobs: TokenLogprobs | None = None  # of `first_token`, if they were asked for and decode streams it
    client: KeyName = ""  # as in `kv_pull`
    written_tokens: Count = 0  # how much of the prompt was computed and written to the prefix cache


class KvBlock(Message, frozen=True, tag="kv_block"):
    """Prefill rank to decode rank: one KV block; one raw frame follows. `crc32` covers `room`, `attempt`, `index` and
    the bytes (see docs/protocol.md)."""

    room: Room
    attempt: Attempt
    index: Count
    tokens: Count
    crc32: Annotated[int, Meta(ge=0, lt=2**32)]
    client: KeyName = ""  # as in `kv_pull`


class KvDone(Message, frozen=True, tag="kv_done"):
    """Decode rank to prefill rank: the KV cache of `room` is fetched (`ok`), or not wanted any more; free it."""

    room: Room
    attempt: Attempt
    code: Code = "ok"
    client: KeyName = ""  # as in `kv_pull`


class KvFail(Message, frozen=True, tag="kv_fail"):
    """Prefill rank to decode rank: the KV cache of `room` will not come; `code` and `message` say why."""

    room: Room
    attempt: Attempt
    code: Code
    message: Sentence = ""
    client: KeyName = ""  # as in `kv_pull`


# --- one table of messages per socket, so that a port accepts no others --------------------------------------


class Table(dict[str, type[Message]]):
    """The messages that may come over a socket, by tag. `read` decodes and checks the bytes of any of them
    (`bus.wire.codec`)."""

    __slots__ = ("read",)
    read: Callable[[bytes], Message]


def _table(*kinds: type[Message]) -> Table:
    return Table({str(kind.__struct_config__.tag): kind for kind in kinds})


PUBLICATIONS = _table(LoadReport, Rooms, Member, Sent, Beacon, Resync, Conflict)
TO_BROKER = _table(Query, Unwatch, TopologyQuery, BrokerStatusQuery)
FROM_BROKER = _table(Answer, Topology, BrokerStatus, Refused)
NODE_TO_CONTROLLER = _table(Hello, Pong, Progress, Bye, HistoryReply, RecordReply)
CONTROLLER_TO_NODE = _table(Welcome, Who, Ping, Dispatch, CancelLeg, Drain, HistoryQuery, RecordQuery, Refused)
CLIENT_TO_CONTROLLER = _table(Submit, Cancel, StatusQuery, DrainRank, TraceQuery, DrainRole, RecordQuery)
CONTROLLER_TO_CLIENT = _table(Accepted, Failed, Done, Status, TraceReply, RecordReply, Refused)
TO_NODE_DATA = _table(Attach, Detach, KvPull, KvDone)
FROM_NODE_DATA = _table(Tokens, KvMeta, KvBlock, KvFail, Refused)
PARAMS = _table(Params)
TABLES = (
    PUBLICATIONS, TO_BROKER, FROM_BROKER, NODE_TO_CONTROLLER, CONTROLLER_TO_NODE, CLIENT_TO_CONTROLLER,
    CONTROLLER_TO_CLIENT, TO_NODE_DATA, FROM_NODE_DATA, PARAMS,
)  # fmt: skip
