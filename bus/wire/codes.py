"""Every failure code and its meaning: which part tries again, at which level it is logged, and its HTTP status.

This module owns that meaning: one row a code, and no other module may keep a set of codes of its own
(`tests/unit/test_codes.py` looks for them). `docs/protocol.md` (section 14) and `docs/failures.md` have the same rows.
A leg is the prefill or the decode half of a request. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# Why a request, a leg or a message was turned down; the sentence beside it is for people, this is for programs.
Code: TypeAlias = Literal[
    "ok",
    "bad_request",  # malformed or self-contradictory header
    "bad_room",  # bootstrap_room missing or out of range
    "duplicate_room",  # the room belongs to another live request
    "duplicate_rid",  # the rid belongs to another live request
    "empty_prompt",
    "too_long",  # longer than the context or than any rank's KV capacity
    "bad_rank",  # the caller's rank or instance does not exist
    "rank_unavailable",  # the caller's rank exists but is dead or draining
    "no_rank",  # no live rank can take this leg now
    "overloaded",
    "deadline",
    "cancelled",
    "peer_lost",  # the process that ran it is gone
    "unknown_room",  # the room was not registered in time
    "kv_failed",  # the KV cache could not be fetched intact
    "prefill_failed",  # the other leg ended first
    "decode_failed",
    "engine_failed",
    "poison",  # it took down every rank it was given to
    "fenced",  # a newer attempt, or a later start of the rank, exists, or its output was not read
    "draining",
    "shutting_down",
    "bad_version",
    "bad_message",
    "too_many",  # a per-peer limit
    "bad_identity",  # the peer speaks for a rank it has not claimed
]
Leg: TypeAlias = Literal["prefill", "decode"]


class Refusal(Exception):
    """A request, or a leg of it, is turned down: `code` for programs, `sentence` for people. The check that refuses
    raises it; the part that took the message in answers with it."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code: Code = code
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a code to each part.

    - `client`: the part that sends the same request again. `library`: the client library does, up to its `retries`;
      after that the caller may. `caller`: it may succeed later, and only the caller knows when. `none`: it fails again.
    - `controller`: another attempt at other ranks may mend it, as long as the client has seen no token of this one.
    - `severity`: the level of the controller's `request.failed`. `warning`: a part of the cluster is broken; `info`:
      the cluster is busy or has no rank; `debug`: a client's mistake or choice, which could fill the log.
    - `status`: the HTTP status at an edge.
    - `hint_s`: seconds after which a new try may be worth it, where a controller has no better estimate; 0: no hint.
    - `rank_may_return`: a request refused with it waits while a controller expects ranks back at any moment.
    - `needs_all_ranks`: it is final only at a controller that knows all its ranks; one that has just begun says
      `no_rank` instead.
    - `kept_by`: the legs that end with this very code when the other leg did; the others end with `leg_failed`.
    """

    client: Literal["library", "caller", "none"]
    controller: bool
    severity: Literal["warning", "info", "debug"]
    status: int
    hint_s: float = 0.0
    rank_may_return: bool = False
    needs_all_ranks: bool = False
    kept_by: tuple[Leg, ...] = ()


MEANINGS: dict[Code, Meaning] = {
    "ok": Meaning("none", False, "debug", 200),
    "bad_request": Meaning("none", False, "debug", 400, needs_all_ranks=True),
    "bad_room": Meaning("none", False, "debug", 400),
    "duplicate_room": Meaning("none", False, "debug", 409),
    "duplicate_rid": Meaning("none", False, "debug", 409),
    "empty_prompt": Meaning("none", False, "debug", 400),
    "too_long": Meaning("none", False, "debug", 400, needs_all_ranks=True),
    "bad_rank": Meaning("none", False, "debug", 400, needs_all_ranks=True),
    # The library leaves `rank_unavailable` to a caller that chose the rank itself.
    "rank_unavailable": Meaning("library", True, "info", 503, hint_s=0.5, rank_may_return=True),
    "no_rank": Meaning("library", True, "info", 503, hint_s=0.5, rank_may_return=True),
    "overloaded": Meaning("library", True, "info", 429),  # its hint is how fast requests end
    "deadline": Meaning("none", False, "info", 504, kept_by=("prefill", "decode")),
    # A decode leg may find the end of a prefill leg that its client gave up for another attempt, at another controller.
    "cancelled": Meaning("none", False, "debug", 410, kept_by=("prefill",)),
    "peer_lost": Meaning("library", True, "warning", 503, hint_s=0.5),
    "unknown_room": Meaning("library", True, "warning", 503, kept_by=("decode",)),
    "kv_failed": Meaning("library", True, "warning", 503, kept_by=("decode",)),
    "prefill_failed": Meaning("library", True, "warning", 503),
    "decode_failed": Meaning("library", True, "warning", 503),
    # A client gets `engine_failed` after as many ranks failed it as a controller tries: one more would fail too.
    "engine_failed": Meaning("none", True, "warning", 500),
    "poison": Meaning("none", False, "warning", 500),
    # `fenced` ends one run of a request, which may go on elsewhere; it says nothing against another try.
    "fenced": Meaning("library", True, "debug", 503, kept_by=("prefill",)),
    "draining": Meaning("library", True, "info", 503),
    "shutting_down": Meaning("library", True, "info", 503),
    "bad_version": Meaning("none", False, "debug", 500),
    "bad_message": Meaning("none", False, "debug", 400),  # a token id that the model has not
    "too_many": Meaning("caller", False, "debug", 429),
    "bad_identity": Meaning("none", False, "debug", 500),
}
REFUSED_AS: dict[str, Code] = {"version": "bad_version", "not_yours": "bad_identity"}  # by reason; else `bad_message`
LEG_FAILED: dict[str, Code] = {"prefill": "prefill_failed", "decode": "decode_failed", "unified": "decode_failed"}


def is_retryable(code: Code) -> bool:
    """Return true if the same request may succeed later: `retryable` of `failed` and of a client's `Result`."""
    return MEANINGS[code].client != "none"


def client_retries(code: Code) -> bool:
    """Return true if the client library itself submits a request again that failed with `code`."""
    return MEANINGS[code].client == "library"


def end_of_other(leg: Leg, code: Code) -> Code:
    """Return the code that `leg` ends with because the other leg of its pair ended with `code`."""
    if leg in MEANINGS[code].kept_by:
        return code
    return LEG_FAILED["decode" if leg == "prefill" else "prefill"]


def refusal_of(reason: str) -> Code:
    """Return the code that answers a message which was dropped for `reason` (see `bus.errors.REASONS`)."""
    return REFUSED_AS.get(reason, "bad_message")


def status_of(code: str) -> int:
    """Return the HTTP status of a request that failed with `code`; 500 for a code that this version does not know."""
    return next((meaning.status for known, meaning in MEANINGS.items() if known == code), 500)
