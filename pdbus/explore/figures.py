"""Makes the content of a replay's page from the runs' facts: which requests, in what columns, and which of them with
the whole decision. Owns the choice and what is left out, in sentences; draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bus import build
from controller.decisions import SHOWN
from controller.trips import TRIPS
from pdbus.explore.facts import LegFacts, RunFacts
from pdbus.explore.packing import Pack

FULL = 500  # requests with the whole decision
MAX_RUNS = 12
MAX_CELLS = 240_000  # requests times runs
MAX_TIMES, MAX_ROWS = 400, 128  # of a heat map
BINS = 100  # of the hit rate over time
SHARES = [*(place / 200 for place in range(200)), *(0.995 + place / 1000 for place in range(6))]  # of a distribution


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run to show, under its name."""

    name: str
    facts: RunFacts


@dataclass(frozen=True, slots=True)
class Loads:
    """The share of requests that kept their SLO, over a load: for each line of the figure its points, by `x`."""

    x: str  # what the load is
    lines: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Explored:
    """All that a page shows. `heads` are those of the table, whose `rows` each begin with a name. `loads` None: there
    was one. `notes` say for people what else they have to know."""

    command: Literal["replay", "plan"]
    title: str
    runs: Sequence[ShownRun]  # one or more, the best first
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    loads: Loads | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def packed(explored: Explored) -> bytes:
    """Return what the page shows, packed for its script."""
    pack, notes = Pack(), [*explored.notes]
    runs = explored.runs[:MAX_RUNS]
    if left := len(explored.runs) - len(runs):
        notes.append(f"{left} more rows are in the table alone: the page shows {MAX_RUNS} runs at most.")
    requests = _Requests([run.facts for run in runs])
    spreads = requests.spreads()
    full = most_different(spreads, FULL)
    shown = shown_places(len(requests.keys), full, max(1, MAX_CELLS // len(runs)))
    if len(shown) < len(requests.keys):
        each = _ordinal(_step(requests, runs))
        notes.append(
            f"{len(shown):,} of {len(requests.keys):,} requests are here: every {each} one, and those that differ "
            "most. The distributions are of all."
        )
    if len(full) < len(shown):
        what = "the methods differ most, in seconds to the first token" if len(runs) > 1 else "the first token was last"
        notes.append(
            f"The whole decision is kept for the {len(full):,} requests in which {what}; of the others the rank chosen "
            "and the next best."
        )
    several = {(run.facts.prefill_ranks, run.facts.unified_ranks, run.facts.decode_ranks) for run in runs}
    if any(max(ranks[0] + ranks[1], ranks[2]) > MAX_ROWS for ranks in several):
        notes.append(f"A heat map has {MAX_ROWS} rows at most: each shows the mean of neighbouring ranks.")
    rids = requests.rids()
    head: dict[str, Any] = {
        "command": explored.command, "title": explored.title, "version": build.version(), "notes": notes,
        "heads": [*explored.heads], "rows": [[*row] for row in explored.rows], "trips": [*TRIPS],
        "loads": explored.loads and {"x": explored.loads.x, "lines": [*explored.loads.lines.items()]},
        "slo": [runs[0].facts.ttft_slo_s, runs[0].facts.tpot_slo_s], "total": len(requests.keys),
        "numbers": pack.add("u32", shown),
        "rids": [rids[place] for place in shown] if any(rids) else None,
        "prompt": pack.add("u32", requests.of("prompt_tokens", shown)),
        "output": pack.add("u32", requests.of("output_tokens", shown)),
        "full": pack.add("u32", full), "shares": pack.add("f32", SHARES),
        "runs": [_run(pack, run, requests.numbers[at], shown, full) for at, run in enumerate(runs)],
    }  # fmt: skip
    return pack.packed(head)


def most_different(spreads: Sequence[float], count: int) -> list[int]:
    """Return the places of the `count` greatest of `spreads`, in order of the places; of equals, the first."""
    return sorted(sorted(range(len(spreads)), key=lambda place: (-spreads[place], place))[:count])


def shown_places(total: int, always: Sequence[int], most: int) -> list[int]:
    """Return places of requests to show: all `total`, or where those are more than `most`, each so manieth, and those
    that are shown always."""
    return sorted({*range(0, total, -(-total // most)), *always})


def quantiles(values: list[float]) -> list[float]:
    """Return the quantiles of `values` at SHARES; empty for none."""
    values.sort()
    last = len(values) - 1
    return [values[round(share * last)] for share in SHARES] if values else []


class _Requests:
    """The requests that count in any of the runs, in the order of the first. `numbers` has for each run what it calls
    each: -1, where it does not count there."""

    def __init__(self, runs: Sequence[RunFacts]) -> None:
        self._runs = runs
        counted = [{facts.keys[number]: number for number in facts.counted} for facts in runs]
        self.keys = [*dict.fromkeys(key for each in counted for key in each)]
        self.numbers = [[each.get(key, -1) for key in self.keys] for each in counted]

    def _first(self, place: int) -> tuple[RunFacts, int]:
        return next((run, of[place]) for run, of in zip(self._runs, self.numbers, strict=True) if of[place] >= 0)

    def of(self, column: str, places: Sequence[int]) -> list[Any]:
        """Return a column that is the same in all runs."""
        return [getattr(run, column)[number] for run, number in map(self._first, places)]

    def rids(self) -> list[str]:
        """Return the rids that the trace says, as text that a page can have."""
        return [rid.encode("utf-8", "replace").decode() for rid in self.of("rids", range(len(self.keys)))]

    def spreads(self) -> list[float]:
        """Return by how many seconds to the first token the runs differ in each request; for a single run these seconds
        themselves."""
        found = []
        for place in range(len(self.keys)):
            pairs = zip(self._runs, self.numbers, strict=True)
            seconds = [ttft_s(run, of[place]) for run, of in pairs if of[place] >= 0]
            found.append(max(seconds) - (min(seconds) if len(self._runs) > 1 else 0.0))
        return found


def ttft_s(run: RunFacts, number: int) -> float:
    """Return the seconds from a request's arrival to its first token."""
    return run.first_token_s[number] - run.arrived_s[number]


def tpot_s(run: RunFacts, number: int) -> float:
    """Return the seconds for each token after the first; NaN where there is none, or nothing decodes."""
    tokens = run.output_tokens[number] - 1
    decodes = run.decode_ranks or run.unified_ranks
    return (run.finished_s[number] - run.first_token_s[number]) / tokens if tokens > 0 and decodes else math.nan


def _step(requests: _Requests, runs: Sequence[ShownRun]) -> int:
    return -(-len(requests.keys) // max(1, MAX_CELLS // len(runs)))


def _run(pack: Pack, run: ShownRun, numbers: list[int], shown: list[int], full: list[int]) -> dict[str, Any]:
    facts = run.facts
    here = [numbers[place] for place in shown]

    def column(value: Any, none: float = math.nan) -> list[float]:
        return [none if number < 0 else value(number) for number in here]

    per_token = [tpot_s(facts, number) for number in facts.counted]
    return {
        "name": run.name, "began": facts.began_s,
        "ttfts": pack.add("f32", quantiles([ttft_s(facts, number) for number in facts.counted])),
        "tpots": pack.add("f32", quantiles([value for value in per_token if not math.isnan(value)])),
        "arrived": pack.add("f32", column(facts.arrived_s.__getitem__)),
        "ttft": pack.add("f32", column(lambda number: ttft_s(facts, number))),
        "tpot": pack.add("f32", column(lambda number: tpot_s(facts, number))),
        "waited": pack.add("f32", column(lambda number: facts.decided_s[number] - facts.arrived_s[number])),
        "cached": pack.add("u32", column(facts.cached.__getitem__, 0)),
        "regret": pack.add("i32", column(facts.regret.__getitem__, -1)),
        "trip": pack.add("i16", column(facts.trips.__getitem__, -1)),
        "here": pack.add("f32", column(facts.here_s.__getitem__)),
        "there": pack.add("f32", column(facts.there_s.__getitem__)),
        "legs": [_leg(pack, leg, column) for leg in facts.legs.values()],
        "why": [_why(facts, numbers[place]) for place in full],
        "hits": _hits(pack, facts),
        "maps": [*_maps(pack, facts)],
    }  # fmt: skip


def _leg(pack: Pack, leg: LegFacts, column: Any) -> dict[str, Any]:
    """Pack the decisions for one leg in short: the rank chosen and the next best, and what they cost."""

    def at(values: Sequence[float], place: int, none: float) -> list[float]:
        made: list[float] = column(lambda number: values[number * SHOWN + place], none)
        return made

    return {
        "role": leg.role, "method": leg.method, "unit": leg.unit,
        "rank": pack.add("i16", at(leg.ranks, 0, -1)), "cost": pack.add("f32", at(leg.costs, 0, math.nan)),
        "next": pack.add("i16", at(leg.ranks, 1, -1)), "next_cost": pack.add("f32", at(leg.costs, 1, math.nan)),
        "queued": pack.add("i32", column(leg.queued.__getitem__, -1)),
    }  # fmt: skip


def _why(facts: RunFacts, number: int) -> list[str]:
    """Return why the legs of a request went to their ranks, as `pdbus trace --why` says it."""
    if number < 0:
        return []
    weighed = ((leg.role, leg.weighed(number, facts.rooms[number])) for leg in facts.legs.values())
    return [f"{role}: {each}" for role, each in weighed if each is not None]


def _hits(pack: Pack, facts: RunFacts) -> dict[str, Any]:
    """Pack the share of prompt tokens that were found cached over time, by arrival."""
    arrived = [facts.arrived_s[number] for number in facts.counted]
    bins = min(BINS, max(1, len(arrived) // 20))
    width_s = (max(arrived) - facts.began_s) / bins or 1.0
    found, prompts = [0] * bins, [0] * bins
    for number, at_s in zip(facts.counted, arrived, strict=True):
        place = min(bins - 1, int((at_s - facts.began_s) / width_s))
        found[place] += facts.cached[number]
        prompts[place] += facts.prompt_tokens[number]
    shares = [hit / tokens if tokens else math.nan for hit, tokens in zip(found, prompts, strict=True)]
    return {"width": width_s, "share": pack.add("f32", shares)}


def _maps(pack: Pack, facts: RunFacts) -> Iterator[dict[str, Any]]:
    """Pack the heat maps of a run: ranks from top to bottom, and time."""
    prompt, unified = facts.prefill_ranks, facts.unified_ranks
    for role, samples, first, ranks in (
        ("prefill", facts.load, 0, prompt),
        ("unified", facts.load, prompt, unified),
        ("decode", facts.decode_load, 0, facts.decode_ranks),
    ):
        if ranks and samples:
            width = -(-len(samples) // MAX_TIMES)  # samples in a column
            height = -(-ranks // MAX_ROWS)  # ranks in a row
            bins = [samples[at : at + width] for at in range(0, len(samples), width)]
            rows = [range(first + at, first + min(at + height, ranks)) for at in range(0, ranks, height)]
            values = [
                sum(row[rank] for row in samples for rank in group) / (len(samples) * len(group))
                for group in rows
                for samples in bins
            ]
            yield {
                "role": role, "unit": "requests" if role == "decode" else "tokens", "ranks": ranks, "per_row": height,
                "rows": len(rows), "step": width * facts.sample_s, "values": pack.add("u32", map(round, values)),
            }  # fmt: skip


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 < number % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
