"""The controller's figures for display: `pdbus status`, Prometheus metrics, and the regret of its picks. This module
changes no load.

All figures are built from the core's records, about once a second and not while a request is served, except
`Regret`, which looks when a report acknowledges a dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import get_args

from msgspec.structs import replace

from bus.errors import REASONS
from bus.histogram import trimmed
from bus.runtime.metrics import Metric, Sample, gauge, labelled
from bus.wire.codes import Code
from bus.wire.messages import MAX_ROOM, MemberKey, RankStatus, Role, Scraped, WantedRole
from controller.health import Liveness
from controller.load.rank import RankLoad
from controller.rank import Rank

EVENTS = (  # shown from the start: a series that begins with a count has no increase of it
    "abandoned", "ack_ahead", "adopted", "cache_unknown", "clients_unreachable", "dispatched", "done", "failed",
    "kv_blocks_elsewhere", "kv_blocks_unnamed", "kv_gaps", "kv_restarts", "kv_unreadable", "legs_lost",
    "policy_faults", "queued", "reattached", "redispatched", "report_forged", "report_old", "report_unknown",
    "sent_old", "sent_too_many", "submitted", "superseded", "tpot_slo_given_up", "trip_at_decode",
    "trip_delta", "trip_read_back", "trip_whole", "undelivered",
)  # fmt: skip
REGRET_MAX_PER_S = 50
SCRAPED_MAX = 63
SCRAPED_S = 600.0  # long enough to see that one is down


def rank_status(known: Rank, pulse: Liveness, now: float) -> RankStatus:
    """Return the status of one rank as this controller knows it at `now`. Counts are cut to what a message may hold."""
    rank = known.load
    info = rank.info
    load, reported_at = rank.load, rank.reported_at
    return RankStatus(  # by place: names would take a quarter of the time, and an operator's page asks for thousands
        info.instance, info.dp_rank, info.role, info.model, pulse.state, rank.epoch, info.endpoint, info.max_context,
        -1.0 if reported_at is None else max(0.0, now - reported_at),  # report_age_s
        None if load is None else replace(load, acks=()),
        rank.in_flight, rank.in_flight_tokens,
        min(rank.requests, MAX_ROOM), min(rank.tokens, MAX_ROOM),  # estimate_*
        rank.outstanding, rank.dispatched_total, rank.ended_total, rank.failed_total, info.block_tokens,
        max(0.0, now - pulse.state_at), max(0.0, now - pulse.hello_at),  # state_age_s, epoch_age_s
        rank.restarts, trimmed(known.latencies.ttft.buckets), trimmed(known.latencies.tpot.buckets), info.metrics,
    )  # fmt: skip


def probe(ranks: Iterable[Rank], now: float) -> None:
    """Begin to measure, at each rank that has not acknowledged everything, the time until it acknowledges what was sent
    by now. `end_probe` ends it."""
    for rank in ranks:
        if rank.probe is None and rank.load.in_flight:
            rank.probe = rank.load.sent, now


def end_probe(rank: Rank, now: float) -> None:
    """End the measurement at a rank that has acknowledged what was sent when it began; call it after each report."""
    if rank.probe is not None and rank.load.acked >= rank.probe[0]:
        rank.latencies.acked.observe(now - rank.probe[1])
        rank.probe = None


def collect(
    happened: Mapping[str, int],
    alive: Mapping[str, int],
    known: Collection[Rank],
    liveness: Mapping[MemberKey, Liveness],
    methods: Mapping[Role, str],
    regret: Regret,
    now: float,
    wanted: Iterable[WantedRole] = (),
) -> Sequence[Metric]:
    """Return the metrics of what has `happened` at a core and what is `alive` there (counts by name), of the `known`
    ranks, and of what else it knows. A request id is never a label."""
    events = dict.fromkeys(EVENTS, 0)
    failed = dict.fromkeys(get_args(Code)[1:], 0)  # from the start, as EVENTS
    rejected = dict.fromkeys((*REASONS, "bad_identity"), 0)  # every reason is shown, also at 0
    trips: list[Sample] = []
    for name, number in happened.items():
        if name.startswith("failed_"):
            failed[name.removeprefix("failed_")] = number
        elif name.startswith("rejected_"):
            rejected[name.removeprefix("rejected_")] = number
        elif name.startswith("first_token_us_"):
            trip, kind = name.removeprefix("first_token_us_").rsplit("_", 1)
            trips.append(Sample(number / 1e6, {"trip": trip, "kind": kind}))
        else:
            events[name] = number
    return (
        *[gauge(f"pdbus_controller_{name}", f"{name} now", number) for name, number in alive.items()],
        *_regret(regret, methods),
        labelled("counter", "pdbus_controller_events_total", "what happened so far, by name", "event", events),
        labelled("counter", "pdbus_controller_failed_total", "requests failed, by code", "code", failed),
        labelled("counter", "pdbus_controller_rejected_total", "messages dropped, by reason", "reason", rejected),
        Metric(
            "pdbus_controller_trip_first_token_seconds_total",
            "until the first tokens of pairs by their trip: predicted, and taken",
            "counter",
            trips,
        ),
        *_of_ranks(known, liveness, methods, now),
        Metric(
            "pdbus_controller_wanted_ready",
            "ready ranks of each role (and model, empty: any) that ought to be served",
            "gauge",
            [Sample(each.ready, {"role": each.role, "model": each.model}) for each in wanted],
        ),
    )


def _of_ranks(
    known: Collection[Rank], liveness: Mapping[MemberKey, Liveness], methods: Mapping[Role, str], now: float
) -> Sequence[Metric]:
    ranks = [rank.load for rank in known]
    return (
        _dispatches(ranks, methods),
        _gauge("estimate_requests", "load in force: requests", ranks, [rank.requests for rank in ranks]),
        _gauge("estimate_tokens", "load in force: tokens", ranks, [rank.tokens for rank in ranks]),
        _gauge("reported_requests", "requests in the last report", ranks, [rank.base_requests for rank in ranks]),
        _gauge("reported_tokens", "tokens of work in the last report", ranks, [rank.base_tokens for rank in ranks]),
        _gauge("in_flight_requests", "requests sent and not acknowledged", ranks, [rank.in_flight for rank in ranks]),
        _gauge(
            "in_flight_tokens", "tokens sent and not acknowledged", ranks, [rank.in_flight_tokens for rank in ranks]
        ),
        _histogram("ttft", "ttft", "time to first token (prefill: of its own part)", known),
        _histogram("tpot", "tpot", "time per output token after the first", known),
        _histogram("acknowledgement", "acked", "until all that was sent was acknowledged, sampled", known),
        Metric(
            "pdbus_controller_restarts_total",
            "starts that took the place of an earlier one",
            "counter",
            [Sample(rank.restarts, _labels(rank)) for rank in ranks],
        ),
        _gauge("outstanding", "legs dispatched and not ended", ranks, [rank.outstanding for rank in ranks]),
        Metric(
            "pdbus_controller_rank_state",
            "1, with the state it is in",
            "gauge",
            [Sample(1, _labels(rank) | {"state": liveness[rank.key].state}) for rank in ranks],
        ),
        _gauge("ready", "1 when it may be dispatched to", ranks, [int(rank.ready) for rank in ranks]),
        _gauge(
            "report_age_seconds",
            "since the last report (-1: none yet)",
            ranks,
            [-1.0 if rank.reported_at is None else now - rank.reported_at for rank in ranks],
        ),
    )


def _labels(rank: RankLoad) -> dict[str, str]:
    return {"instance": rank.key[0], "dp_rank": str(rank.key[1]), "role": rank.info.role}


def _gauge(name: str, help: str, ranks: Collection[RankLoad], values: Sequence[float]) -> Metric:
    samples = [Sample(value, _labels(rank)) for rank, value in zip(ranks, values, strict=True)]
    return Metric(f"pdbus_controller_{name}", help, "gauge", samples)


def _histogram(name: str, of: str, help: str, ranks: Iterable[Rank]) -> Metric:
    samples = [Sample(getattr(rank.latencies, of).frozen(), _labels(rank.load)) for rank in ranks]
    return Metric(f"pdbus_controller_{name}_seconds", help, "histogram", samples)


def _regret(regret: Regret, methods: Mapping[Role, str]) -> Iterable[Metric]:
    for name, help, by_role in (
        (
            "tokens",
            "tokens queued at chosen ranks beyond the best one's, when their reports acknowledged",
            regret.tokens,
        ),
        ("dispatches", "dispatches that the regret was sampled of", regret.dispatches),
    ):
        samples = [Sample(by_role[role], {"role": role, "method": method}) for role, method in methods.items()]
        yield Metric(f"pdbus_controller_regret_{name}_total", help, "counter", samples)


def _dispatches(ranks: Iterable[RankLoad], methods: Mapping[Role, str]) -> Metric:
    samples = []
    for rank in ranks:
        by_method = {
            methods[rank.info.role]: rank.dispatched_total - rank.routed_total,
            "routed_dp_rank": rank.routed_total,
        }
        samples += [Sample(count, _labels(rank) | {"method": method}) for method, count in by_method.items()]
    return Metric("pdbus_controller_dispatches_total", "legs sent, by rank and method", "counter", samples)


class Scrapes:
    """The parts without ranks that have metrics, for `pdbus targets`: this controller (`own`), and those that publish
    their address."""

    def __init__(self, own: Scraped) -> None:
        self._own = own
        self._seen: dict[tuple[str, str], tuple[Scraped, float]] = {}

    def seen(self, scraped: Scraped, now: float) -> None:
        """Note a part that published its metrics address; an empty address removes it."""
        key = scraped.part, scraped.name
        if scraped.metrics and key != (self._own.part, self._own.name):
            if key in self._seen or len(self._seen) < SCRAPED_MAX:
                self._seen[key] = scraped, now
        else:
            self._seen.pop(key, None)

    def known(self, now: float) -> tuple[Scraped, ...]:
        """Return the parts seen lately, in order. A part that is gone for longer is no target any more."""
        for key, (_, at) in list(self._seen.items()):
            if now - at > SCRAPED_S:
                del self._seen[key]
        others = [scraped for _, (scraped, _) in sorted(self._seen.items())]
        return (*others, self._own) if self._own.metrics else tuple(others)


class Regret:
    """The regret of picks: how much better the best rank would have been. It is computed when a report acknowledges
    a dispatch, because the chosen rank's true load is known then. Regret is what that rank had queued besides the
    requests just ingested, beyond the least loaded rank's tokens; `tokens` / `dispatches` is the mean of the
    samples. Each sample looks at all ranks of the role, so at most `REGRET_MAX_PER_S` are taken (`due`)."""

    def __init__(self) -> None:
        self.tokens: Counter[Role] = Counter()
        self.dispatches: Counter[Role] = Counter()
        self.due = 0.0  # from then on the next sample may be taken

    def acknowledged(self, rank: RankLoad, ranks: Iterable[RankLoad], now: float) -> None:
        """Take a sample after `rank`'s last report acknowledged new requests of mine (`RankLoad.newly_acked`). `ranks`:
        all known."""
        if rank.newly_acked <= 0:
            return
        self.due = now + 1 / REGRET_MAX_PER_S
        role, model = rank.info.role, rank.info.model
        best = min(
            (
                other.tokens
                for other in ranks
                if other.candidate and (other.info.role, other.info.model) == (role, model)
            ),
            default=0,
        )
        before = rank.base_tokens - rank.newly_acked_tokens
        self.tokens[role] += rank.newly_acked * max(0, before - best)
        self.dispatches[role] += rank.newly_acked
