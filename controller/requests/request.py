"""Requests and their legs (a leg is one rank's share: prefill, decode, or unified: both): records, the tables that
decide their states, and the checks of a submit. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from math import inf
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from bus.rights import key_of, submits
from bus.tracecontext import trace_id_of
from bus.wire.codes import MEANINGS, Code, Refusal
from bus.wire.messages import MAX_ATTEMPT, MAX_DP_SIZE, MAX_ROOM, Attempt, Ended, Legs, Rid, Role, Submit
from controller.load.rank import RankLoad
from controller.requests.lanes import Lane

ROLES: dict[Legs, tuple[Role, ...]] = {
    "pair": ("prefill", "decode"),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "unified": ("unified",),
}

EventTuple: TypeAlias = tuple[float, str, Attempt, Role | None, str]  # as `TraceEvent`


class State(Enum):
    """The state of a request at the controller."""

    QUEUED = "queued"  # waits for credit
    RUNNING = "running"  # its legs are dispatched; the client has nothing of this attempt
    STREAMING = "streaming"  # the client may have output of this attempt, so no other can take its place
    ENDED = "ended"  # answered, forgotten

    __hash__ = object.__hash__  # Enum's own takes a call in Python; one object a state is all that counts


class LegState(Enum):
    """The state of a leg: at its rank, or over in one of two ways."""

    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"  # it failed, its rank is lost, or the request needs it no more

    __hash__ = object.__hash__


NEXT: dict[tuple[State, Literal["dispatched", "output", "again", "over"]], State] = {
    (State.QUEUED, "dispatched"): State.RUNNING,
    (State.QUEUED, "over"): State.ENDED,
    (State.RUNNING, "output"): State.STREAMING,
    (State.RUNNING, "again"): State.QUEUED,
    (State.RUNNING, "over"): State.ENDED,
    (State.STREAMING, "output"): State.STREAMING,
    (State.STREAMING, "over"): State.ENDED,
}
LEG_NEXT: dict[tuple[LegState, Literal["done", "given up"]], LegState] = {
    (LegState.RUNNING, "done"): LegState.DONE,
    (LegState.RUNNING, "given up"): LegState.GIVEN_UP,
}


class LegRun:
    """One leg of one attempt (try) at one rank (one start of it)."""

    __slots__ = ("answers", "began", "charge", "ended", "first_at", "number", "rank", "read", "role", "state")

    def __init__(self, role: Role, rank: RankLoad, charge: int, number: int, began: float, answers: bool) -> None:
        self.role: Role = role
        self.rank = rank
        self.charge = charge  # tokens
        self.number = number  # of its dispatch, at its rank
        self.began = began  # dispatched at
        self.answers = answers  # its output is what the client waits for
        self.read = 0  # prefill: tokens of the prompt that it reads from the decode leg's rank
        self.first_at = inf  # its first output was reported at
        self.state = LegState.RUNNING
        self.ended: Ended | None = None  # what the node said of a leg that is done

    def step(self, what: Literal["done", "given up"]) -> None:
        """Change the state according to the table; an illegal step is our bug, and the error has the leg's story."""
        try:
            self.state = LEG_NEXT[self.state, what]
        except KeyError:
            raise AssertionError(f"{self.role} leg at {self.rank} is {self.state.value}: cannot be {what}") from None


class Request:
    """One accepted request (from `request_of`). `client` is its key, or empty where there are none."""

    __slots__ = (
        "apart", "arrived", "aside", "attempt", "avoid", "came_at", "client", "deadline_at", "dispatched", "first_due",
        "frames", "frames_bytes", "lane", "legs", "losses", "lost_at",
        "lost_with", "model", "order", "past", "peer", "places",
        "predicted_s", "rid", "state", "submit", "trace", "tries", "work",
    )  # fmt: skip
    arrived: int  # where it waits (`lane`): its number among those that came to
    aside: bool  # it waits only for its own wish, so others may go before it

    def __init__(
        self, peer: Any, client: str, submit: Submit, frames: tuple[Any, ...], frames_bytes: int,
        places: tuple[tuple[str, int, Role], ...], deadline_at: float | None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.client = client
        self.rid: Rid = submit.rid
        self.submit = submit
        self.frames = frames  # its payload, kept until the legs that need it have started
        self.frames_bytes = frames_bytes
        self.places = places  # what it claims of its client's room: the legs of one room are one pair
        self.attempt = submit.attempt
        self.model = submit.model  # of all its attempts; where the submit names none, settled when it is first placed
        self.deadline_at = deadline_at
        self.state = State.QUEUED
        self.legs: tuple[LegRun, ...] = ()
        self.tries = 0  # dispatches, but for those that never left
        self.dispatched = False  # ever
        self.losses = 0  # of those, ended by the loss of a rank, but for all after the first of one process
        self.lost_with: tuple[Hashable, ...] = ()  # these processes
        self.lost_at = 0  # the attempt that ended so last; 0: the last loss is none of these
        self.apart = False  # one more loss makes it poison: it goes nowhere beside another such
        self.avoid: tuple[RankLoad, ...] = ()  # ranks that failed it, or whose streams its client does not get
        self.lane: Lane | None = None  # where it waits
        self.work = 0  # prompt tokens to compute, as far as was known when it began to wait
        self.order = 0  # its policy's number then
        self.came_at = inf  # to this controller; inf: to an earlier start of it, under which it runs already
        self.first_due = inf  # when its first token is to be there, where that counts
        self.predicted_s = 0.0  # until its first token, for the trip that it makes; 0: unknown
        self.past: tuple[EventTuple, ...] = ()  # waits, and attempts before this one
        self.trace = submit.trace  # the trace context for its legs

    def step(self, what: Literal["dispatched", "output", "again", "over"]) -> None:
        """Change the state according to the table; an illegal step is our bug, and the error has the request's
        story."""
        try:
            self.state = NEXT[self.state, what]
        except KeyError:
            legs = [(leg.role, leg.rank.key, leg.state.value) for leg in self.legs]
            what_is = f"{self.rid} is {self.state.value}: cannot be {what}; attempt {self.attempt}, tries {self.tries}"
            raise AssertionError(f"{what_is}, legs {legs}") from None


def blames(request: Request, process: Hashable) -> bool:
    """Note that `process` has died with the request; return whether that is new. A process dies once, also where the
    request was sent to several of its ranks before the controller knew of its death."""
    new = process not in request.lost_with
    if new:
        request.lost_with += (process,)
    return new


def about_of(request: Request) -> dict[str, Any]:
    """Return the fields of each log line about a request: rid, attempt and room, the ranks of its legs by role, and
    its trace if it has one."""
    ranks = {leg.role: f"{leg.rank.key[0]}/{leg.rank.key[1]}" for leg in request.legs}
    about = {"rid": request.rid, "attempt": request.attempt, "room": request.submit.bootstrap_room} | ranks
    return about if request.trace is None else about | {"trace_id": trace_id_of(request.trace)}


def request_of(peer: Any, submit: Submit, frames: Sequence[Any], now: float) -> Request:
    """Return the request that `peer` makes with `submit` and its payload (`frames`: prompt, params); it is not added
    anywhere. Raises Refusal if it is invalid by itself."""
    if submit.prompt_tokens < 1:
        raise Refusal("empty_prompt", f"a prompt has at least 1 token, not {submit.prompt_tokens}")
    if submit.offset >= submit.prompt_tokens:
        why = f"{submit.offset} output tokens leave nothing of {submit.prompt_tokens} for the prompt that they follow"
        raise Refusal("bad_request", why)
    if submit.max_tokens < 1:
        raise Refusal("bad_request", "max_tokens must be at least 1")
    if len(frames) != 2:
        raise Refusal("bad_request", f"a submit has 2 payload frames (prompt, params), not {len(frames)}")
    size = len(frames[0])
    if size != 4 * submit.prompt_tokens:
        raise Refusal("bad_request", f"{size} bytes of prompt are not {submit.prompt_tokens} tokens of 4 bytes")
    if len(submit.block_hashes) * (submit.block_tokens or 1) > 8 * submit.prompt_tokens:
        raise Refusal("bad_request", "there are more block_hashes than full blocks in the prompt")
    room = submit.bootstrap_room
    places: tuple[tuple[str, int, Role], ...] = ()
    client = key_of(peer)
    if room is not None and not 0 <= room <= MAX_ROOM:
        raise Refusal("bad_room", f"bootstrap_room {room} is outside 0..2^63-1")
    if submit.leg != "unified":
        if room is None:
            raise Refusal("bad_room", f"a {submit.leg} request needs a bootstrap_room")
        places = tuple([(client, room, role) for role in ROLES[submit.leg]])
    if client:
        if not submits(client):
            raise Refusal("bad_identity", "a viewer's key submits no requests")
        if submit.session:  # so that no policy takes two clients' sessions of one name for one
            submit = replace(submit, session=f"{client}/{submit.session}")
    chosen = submit.disagg_prefill_dp_rank
    if chosen is not None and not 0 <= chosen < MAX_DP_SIZE:
        raise Refusal("bad_rank", f"disagg_prefill_dp_rank {chosen} is outside 0..{MAX_DP_SIZE - 1}")
    request = Request(
        peer,
        client,
        submit,
        tuple(frames),
        size + len(frames[1]),
        places,
        now + submit.deadline_s if submit.deadline_s else None,
    )
    request.came_at = now
    return request


def same_request(a: Submit, b: Submit) -> bool:
    """Return true if two submits under one rid ask for the same thing, so that one repeats the other. A resumed one
    differs in its offset and in what it may still produce."""
    return (a.leg, a.bootstrap_room, a.model, a.instance, a.prefill_instance, a.routed_dp_rank, a.needs) == (
        b.leg, b.bootstrap_room, b.model, b.instance, b.prefill_instance, b.routed_dp_rank, b.needs
    ) and (a.prompt_tokens - a.offset, a.max_tokens + a.offset) == (
        b.prompt_tokens - b.offset, b.max_tokens + b.offset
    )  # fmt: skip


def is_spare(leg: LegRun, request: Request) -> bool:
    """Return true if `request` does not need `leg` any more: once decode has its first token, only decode's own end
    decides."""
    return request.state is State.STREAMING and not leg.answers


def had_output(request: Request) -> bool:
    """Return true if the current attempt of the request has had output."""
    return any(leg.answers and leg.first_at != inf for leg in request.legs)


def verdict(request: Request, code: Code, attempts: int, unclear: int = 0) -> Literal["again", "fail", "poison"]:
    """Decide about a request that may be tried `attempts` times and of which a leg failed with `code`: dispatch it
    again, fail it, or fail it as poison (it seems to kill its ranks). `unclear`: ranks that may have died with it
    besides those that have; if they had, it should run nowhere."""
    if not MEANINGS[code].controller or request.state is State.STREAMING or request.attempt >= MAX_ATTEMPT:
        return "fail"
    if code == "unknown_room" and request.submit.leg == "decode":
        return "fail"  # the client alone can have its prefill leg run again
    if request.losses >= attempts:
        return "poison"
    if request.losses + unclear >= attempts:
        return "fail"
    if request.tries < attempts:
        return "again"
    return "poison" if request.losses >= request.tries > 1 else "fail"
