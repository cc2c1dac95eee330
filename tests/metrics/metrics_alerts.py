"""For each alert rule: series that `metrics_world` recorded, stretched in time, by which it rings; the same just below
what it takes; and the same going on, by which it falls silent.

A record has one sample each SCRAPE_S; a case says how many seconds lie between two of them, so that ten seconds there
are a minute or five here. What else is done to a record is written where it is done.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml
from metrics_world import KNOCKS, LONG, LONG_SHARED, PREFILL, SCRAPE_S, World

from bus.histogram import BOUNDS_S

Labels = dict[str, str]
Values = list[float | None]  # None: the series is not there


class Record:
    """Series over the same samples. Every method returns another one."""

    def __init__(self, series: Iterable[tuple[Labels, Values]]) -> None:
        self.series = list(series)
        self.long = max(len(values) for _, values in self.series)

    def __add__(self, other: Record) -> Record:
        return Record([*self.series, *other.series])

    def _each(self, change: Callable[[Labels, Values], Values]) -> Record:
        return Record((labels, change(labels, list(values))) for labels, values in self.series)

    def only(self, **wanted: str) -> Record:
        return Record(each for each in self.series if wanted.items() <= each[0].items())

    def cut(self, start: int, end: int) -> Record:
        return self._each(lambda labels, values: values[start:end])

    def without(self, start: int, end: int) -> Record:
        """What happened from sample `start` to `end` took no time."""
        return self._each(lambda labels, values: values[:start] + values[end:])

    def after(self, count: int) -> Record:
        """It was so for `count` samples before."""
        return self._each(lambda labels, values: values[:1] * count + values)

    def then(self, count: int) -> Record:
        """It stays so for `count` samples."""
        return self._each(lambda labels, values: values + values[-1:] * count)

    def longer(self, at: int, count: int) -> Record:
        """What is so at that sample stays so for `count` samples."""
        return self._each(lambda labels, values: values[: at + 1] + values[at : at + 1] * count + values[at + 1 :])

    def frozen(self, at: int) -> Record:
        """Nothing happens after that sample."""
        return self._each(lambda labels, values: values[: at + 1] + values[at : at + 1] * (len(values) - at - 1))

    def changed(self, change: Callable[[float], float], **wanted: str) -> Record:
        """The values of some series are others."""
        return self._each(
            lambda labels, values: (
                [None if value is None else change(value) for value in values]
                if wanted.items() <= labels.items()
                else values
            )
        )

    def capped(self, more: float) -> Record:
        """Counters begin at 0 and end at most at this. Prometheus extrapolates an increase beyond its first sample
        unless that is 0, and the first one of a record may come after the first event."""
        return self._each(lambda labels, values: [min(value - values[0], more) for value in values])  # type: ignore

    def crowded(self, by: float) -> Record:
        """Counters grow so many times as fast."""
        return self._each(lambda labels, values: [values[0] + (value - values[0]) * by for value in values])  # type: ignore

    def slower(self, by: float) -> Record:
        """All that a histogram saw took so many times as long."""
        bounds = {"+Inf": "+Inf"}
        return Record(
            (labels | {"le": bounds.get(labels["le"]) or f"{float(labels['le']) * by:.9g}"}, values)
            for labels, values in self.series
        )

    def where(self, holds: Callable[[float], bool], **wanted: str) -> tuple[int, int]:
        """The first sample at which a value of these series is so, and the first one after the last."""
        found = [
            at
            for labels, values in self.series
            if wanted.items() <= labels.items()
            for at, value in enumerate(values)
            if value is not None and holds(value)
        ]
        assert found, f"{wanted} never was so"
        return min(found), max(found) + 1

    def grows(self, **wanted: str) -> tuple[int, int]:
        """The first and the last sample at which one of these counters is more than the one before."""
        found = [
            at
            for labels, values in self.series
            if wanted.items() <= labels.items()
            for at in range(1, len(values))
            if (values[at] or 0) > (values[at - 1] or 0)
        ]
        assert found, f"{wanted} never grew"
        return min(found), max(found)

    def written(self) -> list[dict[str, str]]:
        """As promtool reads them."""
        told = []
        for labels, values in self.series:
            inside = ", ".join(f"{key}={json.dumps(text)}" for key, text in labels.items() if key != "__name__")
            gone = ["stale" if at and values[at - 1] is not None else "_" for at in range(len(values))]
            words = [gone[at] if value is None else f"{value:.9g}" for at, value in enumerate(values)]
            told.append({"series": f"{labels['__name__']}{{{inside}}}", "values": " ".join(words)})
        return told


@dataclass(frozen=True)
class Case:
    """`record` with `step_s` between its samples: at sample `at` the alerts with these labels ring; None: never one."""

    record: Record
    step_s: int
    at: int | None = None
    labels: tuple[Labels, ...] = ()


@dataclass(frozen=True)
class Rule:
    summary: Callable[[Labels], str]  # of an alert; N stands for its value
    rings: tuple[Case, ...]
    below: tuple[Case, ...]
    silent: tuple[Case, ...]


def span(world: World, chapter: str) -> tuple[float, float]:
    """Return the first and the last moment of a chapter's record: each part has answered before the first, and the last
    is the end of the chapter."""
    now = world.chapters[chapter]
    return now.end - int((now.end - now.start) / SCRAPE_S - 1) * SCRAPE_S, now.end


def recorded(world: World, selector: str, chapter: str) -> Record:
    """Return the samples of `selector`. Where a busy part did not answer a scrape, its series keep their last value."""
    start, end = span(world, chapter)

    def of(selector: str) -> list[tuple[Labels, Values]]:
        series = []
        for each in world.recorded(selector, start, end):
            values: Values = [None] * (round((end - start) / SCRAPE_S) + 1)
            for at, value in each["values"]:
                values[round((at - start) / SCRAPE_S)] = float(value)
            series.append((dict(each["metric"]), values))
        assert series, f"nothing was recorded of {selector}"
        return series

    answered = {labels["instance"]: values for labels, values in of("up")}
    series = of(selector)
    for labels, values in series:
        part = answered[labels.get("controller", labels["instance"])]
        for at in range(len(values)):
            if values[at] is None and not part[at]:
                values[at] = values[at - 1] if at else next(value for value in values if value is not None)
    return Record(series)


def gone_once(record: Record, after: int, *instances: str) -> Record:
    """`up`, where these parts were killed after that sample and came back; who else did not answer was busy."""

    def change(labels: Labels, values: Values) -> Values:
        if labels["instance"] not in instances:
            return [1.0] * len(values)
        first = values.index(0.0, after)
        back = values.index(1.0, first)
        return [float(not first <= at < back) for at in range(len(values))]

    return record._each(change)


def sample(world: World, chapter: str, moment: str) -> int:
    return int((world.chapters[chapter].at[moment] - span(world, chapter)[0]) / SCRAPE_S)


def of(name: str, *keys: str, record: Record) -> Labels:
    """Those labels that a rule keeps: `keys`, or all but the metric's name."""
    (labels, _) = next(each for each in record.series if name in each[0].values())
    return {key: text for key, text in labels.items() if (key in keys if keys else key != "__name__")}


# --- the rules ------------------------------------------------------------------------------------------------------


def part_down(world: World) -> Rule:
    killed = sample(world, "lost", "killed")
    record = gone_once(recorded(world, 'up{job="pdbus"}', "lost"), killed, "decode-0", "decode-1")
    spans = [record.where(lambda value: value == 0, instance=f"decode-{n}") for n in range(2)]
    down, both = min(first for first, _ in spans), min(end for _, end in spans)
    back = max(end for _, end in spans)
    names = [of(name, record=record) for name in ("decode-0", "decode-1")]
    return Rule(
        lambda labels: f"{labels['instance']} does not answer: its process is gone or hangs (see its /health).",
        rings=(Case(record, 5, both - 1, tuple(names)),),
        below=(Case(record.without(down + 6, back), 5),),  # 25 s, and back at 30
        silent=(Case(record.then(2), 5, record.long + 1),),
    )


def rank_not_serving(world: World) -> Rule:
    record = recorded(world, "pdbus_controller_rank_state", "lost")
    spans = [record.where(lambda value: value == 1, state="lost", instance=f"decode-{n}") for n in range(2)]
    lost, both = min(first for first, _ in spans), min(end for _, end in spans)
    back = max(end for _, end in spans)
    names = [{"instance": f"decode-{n}", "dp_rank": "0", "role": "decode", "state": "lost"} for n in range(2)]
    return Rule(
        lambda labels: f"{labels['role']} rank {labels['instance']}/{labels['dp_rank']} is {labels['state']}.",
        rings=(Case(record, 5, both - 1, tuple(names)),),
        below=(Case(record.without(lost + 3, back), 5),),  # 10 s, and back at 15
        silent=(Case(record.then(2), 5, record.long + 1),),
    )


def role_without_rank(world: World) -> Rule:
    wanted = recorded(world, "pdbus_controller_wanted_ready", "lost")
    ready = recorded(world, "pdbus_controller_ready", "lost")
    spans = [wanted.where(lambda value: value == 0, controller=f"controller-{n}") for n in range(2)]
    gone, back = max(first for first, _ in spans), min(end for _, end in spans)
    older = [ready.where(lambda value: value == 0, instance=f"decode-{n}", controller=f"controller-{m}")
             for n in range(2) for m in range(2)]  # fmt: skip
    of_model = "{}is ready: requests that need one wait or fail."
    return Rule(
        lambda labels: "No decode rank " + of_model.format(f"of {labels['model']} " if "model" in labels else ""),
        rings=(
            Case(wanted + ready, 5, back - 1, ({"role": "decode", "model": "sim"}, {"role": "decode"})),
            Case(ready, 5, min(end for _, end in older) - 1, ({"role": "decode"},)),  # a controller of 0.1.0
        ),
        below=(Case((wanted + ready).without(gone + 1, max(end for _, end in spans)), 5),),  # back after 5 s
        silent=(Case((wanted + ready).then(2), 5, wanted.long + 1),),
    )


def rank_keeps_restarting(world: World) -> Rule:
    record = recorded(world, "pdbus_controller_restarts_total", "restart")
    two = record.cut(0, sample(world, "restart", "start 1") + 2)  # with the scrape of that moment
    return Rule(
        lambda labels: f"{labels['instance']}/{labels['dp_rank']} was started again more than twice in ten minutes.",
        rings=(Case(record, 10, record.long - 1, ({"instance": "prefill-1", "dp_rank": "0"},)),),
        below=(Case(two.then(30), 10),),
        silent=(Case(record.then(61), 10, record.long + 60),),
    )


def requests_fail(world: World) -> Rule:
    record = recorded(world, "pdbus_controller_failed_total", "lost")
    return Rule(
        lambda labels: (
            f"Requests fail with {labels['code']}: grep request.failed in the controller's log for their rids."
        ),
        rings=(Case(record, 5, record.long - 1, ({"code": "peer_lost"},)),),
        below=(Case(recorded(world, "pdbus_controller_failed_total", "queue").then(60), 5),),  # cancelled, deadline
        silent=(Case(record.then(61), 5, record.long + 60),),
    )


def overloaded(world: World) -> Rule:
    record = recorded(world, "pdbus_controller_failed_total", "lost")
    first, last = record.grows(code="no_rank")
    deadlines = recorded(world, "pdbus_controller_failed_total", "queue").then(20)
    return Rule(
        lambda labels: "Requests are refused or pass their deadlines: too few ranks for the load.",
        rings=(
            Case(record.then(5), 20, last + 1, ({},)),
            Case(deadlines, 60, deadlines.grows(code="deadline")[0] + 3, ()),  # two at once, and no more
        ),
        below=(Case(record.frozen(first + 3).then(20), 20),),  # for a minute, and a minute's rate after it
        silent=(Case(record.then(10), 20, record.long + 9),),
    )


def slow_first_token(world: World) -> Rule:
    """Long prompts, every fifth, take 0.167 s at least, and are in the bucket from 0.15 s on or above: as slow as makes
    its lower bound 5 s they ring. As slow as makes the upper bound of all 5 s they don't."""
    record = recorded(world, 'pdbus_controller_ttft_seconds_bucket{role!="prefill"}', "steady")
    takes_s = PREFILL.step_s(LONG - LONG_SHARED, 0, LONG_SHARED)
    lower = max(bound for bound in BOUNDS_S if bound < takes_s)
    counts = {
        bound: sum((values[-1] or 0) - (values[0] or 0) for _, values in record.only(le=str(bound)).series)
        for bound in BOUNDS_S
    }
    upper = min(bound for bound, count in counts.items() if count == max(counts.values()))
    slow = record.slower(5.001 / lower)
    return Rule(
        lambda labels: "One of 100 requests waits N for its first token.",
        rings=(Case(slow, 20, record.long - 1, ({},)),),
        below=(Case(record.slower(5 / upper).then(16), 20),),
        silent=(Case(slow.then(16), 20, record.long + 15),),
    )


def kv_memory_full(world: World) -> Rule:
    """The streams go on for eight samples more, which are five minutes, however fast this machine is."""
    record = recorded(world, 'pdbus_node_kv_tokens{role!="prefill"}', "queue")
    (_, end) = record.where(lambda value: value > 0, instance="decode-0")
    record, last = record.longer(end - 1, 8), end + 7
    capacity = recorded(world, 'pdbus_node_kv_capacity_tokens{role!="prefill"}', "queue").then(8)
    (room,) = {value for _, values in capacity.series for value in values}
    assert room is not None
    begin, _ = record.where(lambda value: value > 0, instance="decode-0")
    (_, used) = record.only(instance="decode-0").series[0]
    held = [value for value in used[begin : last + 1] if value is not None]
    full = record.changed(lambda value: min(room, int(value / min(held) * room * 0.951) + 1), instance="decode-0")
    below = record.changed(lambda value: int(value / max(held) * room * 0.95), instance="decode-0")
    return Rule(
        lambda labels: f"{labels['instance']}/0 has no KV memory left: its requests wait for each other.",
        rings=(Case(full + capacity, 40, last, (of("decode-0", record=record),)),),
        below=(Case(below + capacity, 40),),
        silent=(Case(full.then(2) + capacity.then(2), 40, record.long + 1),),
    )


def reports_late(world: World) -> Rule:
    """A rank that is stopped 4 times as long, or until its report is just 5 s old."""
    ages = recorded(world, "pdbus_controller_report_age_seconds", "pause")
    ready = recorded(world, "pdbus_controller_ready", "pause")
    oldest = max(value or 0 for _, values in ages.only(instance="decode-1").series for value in values)
    late = ages.changed(lambda value: value * 4 if value > oldest / 2 else value, instance="decode-1")
    (_, end) = late.where(lambda value: value > 5, instance="decode-1")
    return Rule(
        lambda labels: f"{labels['instance']}/{labels['dp_rank']} has not reported its load for N s.",
        rings=(Case(late + ready, 10, end - 1, ({"instance": "decode-1", "dp_rank": "0"},)),),
        below=(
            Case(ages.changed(lambda value: value * 5 / oldest, instance="decode-1") + ready, 10),
            Case(late + ready.changed(lambda value: 0), 10),  # it is not ready: PdbusRankNotServing says more
        ),
        silent=(Case(late.then(2) + ready.then(2), 10, ages.long + 1),),
    )


def acknowledgements_lag(world: World) -> Rule:
    record = recorded(world, "pdbus_controller_acknowledgement_seconds_bucket", "pause")
    (first, _) = record.grows(instance="decode-1")
    counted: Counter[float] = Counter()
    for labels, values in record.only(instance="decode-1").series:
        counted[float(labels["le"])] += int((values[-1] or 0) - (values[0] or 0))
    upper = min(bound for bound, count in counted.items() if count == max(counted.values()))
    return Rule(
        lambda labels: f"{labels['instance']}/{labels['dp_rank']} takes N s to take in what it is sent.",
        rings=(Case(record.then(10), 10, first + 7, ({"instance": "decode-1", "dp_rank": "0"},)),),
        below=(Case(record.slower(2 / upper).then(30), 10),),  # 2 s at most
        silent=(Case(record.then(31), 10, record.long + 30),),
    )


def rooms_expire(world: World) -> Rule:
    record = recorded(world, "pdbus_broker_rooms_expired_total", "restart")
    return Rule(
        lambda labels: "Prefill legs whose decode leg never came: look at routers that send one leg alone.",
        rings=(Case(record, 5, record.long - 1, (of("pdbus_broker_rooms_expired_total", record=record),)),),
        below=(Case(recorded(world, "pdbus_broker_rooms_expired_total", "steady"), 5),),
        silent=(Case(record.then(61), 5, record.long + 60),),
    )


def messages_refused(world: World) -> Rule:
    """20 in five minutes: 24 times as many are more than one a second, also where a scrape missed the first ones; 14
    times as many are less."""
    selector = '{__name__=~"pdbus_(controller|broker)_rejected_total"}'
    record = recorded(world, selector, "knocks").after(60)
    rings, broker = record.crowded(24), record.only(__name__="pdbus_broker_rejected_total")
    return Rule(
        lambda labels: (
            f"Messages are turned down ({labels['reason']}): a peer of another version, or somebody at the door."
        ),
        rings=(
            Case(rings, 5, record.long - 1, ({"reason": "version"},)),
            Case(broker.crowded(24), 5, record.long - 1, ({"reason": "version"},)),
        ),
        below=(Case(record.crowded(14), 5),),
        silent=(Case(rings.then(61), 5, record.long + 60),),
    )


def keys_refused(world: World) -> Rule:
    selector = '{__name__=~"pdbus_(controller|broker)_peers_refused_total"}'
    record = recorded(world, selector, "knocks")
    assert KNOCKS > 5
    names = ({"domain": "clients"}, {"domain": "bootstrap"})
    return Rule(
        lambda labels: (
            f"Somebody whose key is not listed keeps knocking ({labels['domain']}): peer.refused in the part's "
            "log has the key and the address."
        ),
        rings=(Case(record.then(3), 5, record.long + 2, names),),
        below=(Case(record.capped(5).then(60), 5),),
        silent=(Case(record.then(61), 5, record.long + 60),),
    )


CASES: dict[str, Callable[[World], Rule]] = {
    "PdbusPartDown": part_down,
    "PdbusRankNotServing": rank_not_serving,
    "PdbusRoleWithoutRank": role_without_rank,
    "PdbusRankKeepsRestarting": rank_keeps_restarting,
    "PdbusRequestsFail": requests_fail,
    "PdbusOverloaded": overloaded,
    "PdbusSlowFirstToken": slow_first_token,
    "PdbusKvMemoryFull": kv_memory_full,
    "PdbusReportsLate": reports_late,
    "PdbusAcknowledgementsLag": acknowledgements_lag,
    "PdbusRoomsExpire": rooms_expire,
    "PdbusMessagesRefused": messages_refused,
    "PdbusKeysRefused": keys_refused,
}


# --- for promtool ---------------------------------------------------------------------------------------------------


def alone(name: str, rules: str) -> str:
    """A file with that rule of those in `rules`, and N for the value in its summary, which no hand reckons."""
    groups = yaml.safe_load(re.sub(r"\{\{ \$value[^}]*\}\}", "N", rules))["groups"]
    chosen = [rule for group in groups for rule in group["rules"] if rule["alert"] == name]
    return str(yaml.safe_dump({"groups": [{"name": name, "rules": chosen}]}))


def unit_tests(name: str, severity: str, rule: Rule) -> dict[str, Any]:
    """promtool's file for one rule."""
    tests, steps = [], set()
    for kind in ("rings", "below", "silent"):
        for number, case in enumerate(getattr(rule, kind)):
            steps.add(case.step_s)
            moments = range(case.record.long) if case.at is None else (case.at,)
            alerts = [
                {"exp_labels": labels | {"severity": severity}, "exp_annotations": {"summary": rule.summary(labels)}}
                for labels in case.labels
            ]
            tests.append({
                "name": f"{kind} {number}", "interval": f"{case.step_s}s", "input_series": case.record.written(),
                "alert_rule_test": [
                    {"eval_time": f"{at * case.step_s}s", "alertname": name, "exp_alerts": alerts} for at in moments
                ],
            })  # fmt: skip
    return {"rule_files": ["alerts.yml"], "evaluation_interval": f"{min(steps)}s", "tests": tests}
