"""A rank (one copy of the model, at a node; here one start of it) as the controller knows it: its load, its connection,
and what runs there.

`controller.members` owns the connection, `controller.requests` what runs there, `controller.observe` the latencies, and
`controller.feeds.nodes` the follower. Policies see only the load. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

from bus.histogram import Histogram
from bus.wire.messages import Attempt, CancelLeg, Hello, Rid
from controller.events import ToNode
from controller.feeds.follower import Follower
from controller.load.rank import RankLoad
from controller.requests.request import LegRun, Request

MAX_EXPLAINED = 64  # decisions that wait for a report; further ones are explained without it
MAX_CANCELLED = 1024  # cancels of one rank that are remembered
Work: TypeAlias = dict[Rid, tuple[Request, LegRun]]


class Asked(NamedTuple):
    """A ping on its way, and the rank's pulse before it: no message of the rank overtakes its answer."""

    n: int
    load_seq: int
    step: int
    at: float


class Clock:
    """The offset of a rank's clock (since 1970) from the controller's own, which never steps. As in NTP: the rank
    read its clock half way between a ping and its pong, and the shortest of the last round trips gives the best
    value."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=8)

    def add(self, sent_at: float, now: float, at_us: int) -> None:
        """Add a round trip: a ping sent at `sent_at`, answered at `now` (the controller's seconds), with the rank's
        clock `at_us` (microseconds since 1970)."""
        self._samples.append((now - sent_at, at_us / 1e6 - (sent_at + now) / 2))

    @property
    def best(self) -> tuple[float, float] | None:
        """The shortest round trip, and the rank's clock minus the controller's, in seconds; None: unknown."""
        return min(self._samples) if self._samples else None


class Latencies:
    """The latencies of the requests at one rank, over all its starts, for display only: no decision uses them.

    `ttft`: at a prefill rank from a leg's arrival to its first token, as the rank reports it; elsewhere from the
    submit's arrival here to the report of the first output. `tpot`: per token after the first, of each leg that
    ended well. `acked`: from a moment until everything sent by then was acknowledged (`controller.observe.probe`).
    """

    __slots__ = ("acked", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.tpot = Histogram()
        self.acked = Histogram()


class Rank:
    """The rank that said `hello` over the connection `peer`. `load` is what the balancer knows of it; `earlier` is the
    start that this one replaces."""

    __slots__ = (
        "asked",
        "cancelled",
        "clock",
        "dead",
        "epoch",
        "explained",
        "follower",
        "given_up",
        "inherited",
        "key",
        "latencies",
        "load",
        "peer",
        "probe",
        "returns",
        "work",
    )

    def __init__(self, hello: Hello, load: RankLoad, peer: Any, earlier: Rank | None = None) -> None:
        self.key = load.key
        self.epoch = load.epoch
        self.load = load
        self.peer = peer
        self.asked: Asked | None = None  # the last ping, until it is answered
        self.cancelled: OrderedDict[tuple[Rid, Attempt], CancelLeg] = OrderedDict()  # the oldest first
        self.given_up: OrderedDict[tuple[Rid, Attempt], int] = OrderedDict()  # until it says their ends; with offsets
        self.clock = Clock()
        self.dead = False  # what ran there has been blamed for its death
        self.returns = 0  # from such a death, which was none, though it may have been down for long
        self.work: Work = {}  # the legs that run there for this controller
        self.explained: list[tuple[Request, LegRun]] = []  # of these: explained, and not acknowledged yet
        # what it ran before I had dispatched anything to it, until it is taken over; of a start that was known here
        # before, what it runs may be mine
        reopened = load.sent or load.undone
        self.inherited: tuple[tuple[Rid, Attempt], ...] = () if reopened else hello.running
        self.latencies: Latencies = Latencies() if earlier is None else earlier.latencies
        self.probe: tuple[int, float] | None = None  # of acknowledgements: (`RankLoad.sent`, when)
        self.follower: Follower | None = None  # of its KV events, from the first on

    def __repr__(self) -> str:
        return repr(self.load)

    @property
    def process(self) -> Hashable:
        """The start of the process that has this rank: all its ranks die one death. Where a node does not say when it
        began, each rank is taken for a process."""
        info = self.load.info
        return (info.endpoint, info.started_us, self.returns) if info.started_us else (self, self.returns)

    def lives(self) -> None:
        """Note that it was heard: if it was taken for dead, its next death is another one."""
        if self.dead:
            self.dead, self.returns = False, self.returns + 1

    def explain(self, request: Request, leg: LegRun) -> None:
        """Note that the decision for this leg is to be explained further by the report that acknowledges it."""
        if len(self.explained) < MAX_EXPLAINED:
            self.explained.append((request, leg))

    def gives_up(self, request: Request) -> None:
        """Note that the rank has a leg of `request` that ends here at once: until it says that end, it may die of
        it."""
        self.given_up[request.rid, request.attempt] = request.submit.offset
        if len(self.given_up) > MAX_CANCELLED:
            self.given_up.popitem(last=False)

    def cancels(self, cancel: CancelLeg) -> ToNode:
        """Return the action that sends `cancel` to the rank, and remember it: it may be lost with the connection."""
        if not cancel.if_unfetched:
            self.cancelled.pop((cancel.rid, cancel.attempt), None)
            self.cancelled[cancel.rid, cancel.attempt] = cancel
            if len(self.cancelled) > MAX_CANCELLED:
                self.cancelled.popitem(last=False)
        return ToNode(self.peer, cancel)
