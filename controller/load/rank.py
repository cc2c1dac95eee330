"""The load of one rank (one start of it): facts, last report, counters, estimate. It decides nothing.

`controller.load.table` changes its numbers, except `routed_total`, which belongs to `controller.balancer`. What else is
kept of a rank is in `controller.rank`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from bus.wire.messages import Hello, Load, Location, MemberKey

if TYPE_CHECKING:
    from controller.load.index import LeastIndex, SlotKeys

UNLIMITED = 1 << 62


class RankLoad:
    """The load of `(instance, dp_rank)` in its epoch `epoch`, as the controller knows it. Requests and tokens are
    counts.

    A policy reads `key` (instance, dp_rank), `info` (its hello), `slot` (its number among the present ranks, used again
    once it is gone) and `counts_queue_only` (true: the tokens are those that wait for prefill); `requests` and `tokens`
    (the estimate); `load`, `reported_at` and `stale` (the last report, None before the first; when it came; true if it
    is too old to be believed); `outstanding` and `outstanding_tokens` (the legs of this controller that have not
    ended); `ready`, `candidate` (ready, and with credit) and `last_turn` (the number of its last dispatch, for ties).
    It changes none of them. All other fields belong to the controller and may change.
    """

    __slots__ = (
        "acked",
        "acked_tokens",
        "base_idle",
        "base_requests",
        "base_tokens",
        "candidate",
        "counts_fetches",
        "counts_queue_only",
        "dispatched_before",
        "epoch",
        "failed_total",
        "fetches",
        "fetching_tokens",
        "hard_requests",
        "held_tokens",
        "idle_tokens",
        "info",
        "interval_s",
        "key",
        "kv_kind",
        "largest",
        "last_turn",
        "leaves",
        "limit_requests",
        "limit_tokens",
        "load",
        "load_from_engine",
        "location",
        "newly_acked",
        "newly_acked_tokens",
        "other_acks",
        "others",
        "others_requests",
        "others_tokens",
        "outstanding",
        "outstanding_fetches",
        "outstanding_tokens",
        "params",
        "ready",
        "rebase",
        "reported_at",
        "requests",
        "restarts",
        "routed_total",
        "sent",
        "sent_tokens",
        "skew",
        "skew_tokens",
        "slot",
        "slow",
        "stale",
        "tokens",
        "undone",
        "was_candidate",
    )

    def __init__(self, info: Hello) -> None:
        self.info = info
        self.key: MemberKey = (info.instance, info.dp_rank)
        self.slot = -1  # its number among the ranks there are, as small as can be; used again when it is closed
        self.epoch = info.epoch
        self.kv_kind = (info.kv_transfer, info.kv_layout)
        self.params = frozenset(info.params)
        self.location = Location(info.instance, info.dp_rank, info.epoch, info.endpoint)
        # the last report, and when it came (None: none of this epoch yet)
        self.load: Load | None = None
        self.reported_at: float | None = None
        self.stale = True
        self.load_from_engine = False  # it was not published by the rank, but read from its engine
        self.interval_s = 0.0  # it declares to report at least this often; 0: it has not said
        self.counts_queue_only = info.role == "prefill"  # its KV tokens cost no time
        self.counts_fetches = False  # of a decode rank: nor do those that it is to fetch
        self.held_tokens = 0  # that the estimate of a unified or decode rank leaves out: its credit counts them
        self.idle_tokens = 0  # of `tokens`, those that such a decode rank holds or is to fetch: no step computes them
        self.base_idle = 0
        self.base_requests = 0
        self.base_tokens = 0
        # what I sent in this epoch, what the report says was ingested, and what is outstanding (not ended)
        self.sent = 0
        self.sent_tokens = 0
        self.undone = 0  # dispatches numbered, of which nothing was sent
        # of those in flight, the ones that will only fetch: how many were sent with each, and its tokens
        self.fetches: deque[tuple[int, int]] = deque()
        self.fetching_tokens = 0  # of all of these
        self.acked = 0
        self.acked_tokens = 0
        self.newly_acked = 0  # of `acked`, what the last report acknowledged first
        self.newly_acked_tokens = 0
        self.skew = 0  # acknowledged minus sent where the two were found apart (lost connection, nonsense)
        self.skew_tokens = 0
        self.rebase = False
        self.outstanding = 0
        self.outstanding_tokens = 0
        self.outstanding_fetches = 0  # of these tokens, those of legs that only fetch
        # other controllers: sent and acknowledged, by controller epoch, and what is in flight of theirs in all
        self.others: dict[int, tuple[int, int]] = {}
        self.other_acks: dict[int, tuple[int, int]] = {}
        self.others_requests = 0
        self.others_tokens = 0
        # the estimate, and what follows from it
        self.requests = 0
        self.tokens = 0
        self.ready = False  # health says that it may be dispatched to
        self.slow = False  # just back: one at a time until it reports
        self.candidate = False  # ready and with credit: a candidate
        self.was_candidate = False  # before the last report
        self.limit_requests = UNLIMITED
        self.limit_tokens = UNLIMITED
        self.hard_requests = UNLIMITED
        self.largest = UNLIMITED  # tokens of context (prompt and output) it can hold at all
        self.last_turn = 0  # turn of its last dispatch
        self.leaves: list[tuple[LeastIndex | SlotKeys, int, int]] = []  # its keys: (index, leaf there, Metric)
        # totals since the controller began, over all epochs of the rank
        self.dispatched_before = 0  # in earlier epochs
        self.routed_total = 0
        self.failed_total = 0
        self.restarts = 0  # starts of it that came after another one known here

    @property
    def in_flight(self) -> int:
        """The number of my dispatches that the last report did not acknowledge."""
        return self.sent - self.acked

    @property
    def in_flight_tokens(self) -> int:
        """The tokens of these dispatches."""
        return self.sent_tokens - self.acked_tokens

    @property
    def dispatched_total(self) -> int:
        """All dispatches since the controller began, in all epochs of the rank, also those that were not sent: a
        total does not fall."""
        return self.dispatched_before + self.sent + self.undone

    @property
    def ended_total(self) -> int:
        """The dispatches among them that ended or were never sent; those of an earlier epoch ended with it."""
        return self.dispatched_total - self.outstanding

    @property
    def full(self) -> bool:
        """True if even requests that only this rank can run are refused: its queue has reached a hard limit."""
        return self.requests >= self.hard_requests

    def __repr__(self) -> str:
        return f"<rank {self.key[0]}/{self.key[1]} epoch {self.epoch} requests {self.requests} tokens {self.tokens}>"
