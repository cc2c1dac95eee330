"""What each line of each panel has to show, reckoned from the traffic that `metrics_world` made and its clients saw.

`EXPECTED[title][legend]` has one or more `Look`s: at the end of a chapter, or at a moment in it, the panel's query (its
`$__rate_interval` being the time since the chapter began) shows these lines, by the text that Grafana writes beside
them, each within its bounds. What is not expected is 0, NaN or not drawn. Tolerances are those of the functions below:
of counts by the scrapes that there were, of times by what a client saw and the engine's own model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from metrics_world import (
    ALONE,
    AT_THE_RANK,
    CACHES,
    DECODE_KV,
    DECODE_RUNNING,
    DECODE_STEP_S,
    HELD_BACK,
    IN_VAIN,
    KNOCKS,
    KV_BYTES,
    LEASE_S,
    LONG,
    LONG_SHARED,
    NOISE,
    OUTPUT,
    OVER,
    PREFILL,
    QUEUED,
    SHORT,
    SHORT_SHARED,
    SLO_S,
    STREAMS,
    Chapter,
    Sent,
)

from bus.histogram import BOUNDS_S

Bounds = tuple[float, float]
Lines = dict[str, Bounds]
RANKS = ("prefill-0/0", "prefill-1/0", "decode-0/0", "decode-1/0")
PROMPT, SHARED = {"short": SHORT, "long": LONG}, {"short": SHORT_SHARED, "long": LONG_SHARED}


@dataclass(frozen=True)
class Look:
    chapter: str
    lines: Callable[[Chapter], Lines]
    moment: str = ""  # of the chapter; empty: its end


def exactly(value: float) -> Bounds:
    return value, value


def about(value: float, share: float = 0.05) -> Bounds:
    return value * (1 - share), value * (1 + share)


def perhaps(bounds: Bounds) -> Bounds:
    """Up to that, or not drawn."""
    return -1.0, bounds[1]


def a_second(count: float, chapter: Chapter) -> Bounds:
    """So many since the chapter began. Prometheus sees what came between the first and the last scrape in it, which was
    all, and may make up for the time at either end, in which nothing happened here."""
    return count / chapter.long_s * 0.9999, count / chapter.scraped_s * 1.0001


def seconds(low_s: float, high_s: float) -> Bounds:
    """Latencies are known by their buckets: from the lower bound of one's to the upper bound of the other's."""
    below = [bound for bound in BOUNDS_S if bound < low_s]
    return (below or [0.0])[-1], next(bound for bound in BOUNDS_S if bound >= high_s)


def quantile(q: float, least: Iterable[float], most: Iterable[float]) -> Bounds:
    """That of latencies, of each of which the least and the most is known: by buckets, and a place or two off."""
    low, high = sorted(least), sorted(most)
    at = int(q * len(low))
    return seconds(low[max(0, at - 2)], high[min(len(high) - 1, at + 1)])


def late_s(sent: list[Sent]) -> float:
    """By how much this machine is late, at most: twice what a client waited longer than the engine's steps take. A
    controller hears of a token by another way than the client, as late."""
    return 2 * max(each.total_s - computed_s(each) - (OUTPUT - 1) * DECODE_STEP_S for each in sent)


def ttft(q: float, sent: list[Sent]) -> Bounds:
    """Not less than the engine's step takes, nor more than the client saw."""
    late = late_s(sent)
    return quantile(q, map(computed_s, sent), [each.ttft_s + late for each in sent])


def tpot(q: float, sent: list[Sent]) -> Bounds:
    """Not more than all that the client saw but the prompt's step. The first token may be heard of late, so that it
    seems less than a step."""
    late, steps = late_s(sent), OUTPUT - 1
    most = [(each.total_s - computed_s(each) + late) / steps for each in sent]
    return quantile(q, [max(0.0, DECODE_STEP_S - late / steps)] * len(sent), most)


def side_by_side(sent: list[Sent]) -> int:
    """How many of them were under way at once, at most."""
    return max(sum(other.began_s <= each.began_s <= other.began_s + other.total_s for other in sent) for each in sent)


def of_a_rank(sent: Iterable[Sent], name: str) -> list[Sent]:
    return [each for each in sent if name in (each.prefill, each.decode)]


def kept(chapter: Chapter) -> Bounds:
    """Only the second controller goes by it. Those that were late for their client may have been in time there."""
    ttfts_s = [each.ttft_s for each in chapter.sent if each.by == "controller-1"]
    in_time = sum(ttft_s <= SLO_S for ttft_s in ttfts_s)
    return a_second(in_time, chapter)[0], a_second(len(ttfts_s), chapter)[1]


# --- the chapters' figures ----------------------------------------------------------------------------------------


def tokens(sent: Iterable[Sent], sizes: dict[str, int]) -> int:
    return sum(sizes[each.kind] for each in sent)


def by_rank(role: str, figure: Callable[[list[Sent]], Bounds]) -> Callable[[Chapter], Lines]:
    return lambda chapter: {
        name: figure(of_a_rank(chapter.sent, name))
        for name in RANKS
        if name.startswith(role) and of_a_rank(chapter.sent, name)
    }


def hits(chapter: Chapter) -> Lines:
    return by_rank("prefill", lambda sent: about(tokens(sent, SHARED) / tokens(sent, PROMPT), 0.01))(chapter)


def computed_s(each: Sent) -> float:
    return PREFILL.step_s(PROMPT[each.kind] - SHARED[each.kind], 0, SHARED[each.kind])


def busy(chapter: Chapter) -> Lines:
    """A prompt has a step, and each output token but the first; those that are under way together may share theirs. No
    rank works for a request longer than its client waits."""

    def between(work_s: Callable[[Sent], float], waited_s: Callable[[Sent], float]) -> Callable[[list[Sent]], Bounds]:
        return lambda sent: (
            a_second(sum(map(work_s, sent)) / side_by_side(sent), chapter)[0],
            a_second(sum(map(waited_s, sent)), chapter)[1],
        )

    lines = by_rank("prefill", between(computed_s, lambda each: each.ttft_s))(chapter)
    return lines | by_rank("decode", between(lambda _: (OUTPUT - 1) * DECODE_STEP_S, lambda each: each.total_s))(
        chapter
    )


def steps(chapter: Chapter) -> Lines:
    """The longest is not less than by the model of the sim engine, nor more than its client waited; what comes after
    the token is sent is a part of it, too."""

    def prefill(sent: list[Sent]) -> Bounds:
        return seconds(max(map(computed_s, sent)), max(each.ttft_s for each in sent) + late_s(sent))

    def decode(sent: list[Sent]) -> Bounds:
        return seconds(DECODE_STEP_S, max(each.total_s for each in sent) + late_s(sent))

    return by_rank("prefill", prefill)(chapter) | by_rank("decode", decode)(chapter)


def ttft_by_rank(chapter: Chapter) -> Lines:
    """A prefill rank's is from its own step to what the client saw; a decode rank's is the client's."""
    lines = by_rank("decode", lambda sent: ttft(0.99, sent))(chapter)
    return lines | by_rank(
        "prefill", lambda sent: seconds(max(map(computed_s, sent)), max(each.ttft_s for each in sent) + late_s(sent))
    )(chapter)


def tpot_by_rank(chapter: Chapter) -> Lines:
    return by_rank("decode", lambda sent: tpot(0.99, sent))(chapter)


def moved(chapter: Chapter) -> Lines:
    """The whole prompt's: a sim decode rank fetches it whatever its own cache has."""
    return by_rank("decode", lambda sent: a_second(tokens(sent, PROMPT) * KV_BYTES, chapter))(chapter)


def states(**counts: int) -> Callable[[Chapter], Lines]:
    return lambda chapter: {name.replace("_", " "): exactly(count) for name, count in counts.items()}


def wanted(prefill: int, decode: int) -> Callable[[Chapter], Lines]:
    """Declared ones have no model; those that were ready once have theirs."""
    counts = {"prefill": prefill, "decode": decode}
    return lambda chapter: {
        f"{role} {model}".strip(): exactly(n) for role, n in counts.items() for model in ("", "sim")
    }


def streamed(chapter: Chapter, unsaid_s: float = 0.0) -> Bounds:
    """Tokens in the memory of decode rank 0 while its streams run: no fewer than their clients had before the page was
    made, but for `unsaid_s`, and no more than steps can have made since these asked."""
    prompts, made = STREAMS * (SHORT - 1), chapter.facts["streaming_s"] / DECODE_STEP_S + 2
    return (
        prompts + max(0.0, chapter.facts["streamed before"] - STREAMS * unsaid_s / DECODE_STEP_S),
        prompts + STREAMS * made,
    )


def scaled(bounds: Bounds, by: float) -> Bounds:
    return bounds[0] / by, bounds[1] / by


def fresh(chapter: Chapter) -> Lines:
    """Return the bounds of a report's age, seconds: each rank reports four times a second, and is lost after a
    lease."""
    return dict.fromkeys(RANKS, (0.0, LEASE_S / 2))


def stale(chapter: Chapter) -> Lines:
    """Return the bounds of the age while one rank is stopped: its last report is about as old as the stop was when the
    page was made. It may have been on its way then, or have had the age of a usual report already."""
    low, high = chapter.facts["shown_s"] - 0.5, chapter.facts["stopped_s"] + LEASE_S / 2
    return fresh(chapter) | {"decode-1/0": (low, high)}


def lag(chapter: Chapter) -> Bounds:
    """Return the bounds of the acknowledgement's delay, seconds: at least the stop after the request was sent, at most
    the client's time to the first token. Acknowledgements come with reports, and are looked for once a second."""
    (sent,) = chapter.sent
    late = sent.ttft_s - chapter.facts["stopped_s"]
    return seconds(chapter.facts["stopped_s"] - 1.1 - 2 * late, sent.ttft_s + 0.5)


def waited(q: float) -> Callable[[Chapter], Lines]:
    """Return the bounds of a time to the first token: it came after the stop, and no later than the client had it."""

    def bounds(chapter: Chapter) -> Bounds:
        (sent,) = chapter.sent
        return seconds(chapter.facts["stopped_s"] - 0.1, sent.ttft_s + 0.5)

    return line(f"p{q:g}", bounds)


def went_on(q: float) -> Callable[[Chapter], Lines]:
    """The stop is no part of a time per output token: what is left is three steps, and how late they were."""
    return lambda chapter: {
        f"p{q:g}": seconds(
            0.0, (max(each.total_s for each in chapter.sent) - chapter.facts["stopped_s"]) / (OUTPUT - 1)
        )
    }


def regret(chapter: Chapter) -> Lines:
    """The n-th prompt at the rank that hangs met n before it, where the other rank had none. Of the two legs of a pair,
    which come at once, only one is looked at, and the first may come with another; at decode the fuller rank was the
    other one."""
    least, most = sum(range(ALONE)) / ALONE, sum(range(1, AT_THE_RANK)) / (AT_THE_RANK - 1)
    return {"prefill: total_tokens": (QUEUED * least * 0.95, QUEUED * most * 1.05)}


def line(name: str, bounds: Callable[[Chapter], Bounds]) -> Callable[[Chapter], Lines]:
    return lambda chapter: {name: bounds(chapter)}


def each_second(name: str, count: float) -> Callable[[Chapter], Lines]:
    return line(name, lambda chapter: a_second(count, chapter))


NONE: Callable[[Chapter], Lines] = lambda chapter: {}  # noqa: E731
RANK = "{{instance}}/{{dp_rank}}"

EXPECTED: dict[str, dict[str, list[Look]]] = {
    "Requests": {
        "done": [
            Look("steady", line("done", lambda now: a_second(len(now.sent), now))),
            Look("lost", NONE),
        ],
        "{{code}}": [
            Look("steady", NONE),
            Look("queue", lambda now: {
                "cancelled": a_second(AT_THE_RANK + OVER + HELD_BACK + STREAMS, now),
                "deadline": a_second(HELD_BACK, now)}),
            # A lone leg that hears nothing for 3 s is submitted once more: the rank may be gone by then.
            Look("restart", lambda now: {
                "peer_lost": a_second(CACHES, now), "no_rank": perhaps(a_second(CACHES, now))}),
            Look("lost", lambda now: {"peer_lost": a_second(4, now), "no_rank": a_second(IN_VAIN, now)}),
        ],
    },
    "Time to first token": {
        f"p{q:g}": [
            Look("steady", line(f"p{q:g}", lambda now, q=q: ttft(q / 100, now.sent))),
            Look("pause", waited(q)),
        ]
        for q in (50, 90, 99)
    },
    "First tokens in time": {
        "kept": [Look("steady", line("kept", kept))],
        "missed": [
            Look("queue", each_second("missed", HELD_BACK)),
            Look("lost", each_second("missed", IN_VAIN / 2)),
        ],
        "exempt": [Look("steady", NONE), Look("queue", each_second("exempt", HELD_BACK)), Look("lost", NONE)],
    },
    "Time per output token": {
        f"p{q:g}": [
            Look("steady", line(
                f"p{q:g}", lambda now, q=q: tpot(q / 100, now.sent))),
            Look("pause", went_on(q)),
        ]
        for q in (50, 90, 99)
    },
    "Tokens": {
        "in, as they begin": [
            Look("steady", line("in, as they begin", lambda now: a_second(tokens(now.sent, PROMPT), now)))],
        "of those, from prefix caches": [
            Look("steady", line("of those, from prefix caches", lambda now: a_second(tokens(now.sent, SHARED), now)))],
        "out": [Look("steady", line("out", lambda now: a_second(OUTPUT * len(now.sent), now)))],
    },
    "Live and waiting": {
        "live": [
            Look("steady", NONE),
            Look("queue", line("live", lambda now: exactly(AT_THE_RANK + OVER + HELD_BACK + STREAMS)), "queued"),
        ],
        "waiting": [
            Look("steady", NONE),
            Look("queue", line("waiting", lambda now: exactly(OVER + HELD_BACK)), "queued"),
        ],
    },
    "Prefix-cache hits": {
        RANK: [
            Look("steady", hits),
        ],
    },
    "States": {
        "{{role}} {{state}}": [
            Look("steady", states(prefill_ready=2, decode_ready=2)),
            Look("lost", states(prefill_ready=2, decode_lost=2), "missed"),
            Look("lost", states(prefill_ready=2, decode_ready=2)),
        ],
    },
    "Wanted roles": {
        "{{role}} {{model}}": [
            Look("steady", wanted(2, 2)),
            Look("lost", wanted(2, 0), "missed"),
            Look("lost", wanted(2, 2)),
        ],
    },
    "Restarts": {
        RANK: [
            Look("steady", NONE),
            Look("restart", line("prefill-1/0", lambda now: about(3))),
            Look("lost", lambda now: {
                "prefill-1/0": about(3), "decode-0/0": about(1), "decode-1/0": about(1)}),
        ],
    },
    "Run slots in use": {
        RANK: [
            Look("steady", NONE),
            Look("queue", lambda now: {
                "prefill-1/0": exactly(1.0), "decode-0/0": exactly(STREAMS / DECODE_RUNNING)}, "queued"),
        ],
    },
    "KV memory in use": {
        RANK: [
            Look("steady", NONE),
            Look("queue", line("decode-0/0", lambda now: scaled(streamed(now), DECODE_KV)), "queued"),
        ],
    },
    "Estimated load": {
        RANK: [
            Look("queue", lambda now: {
                "prefill-1/0": exactly(QUEUED * AT_THE_RANK),
                "decode-1/0": exactly(QUEUED * (AT_THE_RANK - ALONE)),
                "decode-0/0": streamed(now, LEASE_S / 2)}, "queued"),
        ],
    },
    "Prompt tokens queued": {
        RANK: [
            Look("steady", NONE),
            Look("queue", lambda now: {
                "prefill-1/0": exactly(QUEUED * AT_THE_RANK),
                "decode-1/0": exactly(QUEUED * (AT_THE_RANK - ALONE))}, "queued"),
        ],
    },
    "Time to first token, p99 by rank": {RANK: [Look("steady", ttft_by_rank)]},
    "Time per output token, p99 by rank": {RANK: [Look("steady", tpot_by_rank)]},
    "Forward steps, p99 by rank": {RANK: [Look("steady", steps)]},
    "Engine busy": {RANK: [Look("steady", busy)]},
    "Age of load reports": {RANK: [Look("steady", fresh), Look("pause", stale, "going on")]},
    "Acknowledgement lag, p99": {
        RANK: [Look("pause", line("decode-1/0", lag))],
    },
    "Rooms": {
        "registered": [
            Look("steady", line("registered", lambda now: a_second(len(now.sent), now))),
            Look("restart", each_second("registered", CACHES)),
        ],
        "expired": [Look("steady", NONE), Look("restart", each_second("expired", AT_THE_RANK + CACHES))],
        "alive": [
            Look("steady", NONE),
            Look("queue", line("alive", lambda now: exactly(AT_THE_RANK)), "queued"),
            Look("restart", NONE),
        ],
    },
    "KV caches moved": {RANK: [Look("steady", moved)]},
    "Refused messages": {
        f"{part}: {{{{reason}}}}": [Look("steady", NONE), Look("knocks", each_second(f"{part}: version", NOISE))]
        for part in ("controller", "broker", "node")
    } | {
        f"{part}: a key for {{{{domain}}}}": [
            Look("steady", NONE), Look("knocks", each_second(f"{part}: a key for {domain}", KNOCKS))]
        for part, domain in (("controller", "clients"), ("broker", "bootstrap"))
    },
    "Regret": {"{{role}}: {{method}}": [Look("queue", regret)]},
}  # fmt: skip


# --- a panel and its expectation ------------------------------------------------------------------------------------


class TwoLines(Exception):
    """They have the same legend."""


def written(legend: str, labels: dict[str, str]) -> str:
    """The text that Grafana writes beside a line."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()


def drawn(legend: str, answer: list[Any]) -> Lines:
    """A query's answer by legend. TwoLines where these cannot be told apart."""
    lines: dict[str, Bounds] = {}
    for each in answer:
        name, value = written(legend, each["metric"]), float(each["value"][1])
        if name in lines:
            raise TwoLines(name)
        lines[name] = (value, value)
    return lines


def faults(expected: Lines, shown: Lines) -> list[str]:
    """What is wrong, a line each."""
    found = []
    for name in sorted(expected.keys() | shown.keys()):
        value = shown.get(name, (math.nan, math.nan))[0]
        low, high = expected.get(name, (0.0, 0.0))
        if math.isnan(value) and (name not in expected or low < 0):
            continue
        if not low <= value <= high:
            found.append(f"{name!r} is {value:g}, not {low:g} to {high:g}")
    return found
