"""What the counters of each part must say together, whatever happened: laws, stated once, as data.

A law is a line of sums: `done + failed_* + superseded + requests == submitted`. Its names are those of one snapshot of
one part, a flat mapping of numbers; `x_*` is the sum of all that begin so, and what a snapshot does not have is 0. A
counter that can be in no law stands in `FREE`, with the reason. The worlds that tests share call `watch`; what they
hold is looked at when the test is over (`settle`), and whether a counter has fallen after each step (`Rising`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import gt
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from bus.histogram import Distribution
from bus.runtime.metrics import Metric
from bus.wire.messages import RankStatus, Status
from controller.observe import collect, rank_status
from nodes.link.reports import MAX_ACKS
from nodes.metrics import NodeFigures
from nodes.metrics import _of_ranks as _of_ranks_of_node

Snapshot = Mapping[str, float]
Core = TypeVar("Core")


class Law(NamedTuple):
    part: str
    says: str
    sums: str
    at_rest: bool = False  # only while nothing is under way
    given: str = ""  # only for snapshots that have this name: what no part tells, and a world knows


LAWS = (
    Law("controller", "each submit ends once or lives", "done + failed_* + superseded + requests == submitted"),
    Law("controller", "each failure has one code", "failed == failed_*"),
    Law("controller", "what is abandoned is cancelled", "abandoned <= failed_cancelled"),
    Law("controller", "who was promised a time is kept, missed or exempt, once",
        "ttft_slo_kept + ttft_slo_missed + ttft_slo_exempt <= ttft_slo <= submitted"),
    Law("controller", "at the end each of them is", "ttft_slo_kept + ttft_slo_missed + ttft_slo_exempt == ttft_slo",
        at_rest=True),
    Law("controller", "until then it is owed one",
        "ttft_slo_kept + ttft_slo_missed + ttft_slo_exempt + ttft_slo_owed == ttft_slo", given="ttft_slo_owed"),
    Law("controller", "each request is dispatched for the first time once", "done <= dispatched <= submitted"),
    Law("controller", "each dispatch is of one or two legs",
        "dispatched + redispatched <= legs_dispatched <= 2*dispatched + 2*redispatched",
        given="legs_dispatched"),
    Law("controller", "what goes out again has failed before", "redispatched <= legs_failed + undelivered",
        given="legs_failed"),
    Law("controller", "what is taken over is dispatched", "adopted <= dispatched + redispatched"),
    Law("controller", "a lost leg has failed", "legs_lost <= legs_failed", given="legs_failed"),
    Law("controller", "what was not delivered was dispatched", "undelivered <= legs_dispatched",
        given="legs_dispatched"),
    Law("controller", "who waits has come, or failed before",
        "queue_requests <= queued <= submitted + dispatched + redispatched"),
    Law("controller", "who waits lives", "queue_requests <= requests"),
    Law("controller", "the queue's bytes are kept", "queue_bytes <= payload_bytes"),
    Law("controller", "only a wish that waited is given up", "tpot_slo_given_up <= queued"),
    Law("controller", "a trip is of a pair that is done", "trip_* <= done"),
    Law("controller", "regret is of dispatches", "regret_dispatches <= legs_dispatched", given="legs_dispatched"),

    Law("rank", "what is sent ends or is outstanding", "ended_total + outstanding == dispatched_total"),
    Law("rank", "what failed has ended; the time between tokens is of what has not",
        "failed_total + tpot <= ended_total"),
    Law("rank", "what is not acknowledged was sent", "in_flight_requests <= dispatched_total"),
    Law("rank", "each has one first token at most", "ttft <= dispatched_total"),
    Law("rank", "acknowledgements are of what was sent", "acknowledgement <= dispatched_total"),
    Law("rank", "each was sent by one method", "dispatches_* == dispatched_total", given="dispatches_routed_dp_rank"),

    Law("broker", "each room that was registered is dropped, expires or is held",
        "rooms_dropped + rooms_expired + rooms_held == rooms_registered"),
    Law("broker", "what is alive is held", "rooms_alive <= rooms_held"),
    Law("broker", "a failure is a claim that was taken",
        "rooms_failed <= rooms_registered + rooms_refreshed + rooms_replaced"),
    Law("broker", "each watch is answered, dropped, overdue or held",
        "watches_answered + watches_dropped + watches_overdue + watches == watches_added"),
    Law("broker", "a watch is of a room that was asked for", "watches_added + watches_refused <= query_rooms"),
    Law("broker", "each query is for a room", "queries <= query_rooms"),

    Law("publisher", "what lives or was evicted was registered", "live_rooms + evicted <= registered"),
    Law("publisher", "what is refreshed was registered, ten TTLs ago at most", "refreshed <= 20*registered"),

    Law("resolver", "each want is answered, lost, cancelled or pending",
        "told + computed + asked + lost + cancelled + pending == wanted"),
    Law("resolver", "only a rank that was told or computed is of an old topology", "old <= told + computed"),

    Law("node", "what is cached has begun; what has begun has come",
        "cached_tokens <= admitted_tokens <= prompt_tokens"),
    Law("node", "nothing is computed that was cached", "cached_tokens + computed_tokens <= admitted_tokens"),
    Law("node", "each dispatch that came is known, ended or lives",
        "legs_ended_* + legs + dispatch_anomalies_dispatch_known == dispatches", given="dispatches"),
    Law("node", "only what came has a first token", "first_token <= dispatches", given="dispatches"),
    Law("node", "only what came is fetched", "kv_fetch <= dispatches", given="dispatches"),
    Law("node", "a gap is before something that came", "dispatch_anomalies_dispatch_gap <= dispatches",
        given="dispatches"),
    Law("node", "each step that has a time is one", "step <= steps"),
    Law("node", "no engine is busy for longer than it is there", "busy_seconds <= elapsed_s", given="elapsed_s"),

    Law("edge", "what failed was asked", "errors_* <= requests_*"),
    Law("edge", "what is cached was taken in", "cached_tokens <= prompt_tokens"),
    Law("edge", "each first token and each gap is of a token",
        "time_to_first_token + inter_token_latency <= generation_tokens"),

    Law("pair", "a rank counts no dispatch that its controller did not send", "received <= sent"),
    Law("pair", "where no connection was lost, it counts each", "received == sent", at_rest=True, given="unbroken"),
    Law("cluster", "no more KV cache arrives than is sent", "kv_received_bytes <= kv_sent_bytes", at_rest=True),
)  # fmt: skip

PEERS = "peers may say it, or say it wrongly, any number of times, and what they say is counted nowhere else"
FREE = {
    "controller": {
        "reattached": "a client may repeat itself any number of times",
        "rejected_*": PEERS, "hello_*": PEERS, "report_*": PEERS, "sent_*": PEERS, "ack_ahead": PEERS, "kv_*": PEERS,
        "cache_unknown": PEERS,
        "clients_unreachable": "status and refusals, which are counted nowhere, are among them",
        "peers_refused*": PEERS, "ranks_*": "ranks may be lost any number of times",
        "first_token_us_*": "microseconds, and no events",
        "policy_faults": "a method has many hooks, some of which are called for each rank that is looked at",
        "adoptable": "a gauge: what a former controller left", "prefix_blocks": "a gauge of the policies",
        "regret_tokens": "of the ranks' reports, which may say anything",
    },
    "rank": {"restarts": "a rank may be started any number of times"},
    "broker": {
        "rejected_*": PEERS, "peers_refused*": PEERS, "members_*": PEERS, "topic_mismatches": PEERS, "gaps": PEERS,
        "rooms_ignored": PEERS, "rooms_repeated": PEERS, "rooms_stale": PEERS, "rooms_conflicts": PEERS,
        "rooms_refused": PEERS, "topology_queries": PEERS, "ranks": "a gauge", "query_batch_rooms": "of `queries`",
        "answers_dropped": "answers to questions for its status, which it does not count, are among them",
        "resyncs": "asked for until the rank restates",
    },
    "publisher": {
        "dropped": "a room may be dropped that was never registered", "invalid": "what the engine says, and how often",
        "restated": "as often as brokers ask", "overflows": "what the engine says, and how often", "rejected_*": PEERS,
    },
    "resolver": {
        "queries": "asked until it is answered", "topology_queries": "asked until it is answered", "stale": PEERS,
        "invalid": "what the engine says, and how often", "overflows": "what the engine says, and how often",
        "rejected_*": PEERS,
    },
    "node": {
        "dispatch_anomalies_dispatch_repeated": PEERS,
        "kv_checksum_errors": "a block is asked for again until it is whole",
        "kv_client_unsaid": PEERS, "output_tokens": "the engine's word, in no proportion to what was asked for",
        "rooms_*": "the publisher's laws", "rooms_located_*": "the resolver's laws", "rejected_*": PEERS,
        "unsent_*": "said again until it leaves", "attaches_dropped": PEERS,
    },
    "edge": {
        "e2e_request_latency": "an answer may end without a token", "requests_in_flight": "a gauge",
    },
    "pair": {}, "cluster": {"kv_rejected_*": PEERS, "unsent_*": "said again until it leaves"},
}  # fmt: skip

_TERM = re.compile(r"(?:(\d+)\*)?([a-z_0-9]+\*?)$")


@dataclass(frozen=True)
class _Line:
    law: Law
    sides: tuple[tuple[tuple[int, str], ...], ...]
    signs: tuple[str, ...]


def _read(law: Law) -> _Line:
    words = re.split(r" (==|<=) ", law.sums)
    sides = []
    for side in words[::2]:
        terms = [_TERM.match(term) for term in side.split(" + ")]
        sides.append(tuple((int(term[1] or 1), term[2]) for term in terms if term))
        assert all(terms), law
    return _Line(law, tuple(sides), tuple(words[1::2]))


_LINES: dict[str, list[_Line]] = {}
for _law in LAWS:
    _LINES.setdefault(_law.part, []).append(_read(_law))


def bound(part: str) -> set[str]:
    """The names and patterns that laws of this part, or its list of free ones, have."""
    named = {name for line in _LINES.get(part, ()) for side in line.sides for _, name in side}
    return named | set(FREE[part])


def is_bound(part: str, name: str) -> bool:
    return any(
        name.startswith(known[:-1]) if known.endswith("*") else name.rstrip("*") == known for known in bound(part)
    )


def broken(part: str, seen: Snapshot, *, rest: bool = False) -> list[str]:
    """The laws that a snapshot breaks, with the numbers."""
    told = []
    for line in _LINES[part]:
        law = line.law
        if (law.at_rest and not rest) or (law.given and law.given not in seen):
            continue
        values = [sum(times * _value(seen, name) for times, name in side) for side in line.sides]
        pairs = zip(line.signs, values, values[1:], strict=False)
        if not all(one == other if sign == "==" else one <= other for sign, one, other in pairs):
            names = dict.fromkeys(name for side in line.sides for _, name in side)
            numbers = ", ".join(f"{each} {seen[each]:g}" for name in names for each in _matching(seen, name))
            told.append(f"{part}: {law.says}: {law.sums}; but {numbers or 'all are 0'}")
    told += [f"{part}: no counter is below 0; but {name} {value:g}" for name, value in seen.items() if value < 0]
    return told


def _matching(seen: Snapshot, name: str) -> list[str]:
    return [each for each in seen if each.startswith(name[:-1])] if name.endswith("*") else [name] * (name in seen)


def _value(seen: Snapshot, name: str) -> float:
    if name.endswith("*"):
        return sum([value for each, value in seen.items() if each.startswith(name[:-1])])
    return seen.get(name, 0)


def check(seen: Iterable[tuple[str, Snapshot]], *, rest: bool = False) -> None:
    """AssertionError with each law that one of these snapshots, `(part, numbers)`, breaks."""
    told = [line for part, snapshot in seen for line in broken(part, snapshot, rest=rest)]
    assert not told, "\n".join(told)


# --- over time ------------------------------------------------------------------------------------------------------


class Rising:
    """`step` after each event: no total of a rank has fallen (`counts` only ever count up: a test reads that off the
    code). `complete`: no rank was forgotten, and its totals with it."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[int, ...]] = {}
        self.complete = True

    def step(self, ranks: Mapping[Any, Any]) -> None:
        totals = {key: _totals(rank) for key, rank in ranks.items()}
        if totals != self._last:
            for key, before in self._last.items():
                if key not in totals:
                    self.complete = False
                elif any(map(gt, before, totals[key])):
                    raise AssertionError(f"a total of {key} fell: from {before} to {totals[key]}")
            self._last = totals


def _totals(rank: Any) -> tuple[int, ...]:
    sent, routed = rank.dispatched_total, rank.routed_total
    return sent, sent - rank.outstanding, rank.failed_total, routed, sent - routed


# --- at the end of a test -------------------------------------------------------------------------------------------

WATCHED_MAX = 50  # a property test makes thousands of worlds
_watched: list[Callable[[], None]] = []


def watch(look: Callable[[], None]) -> None:
    """Call `look`, which checks, when the test is over; sooner where there are many."""
    _watched.append(look)
    if len(_watched) > WATCHED_MAX:
        _watched.pop(0)()


def watched(core: Core) -> Core:
    """`core`, of one of the parts that have a core alone, watched."""
    of = {"BrokerCore": of_broker, "PublisherCore": of_publisher, "ResolverCore": of_resolver}[type(core).__name__]
    watch(lambda: check(of(core)))
    return core


def settle() -> None:
    """Look at all that this test has made."""
    looks = _watched[:]
    _watched.clear()
    for look in looks:
        look()


# --- snapshots ------------------------------------------------------------------------------------------------------


def of_page(metrics: Iterable[Metric], part: str, own: tuple[str, ...] = ()) -> dict[str, float]:
    """What is shown to Prometheus: `pdbus_<part>_<name>_total{label="x"}` is `name_x`, a histogram its count. Labels of
    `own` are of the part itself, and in no name."""
    found: dict[str, float] = {}
    for metric in metrics:
        name = metric.name.removeprefix(f"pdbus_{part}_")
        name = re.sub(r"^events$", "", name.removesuffix("_total" if metric.kind == "counter" else "_seconds"))
        for sample in metric.samples:
            labels = [value for label, value in sample.labels.items() if label not in own]
            key = "_".join(filter(None, (name, *labels)))
            value = sample.value
            if name == "trip_first_token_seconds" and not isinstance(value, Distribution):
                key, value = "_".join(("first_token_us", *labels)), round(value * 1e6)
            found[key] = found.get(key, 0) + (sum(value.buckets) if isinstance(value, Distribution) else value)
    return found


def of_text(text: str, part: str) -> dict[str, float]:
    """The page of a part as it was scraped; of a node's ranks, the sums."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(f"pdbus_{part}_"):
            name = re.sub("^events$", "", family.name.removeprefix(f"pdbus_{part}_").removesuffix("_seconds"))
            if family.name == "pdbus_node_busy_seconds":
                name = "busy_seconds"
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_sum", "_created")):
                    labels = [value for label, value in sample.labels.items() if label not in (*_OF_RANK, "controller")]
                    key = "_".join(filter(None, (name, *labels)))
                    value = sample.value
                    if family.name == "pdbus_controller_trip_first_token_seconds":
                        key, value = "_".join(("first_token_us", *labels)), round(value * 1e6)
                    found[key] = found.get(key, 0) + value
    return found


def of_controller(core: Any, now: float, *, complete: bool = True) -> list[tuple[str, Snapshot]]:
    """A core: what it says, and what it shows to Prometheus, which must be the same. `complete`: no rank was forgotten,
    and with it what was sent there."""
    ranks = core.members.ranks.values()
    owed = sum(each.first_due != inf for each in core.life.requests.values())
    told = [rank_status(rank, core.health.liveness[rank.key], now) for rank in ranks]
    counts = core.tally()
    shown = collect(core.happened(), core.alive(), ranks, core.health.liveness, core.config.methods, core.regret, now)
    by_rank, of_all = _parted(shown)
    page = of_page(of_all, "controller", own=("role", "method"))
    for name, value in counts.items():
        assert page.get(name) == value, f"{name} is {value}, and the page for Prometheus says {page.get(name)}"
    ours, *of_ranks = _of_ranks(counts | {"ttft_slo_owed": owed}, told, complete=complete)
    pages = [of_page(metrics, "controller", own=_OF_RANK) for metrics in by_rank.values()]
    return [ours, *((part, {**seen, **page}) for (part, seen), page in zip(of_ranks, pages, strict=True))]


_OF_RANK = ("instance", "dp_rank", "role")


def _parted(metrics: Iterable[Metric]) -> tuple[dict[tuple[str, str], list[Metric]], list[Metric]]:
    """The counters of each rank, and what is the whole controller's."""
    by_rank: dict[tuple[str, str], list[Metric]] = {}
    of_all = []
    for metric in metrics:
        if not any("dp_rank" in sample.labels for sample in metric.samples):
            of_all.append(metric)
        elif metric.kind != "gauge":
            for sample in metric.samples:
                key = sample.labels["instance"], sample.labels["dp_rank"]
                by_rank.setdefault(key, []).append(Metric(metric.name, metric.help, metric.kind, (sample,)))
    return by_rank, of_all


def of_status(status: Status) -> list[tuple[str, Snapshot]]:
    """What a controller says over the wire."""
    return _of_ranks(dict(status.counts), status.ranks)


def _of_ranks(
    counts: dict[str, int], ranks: Iterable[RankStatus], *, complete: bool = True
) -> list[tuple[str, Snapshot]]:
    ranks = list(ranks)
    legs = {f"legs_{name}": sum(getattr(rank, f"{name}_total") for rank in ranks) for name in ("dispatched", "failed")}
    names = ("dispatched_total", "ended_total", "failed_total", "outstanding", "in_flight_requests", "restarts")
    return [
        ("controller", counts | legs if complete else counts),
        *(
            ("rank", {name: getattr(rank, name) for name in names}
             | {"ttft": sum(rank.ttft_counts), "tpot": sum(rank.tpot_counts)})
            for rank in ranks
        ),
    ]  # fmt: skip


def of_broker(core: Any) -> list[tuple[str, Snapshot]]:
    return [("broker", core.tally())]


def of_publisher(core: Any) -> list[tuple[str, Snapshot]]:
    return [("publisher", core.counts | {"live_rooms": core.live_rooms})]


def of_resolver(core: Any) -> list[tuple[str, Snapshot]]:
    return [("resolver", core.counts | {"pending": core.pending})]


def of_edge(counts: Any) -> list[tuple[str, Snapshot]]:
    return [("edge", of_page(counts.snapshot(), "edge"))]


def of_node_rank(core: Any, runner: Any, elapsed_s: float = inf, publisher: Any = None) -> list[tuple[str, Snapshot]]:
    """A rank of a node, by what its process shows to Prometheus."""
    rank = SimpleNamespace(core=core, runner=runner, publisher=publisher or SimpleNamespace(counts={}))
    page = of_page(_of_ranks_of_node({0: rank}, NodeFigures()), "node", own=("dp_rank",))
    acks = core.reports.acks
    came = {"dispatches": sum(ack.dispatches for ack in acks), "legs": len(core)} if len(acks) < MAX_ACKS else {}
    return [("node", page | came | {"elapsed_s": elapsed_s})]
