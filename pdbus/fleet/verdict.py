"""The sentences about a fleet at its last sample, the worst first: what is wrong, which ranks do badly and
why, which requests wait. None: all is well. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from bus.wire.codes import MEANINGS
from bus.wire.messages import MemberKey, QueueStatus, RankStatus
from pdbus.fleet.conditions import sentence_of
from pdbus.fleet.figures import DEAD, Sample, dead_sentence, unserved_of
from pdbus.fleet.formatting import age, share
from pdbus.fleet.history import WINDOW_S, History

WAITS_S = 2.0  # a queue is worth a sentence once its first request has waited for this long
MISSED_SHARE = 0.1  # so are SLOs, when more of them than this were missed
FAILED_SHARE = 0.01  # and failures, when they are more of all that ended
FEW = 10  # first tokens with an SLO that say nothing yet


ALIKE = 5  # sentences of one kind that are given in full

Kind = Literal["unserved", "dead", "broker", "failing", "queue", "slo", "slow", "full", "link", "cold", "note"]


class Line(NamedTuple):
    """A sentence without its full stop. `level` is `bad` where requests fail or soon will, `warn` where they take
    longer than they could, `note` for what is said about the page. `rank` is the one that it is of, if it is of one."""

    level: Literal["bad", "warn", "note"]
    kind: Kind
    text: str
    rank: MemberKey | None = None


_ORDER: tuple[Kind, ...] = (
    "unserved",
    "dead",
    "broker",
    "failing",
    "queue",
    "slo",
    "slow",
    "full",
    "link",
    "cold",
    "note",
)


class Slos(NamedTuple):
    """First tokens that kept and missed their SLO lately."""

    kept: int = 0
    missed: int = 0


def lines_of(history: History, slos: Slos, *, asks_broker: bool) -> list[Line]:
    """Return what there is to say; empty before the first sample too."""
    sample = history.last
    return list(_lines(history, sample, slos, asks_broker)) if sample is not None else []


def shortened(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with ALIKE of a kind at most, and how many more there are."""
    number: Counter[Kind] = Counter()
    kept: list[Line] = []
    for line in lines:
        number[line.kind] += 1
        if number[line.kind] <= ALIKE:
            kept.append(line)
    more = [(line, number[line.kind] - ALIKE) for line in {line.kind: line for line in lines}.values()]
    rest = [Line(line.level, line.kind, f"so are {count} more") for line, count in more if count > 0]
    return sorted([*kept, *rest], key=lambda line: _ORDER.index(line.kind))


def _lines(history: History, sample: Sample, slos: Slos, asks_broker: bool) -> Iterator[Line]:
    status = sample.status
    dead = [rank for rank in status.ranks if rank.state in DEAD]
    for sentence in unserved_of(status):
        yield Line("bad", "unserved", sentence)
    reasons = _reasons(history) if dead else {}
    for rank in dead:
        key = rank.instance, rank.dp_rank
        why = reasons.get((*key, rank.state))
        left = _left(rank, status.ranks)
        yield Line("bad", "dead", "; ".join((dead_sentence(rank) + (f" ({why})" if why else ""), left)), key)
    if asks_broker and sample.broker is None and any(rank.endpoint for rank in status.ranks):
        yield Line("bad", "broker", "no broker answers: prefill ranks cannot be found by room, and loads do not come")
    failed, done = history.failed_lately()
    ours = Counter({code: count for code, count in failed.items() if not _of_client(code)})
    if (total := ours.total()) >= FEW and total > FAILED_SHARE * (total + done):
        ended = f"{total:,} of {total + done:,} requests that ended in the last {WINDOW_S:.0f} seconds"
        yield Line("bad", "failing", f"{ended} failed, most of them with the code {ours.most_common(1)[0][0]}")
    if status.queue is not None and status.queue.oldest_s >= WAITS_S:
        yield Line("warn", "queue", _queue_sentence(status.queue))
    counted = slos.kept + slos.missed
    if counted >= FEW and slos.missed > MISSED_SHARE * counted:
        missed = f"{share(slos.missed / counted)} of first tokens missed their SLO in the last minute"
        yield Line("warn", "slo", missed)
    found = history.conditions()
    for rank in status.ranks:
        for each in found.get((rank.instance, rank.dp_rank), ()):
            yield Line("warn", each.what, sentence_of(rank, each), (rank.instance, rank.dp_rank))
    if status.ranks and not any(rank.endpoint for rank in status.ranks):
        yield Line("note", "note", "loads, events and the queue are shown to a viewer's or an admin's key alone")
    elif status.ranks and status.events is None:
        yield Line(
            "note", "note", "this controller is older than this page, and keeps no events and no figures of its queue"
        )


def _of_client(code: str) -> bool:
    """Return true if the client asked for what was wrong, or for the end."""
    return code in MEANINGS and MEANINGS[code].severity == "debug"


def _reasons(history: History) -> dict[tuple[str, int, str], str]:
    """Return why each rank came to its state, by the last event of it."""
    events = (news.event for news in history.news if news.event is not None)
    return {(event.instance, event.dp_rank, event.what): event.phrase for event in events if event.instance}


def _left(dead: RankStatus, ranks: tuple[RankStatus, ...]) -> str:
    kind = [rank for rank in ranks if (rank.role, rank.model) == (dead.role, dead.model) and rank.state != "gone"]
    ready = sum(rank.state == "ready" for rank in kind)
    return f"{ready} of {len(kind)} {dead.role} ranks are ready"


def _queue_sentence(queue: QueueStatus) -> str:
    many = f"{queue.requests} requests wait" if queue.requests > 1 else "a request waits"
    whom = ""
    if queue.kinds:
        most = max(queue.kinds, key=lambda kind: kind.requests)
        some = "" if most.requests == queue.requests else f"{most.requests} of them "
        whom = f", {some}for room at {' and '.join(f'a {role} rank' for role in dict.fromkeys(most.roles))}"
    return f"{many} at the controller{whom}; the first has waited for {age(queue.oldest_s)}"
