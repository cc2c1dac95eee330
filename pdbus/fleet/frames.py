"""The messages from which a browser's page draws a fleet: a snapshot, and what has changed in each second since. Pure.

Both are server-sent events (`snapshot`, `delta`) with one JSON object. A rank is rows of numbers, named by `FACTS`,
`FIGURES` and `RATES`, which begin with a number that it keeps as long as it is known. A delta has only rows that
changed, and lists of requests that did. All readers get the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import islice
from typing import Any

import msgspec

from bus.histogram import quantile
from bus.wire.messages import ListedRequest, MemberKey, RankStatus, RequestLists, Status
from pdbus.fleet.conditions import Condition, taken
from pdbus.fleet.figures import Sample, slo_of
from pdbus.fleet.history import FleetRow, History, News
from pdbus.fleet.verdict import headline_of, lines_of, short_of, shortened

FACTS = ("id", "instance", "dp_rank", "role", "model", "host", "since", "restarts", "max_running", "kv_capacity")
FIGURES = (
    "id", "state", "condition", "running", "waiting", "kv_live", "kv_pinned", "kv_cached", "estimate_requests",
    "estimate_tokens", "age_s", "step_s", "failed", "taken",
)  # fmt: skip
RATES = (
    "id", "requests_s", "prompt_s", "output_s", "hits", "busy", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s",
    "kv_sent_bytes_s", "kv_received_bytes_s", "fetch_s",
)  # fmt: skip
REQUEST = ("rid", "came", "first_token_s", "model", "prompt_tokens", "attempt", "ranks", "late")
ROW = tuple(name for name in FleetRow._fields if name != "at")
LISTS = RequestLists.__struct_fields__
RATED, ROUND = 128, 8  # ranks whose rates are in one message: of more they come in turns, of each within 8 messages
NAMES = 20  # codes, keys

_JSON = msgspec.json.Encoder()


class Frames:
    """The messages of one fleet. Its owner calls `add` each second; `snapshot` is of the same moment. `ttft_slo_s` and
    `tpot_slo_s` are lines in the charts (0: those of the controller, if it has any)."""

    def __init__(self, *, ttft_slo_s: float = 0.0, tpot_slo_s: float = 0.0, asks_broker: bool = True) -> None:
        self.history = History()
        self._slo_s = ttft_slo_s, tpot_slo_s
        self._asks_broker = asks_broker
        self._silent = "no controller has answered yet"
        self._wall = 0.0
        self._seq = 0
        self._head: dict[str, Any] = {"silent": self._silent}
        self._ids: dict[MemberKey, int] = {}
        self._next_id = 0
        self._facts: dict[int, tuple[Any, ...]] = {}
        self._figures: dict[int, tuple[Any, ...]] = {}
        self._rates: dict[int, tuple[Any, ...]] = {}
        self._since: dict[int, tuple[str, int, int]] = {}  # state, epoch, and the second in which it began
        self._fetched: dict[int, tuple[int, int]] = {}
        self._turn = 0
        self._news: News | None = None  # the last that was sent
        self._row: FleetRow | None = None
        self._lists: dict[str, list[Any]] = {}  # of requests, by name
        self._snapshot: bytes | None = None

    def add(self, update: Sample | str) -> bytes:
        """Take in a sample, or the reason why there is none, and return the delta. Samples must be newer each time."""
        self._seq += 1
        self._snapshot = None
        if isinstance(update, str):
            self._silent = self._head["silent"] = update
            return self._message("delta")
        self.history.add(update)
        self._silent, self._wall = "", update.wall
        here = self._known(update.status.ranks)
        gone = [self._forget(key) for key in [key for key in self._ids if key not in here]]
        conditions = self.history.conditions()
        facts = list(_changed(self._facts, map(self._facts_of, here.values())))
        figures = list(_changed(self._figures, (self._figures_of(rank, conditions) for rank in here.values())))
        rates = list(_changed(self._rates, map(self._rates_of, self._in_turn(list(here.values())))))
        self._head = self._head_of(update)
        rows = self.history.rows
        row = [] if not rows or rows[-1] is self._row else [_row(rows[-1])]
        self._row = rows[-1] if rows else None
        news, lists = self._fresh_news(), _lists(update.status.requests)
        fresh = {name: rows for name, rows in lists.items() if rows != self._lists.get(name)}
        self._lists = lists
        return self._message(
            "delta", facts=facts, figures=figures, rates=rates, gone=gone, rows=row, news=news, requests=fresh
        )

    def snapshot(self) -> bytes:
        """Return everything; encoded once for all readers between two deltas."""
        if self._snapshot is None:
            self._snapshot = self._message(
                "snapshot", facts=list(self._facts.values()), figures=list(self._figures.values()),
                rates=list(self._rates.values()), gone=[], rows=[_row(row) for row in self.history.rows],
                news=[_news(each) for each in self.history.news], requests=self._lists,
                names=NAMES_OF, version=metadata.version("pdbus"),
            )  # fmt: skip
        return self._snapshot

    def _message(self, event: str, **parts: Any) -> bytes:
        body = {"seq": self._seq, "wall": self._wall, "head": self._head, **{k: v for k, v in parts.items() if v}}
        return b"event: %s\ndata: %s\n\n" % (event.encode(), _JSON.encode(body))

    # --- ranks --------------------------------------------------------------------------------------------------

    def _known(self, ranks: Iterable[RankStatus]) -> dict[MemberKey, RankStatus]:
        here = {(rank.instance, rank.dp_rank): rank for rank in ranks}
        for key in here:
            if key not in self._ids:
                self._ids[key] = self._next_id
                self._next_id += 1
        return here

    def _forget(self, key: MemberKey) -> int:
        number = self._ids.pop(key)
        for table in (self._facts, self._figures, self._rates, self._since, self._fetched):
            table.pop(number, None)
        return number

    def _facts_of(self, rank: RankStatus) -> tuple[Any, ...]:
        number, load = self._ids[rank.instance, rank.dp_rank], rank.load
        since = self._since.get(number)
        if since is None or since[:2] != (rank.state, rank.epoch):
            began = int(self._wall - rank.state_age_s) if rank.state_age_s >= 0 else 0
            since = self._since[number] = (rank.state, rank.epoch, began)
        most = (0, 0) if load is None else (load.max_running, load.kv_capacity)
        return (
            number, rank.instance, rank.dp_rank, rank.role, rank.model, host_of(rank.endpoint), since[2], rank.restarts,
            *most,
        )  # fmt: skip

    def _figures_of(self, rank: RankStatus, conditions: dict[MemberKey, tuple[Condition, ...]]) -> tuple[Any, ...]:
        key, load = (rank.instance, rank.dp_rank), rank.load
        found = conditions.get(key)
        step_s = self.history.step_s(key)
        return (
            self._ids[key], rank.state, found[0].what if found else "",
            *((None,) * 5 if load is None else (
                load.running, load.waiting, load.kv_tokens, load.kv_pinned, load.kv_cached
            )),
            rank.estimate_requests, rank.estimate_tokens, int(rank.report_age_s) if rank.report_age_s >= 0 else None,
            None if step_s is None else _short(step_s), rank.failed_total, _short(taken(rank)),
        )  # fmt: skip

    def _in_turn(self, ranks: list[RankStatus]) -> list[RankStatus]:
        many = max(RATED, -(-len(ranks) // ROUND))
        if len(ranks) <= many:
            return ranks
        some = list(islice(ranks, self._turn, self._turn + many))
        self._turn = self._turn + many if self._turn + many < len(ranks) else 0
        return some

    def _rates_of(self, rank: RankStatus) -> tuple[Any, ...]:
        key = rank.instance, rank.dp_rank
        number, its, row, load = self._ids[key], self.history.figures_of(rank), self.history.latest(key), rank.load
        fetch_s, hits = before[-1] if (before := self._rates.get(number)) else None, self.history.hits(key)
        if load is not None:
            then = self._fetched.get(number, (0, 0))
            if load.fetches_total > then[0]:
                fetch_s = _short((load.fetch_us_total - then[1]) / (load.fetches_total - then[0]) / 1e6)
            self._fetched[number] = load.fetches_total, load.fetch_us_total
        if (usual_s := self.history.fetch_s(key)) is not None:  # as in the sentence about its link
            fetch_s = _short(usual_s)
        rates = (its.requests_s, its.prompt_s, its.output_s, its.hits if hits is None else hits, its.busy)
        latencies = (quantile(counts, q) for counts in (its.ttft, its.tpot) for q in (0.5, 0.99))
        moved = (None, None) if row is None else (row.kv_sent_bytes_s, row.kv_received_bytes_s)
        return number, *map(_short, rates), *map(_short, latencies), *map(_short, moved), fetch_s

    # --- the rest -----------------------------------------------------------------------------------------------

    def _head_of(self, sample: Sample) -> dict[str, Any]:
        status, counts = sample.status, sample.status.counts
        lines = lines_of(self.history, asks_broker=self._asks_broker)
        return {
            "silent": "", "controller": status.controller, "uptime_s": int(status.uptime_s), "methods": status.methods,
            "headline": headline_of(lines, self.history),
            "lines": [(line.level, line.kind, line.text, self._ids.get(line.rank) if line.rank else None)
                      for line in shortened(lines)],
            "medians": [(role, model, *map(_short, its)) for role, model, *its in self.history.medians()],
            "queue": _queue(status), "waiting": counts.get("queue_requests", 0),
            "live": counts.get("requests", 0), "done": counts.get("done", 0),
            "failed": sorted(sample.failed.items(), key=lambda item: -item[1])[:NAMES],
            "refused": sorted(sample.refused.items(), key=lambda item: -item[1])[:NAMES],
            "ttft_slo_s": self._slo_s[0] or status.ttft_slo_s, "tpot_slo_s": self._slo_s[1] or status.tpot_slo_s,
            "slo": self.history.slos_lately() if slo_of(status) else None,
            "loads": any(rank.endpoint for rank in status.ranks), "events": status.events is not None,
            "requests": status.requests is not None,
        }  # fmt: skip

    def _fresh_news(self) -> list[tuple[Any, ...]]:
        fresh: list[tuple[Any, ...]] = []
        for each in reversed(self.history.news):
            if each is self._news:
                break
            fresh.append(_news(each))
        self._news = self.history.news[-1] if self.history.news else None
        return fresh[::-1]


NAMES_OF = {"facts": FACTS, "figures": FIGURES, "rates": RATES, "row": ROW, "request": REQUEST}


def host_of(endpoint: str) -> str:
    """Return the host of a rank's endpoint: a name or an address of tcp, empty for any other."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]") if endpoint.startswith("tcp://") else ""


def _changed(table: dict[int, tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Give the rows that are not in `table` as they are, and put them there."""
    for row in rows:
        if table.get(row[0]) != row:
            table[row[0]] = row
            yield row


def _short(value: float | None) -> float | None:
    """Return a number with three digits that count; None for NaN, too."""
    return None if value is None or math.isnan(value) else float(f"{value:.3g}")


def _row(row: FleetRow) -> list[Any]:
    return [round(row.wall, 1), *(each if isinstance(each, int) else _short(each) for each in row[2:])]


def _news(each: News) -> tuple[Any, ...]:
    event = each.event
    rank = f"{event.instance}/{event.dp_rank}" if event is not None and event.instance else ""
    return round(each.wall, 1), each.text, each.bad, rank, each.about


def _lists(lists: RequestLists | None) -> dict[str, list[Any]]:
    return {} if lists is None else {name: list(map(_request, getattr(lists, name))) for name in LISTS}


def _request(one: ListedRequest) -> tuple[Any, ...]:
    came, first_token_s = round(one.came_us / 1e6, 1), _short(one.first_token_s or None)
    return one.rid, came, first_token_s, one.model, one.prompt_tokens, one.attempt, one.ranks, one.late


def _queue(status: Status) -> dict[str, Any] | None:
    queue = status.queue
    if queue is None:
        return None
    kinds = [(kind.model, kind.roles, kind.requests, kind.pinned, short_of(kind, status)) for kind in queue.kinds]
    return {
        "requests": queue.requests, "oldest_s": round(queue.oldest_s, 1), "kinds": kinds[:NAMES],
        "priorities": queue.priorities[:NAMES], "keys": queue.keys,
    }  # fmt: skip
