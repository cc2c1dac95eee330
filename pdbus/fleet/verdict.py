"""The verdict on a fleet at its last sample: a headline, and sentences, the worst first: what is wrong, which requests
wait, which ranks do badly and why. None: all is well. Terminal, page and `pdbus status` have the same. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from bus.wire.codes import MEANINGS
from bus.wire.messages import MemberKey, QueuedKind, QueueStatus, RankStatus, Role, Status
from pdbus.fleet.conditions import WAITS_S, sentence_of, taken
from pdbus.fleet.figures import DEAD, Sample, dead_sentence, slo_of, unserved_of
from pdbus.fleet.formatting import age, share
from pdbus.fleet.history import WINDOW_S, History

MISSED_SHARE = 0.1  # SLOs are worth a sentence when more of them than this were missed
FAILED_SHARE = 0.01  # and failures, when they are more of all that ended
FEW = 10  # first tokens with an SLO that say nothing yet
CROWDED = 0.8  # a role is short of room when its ranks are taken by more than this, on average
ALIKE = 3  # sentences of one kind that are given in full

Level = Literal["bad", "late", "warn", "note"]
Kind = Literal["unserved", "dead", "broker", "failing", "queue", "slo", "slow", "full", "link", "cold", "note"]
_LEVELS: dict[Kind, Level] = {  # the worst first
    "unserved": "bad", "dead": "bad", "broker": "bad", "failing": "bad", "queue": "late", "slo": "late",
    "slow": "warn", "full": "warn", "link": "warn", "cold": "warn", "note": "note",
}  # fmt: skip
_ORDER = tuple(_LEVELS)
MARKS: dict[Level, str] = {"bad": "!", "late": "*", "warn": "~"}  # before a line in a terminal


class Line(NamedTuple):
    """A sentence without its full stop. `rank` is the one that it is of, if it is of one."""

    kind: Kind
    text: str
    rank: MemberKey | None = None

    @property
    def level(self) -> Level:
        """`bad` where requests fail or soon will, `late` where many wait or miss their SLOs, `warn` where some take
        longer than they could, `note` for what concerns the page."""
        return _LEVELS[self.kind]


def lines_of(history: History, *, asks_broker: bool) -> list[Line]:
    """Return what there is to say; empty before the first sample too."""
    sample = history.last
    return list(_lines(history, sample, asks_broker)) if sample is not None else []


def headline_of(lines: Sequence[Line], status: Status) -> tuple[Level, str] | None:
    """Return the headline of `lines_of`, and its level; None: all is well."""
    kinds = [kind for kind in dict.fromkeys(line.kind for line in lines) if kind != "note"]
    words = ", and ".join(filter(None, (_headline(kind, lines, status) for kind in kinds)))
    return (_LEVELS[kinds[0]], words[0].upper() + words[1:]) if kinds else None


def shortened(lines: Sequence[Line], alike: int = ALIKE) -> list[Line]:
    """Return the lines with `alike` of a kind at most, and how many more there are."""
    number: Counter[Kind] = Counter()
    kept: list[Line] = []
    for line in lines:
        number[line.kind] += 1
        if number[line.kind] <= alike:
            kept.append(line)
    more = [Line(kind, f"so are {count - alike} more") for kind, count in number.items() if count > alike]
    return sorted([*kept, *more], key=lambda line: _ORDER.index(line.kind))


def _lines(history: History, sample: Sample, asks_broker: bool) -> Iterator[Line]:
    status = sample.status
    dead = [rank for rank in status.ranks if rank.state in DEAD]
    for sentence in unserved_of(status):
        yield Line("unserved", sentence)
    reasons = _reasons(history) if dead else {}
    for rank in dead:
        key = rank.instance, rank.dp_rank
        why = reasons.get((*key, rank.state))
        left = _left(rank, status.ranks)
        yield Line("dead", "; ".join((dead_sentence(rank) + (f" ({why})" if why else ""), left)), key)
    if asks_broker and sample.broker is None and any(rank.endpoint for rank in status.ranks):
        yield Line("broker", "no broker answers: prefill ranks cannot be found by room, and loads do not come")
    failed, done = history.failed_lately()
    ours = Counter({code: count for code, count in failed.items() if not _of_client(code)})
    if (total := ours.total()) >= FEW and total > FAILED_SHARE * (total + done):
        ended = f"{total:,} of {total + done:,} requests that ended in the last {WINDOW_S:.0f} seconds"
        yield Line("failing", f"{ended} failed, most of them with the code {ours.most_common(1)[0][0]}")
    if status.queue is not None and status.queue.oldest_s >= WAITS_S:
        yield Line("queue", _queue_sentence(status.queue, status))
    kept, missed = history.slos_lately()
    if kept + missed >= FEW and missed > MISSED_SHARE * (kept + missed):
        yield Line("slo", f"{share(missed / (kept + missed))} of first tokens missed their SLO in the last minute")
    found = history.conditions()
    for rank in status.ranks:
        for each in found.get((rank.instance, rank.dp_rank), ()):
            yield Line(each.what, sentence_of(rank, each), (rank.instance, rank.dp_rank))
    if status.ranks and not any(rank.endpoint for rank in status.ranks):
        yield Line("note", "loads, events and the queue are shown to a viewer's or an admin's key alone")
    elif status.ranks and status.events is None:
        yield Line("note", "this controller is older than this page, and keeps no events and no figures of its queue")


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
    return f"{ready} of {len(kind)} {dead.role} ranks {'is' if ready == 1 else 'are'} ready"


# --- the queue -------------------------------------------------------------------------------------------------------


def _queue_sentence(queue: QueueStatus, status: Status) -> str:
    many = f"{queue.requests:,} requests wait" if queue.requests > 1 else "a request waits"
    whom = ""
    if queue.kinds:
        most = max(queue.kinds, key=lambda kind: kind.requests)
        some = "" if most.requests == queue.requests else f"{most.requests:,} of them "
        whom = f", {some}for room at {_places(short_of(most, status))}" + (" of their choice" if most.pinned else "")
    return f"{many} at the controller{whom}; the first has waited for {age(queue.oldest_s)}"


def _places(roles: Iterable[Role]) -> str:
    return " and ".join(f"a {role} rank" for role in roles)


def short_of(kind: QueuedKind, status: Status) -> tuple[Role, ...]:
    """Return the roles, of those that these requests wait for, which have no room: whose ready ranks are mostly taken;
    else, where the controller keeps prompts until a rank is free for them (`--queue-order slo`), those that compute
    prompts. No figure tells: all of them."""
    roles = tuple(dict.fromkeys(kind.roles))
    if kind.pinned:
        return roles
    crowded = []
    for role in roles:
        found = [taken(rank) for rank in _ready(status, role) if kind.model in ("", rank.model)]
        if known := [value for value in found if value is not None]:
            crowded += [role] * (sum(known) > CROWDED * len(known))
    prompts = tuple(role for role in roles if role != "decode") if slo_of(status) else ()
    return tuple(crowded) or prompts or roles


def _ready(status: Status, role: Role) -> list[RankStatus]:
    return [rank for rank in status.ranks if rank.role == role and rank.state == "ready"]


# --- the headline ----------------------------------------------------------------------------------------------------


def _headline(kind: Kind, lines: Sequence[Line], status: Status) -> str:
    """Return what the headline says of the lines of a kind."""
    its = [line for line in lines if line.kind == kind]
    states = {(rank.instance, rank.dp_rank): rank for rank in status.ranks}
    ranks = [states[line.rank] for line in its if line.rank is not None]
    waits = any(line.kind == "queue" for line in lines)
    match kind:
        case "unserved":
            return ", and ".join(line.text for line in its)
        case "broker":
            return "the broker does not answer"
        case "failing":
            return "requests fail"
        case "queue":
            return _queue_headline(status, [states[line.rank] for line in lines if line.kind == "full" and line.rank])
        case "slo":
            return "SLOs are missed"
        case "full":
            named = _short(status) if waits else ()  # by the headline of the queue
            return ", and ".join(_pool(status, role, some) for role, some in _by_role(ranks) if role not in named)
        case "link":
            return ", and ".join(f"KV caches come slowly to {_counted(role, some)}" for role, some in _by_role(ranks))
        case "cold":
            return ", and ".join(_cold(role, some) for role, some in _by_role(ranks))
    return ", and ".join(f"{_counted(role, some)} {_is(some)} {kind}" for role, some in _by_role(ranks))


def _by_role(ranks: Sequence[RankStatus]) -> list[tuple[Role, list[RankStatus]]]:
    return [(role, [rank for rank in ranks if rank.role == role]) for role in dict.fromkeys(r.role for r in ranks)]


def _counted(role: Role, ranks: Sequence[RankStatus]) -> str:
    return f"{len(ranks)} {role} rank{'' if len(ranks) == 1 else 's'}"


def _is(some: Sequence[object]) -> str:
    return "is" if len(some) == 1 else "are"


def _cold(role: Role, ranks: Sequence[RankStatus]) -> str:
    one = len(ranks) == 1
    if all(rank.restarts for rank in ranks):
        again = "was started again, and its prefix cache is" if one else "were started again, and their caches are"
        return f"{_counted(role, ranks)} {again} cold"
    return f"the prefix cache{'' if one else 's'} of {_counted(role, ranks)} {_is(ranks)} cold"


def _short(status: Status) -> tuple[Role, ...]:
    if status.queue is None or not status.queue.kinds:
        return ()
    return short_of(max(status.queue.kinds, key=lambda kind: kind.requests), status)


def _queue_headline(status: Status, full: Sequence[RankStatus]) -> str:
    short = _short(status)
    where = f" at {_places(short)}" if short else ""
    pools = filter(None, (_pool(status, role, [rank for rank in full if rank.role == role]) for role in short))
    return ": ".join(filter(None, (f"requests wait for room{where}", ", and ".join(pools))))


def _pool(status: Status, role: Role, full: Sequence[RankStatus]) -> str:
    """Return how many ranks of a role are full, and how much of the others is taken."""
    keys, ready = {(rank.instance, rank.dp_rank) for rank in full}, _ready(status, role)
    others = [rank for rank in ready if (rank.instance, rank.dp_rank) not in keys]
    known = [value for rank in others if (value := taken(rank)) is not None]
    if not ready:
        return ""
    if not others:
        return f"the {role} rank is full" if len(full) == 1 else f"all {len(full)} {role} ranks are full"
    if len(ready) > 1 and known and share(min(known)) == "100%":
        return f"all {len(ready)} {role} ranks are 100% taken"
    words = [f"{len(full)} of {len(ready)} {role} ranks {_is(full)} full"] if full else []
    if known:
        least, most = share(min(known)), share(max(known))
        between = most if least == most else f"{least.removesuffix('%')} to {most}"
        rest = "the other" if full else f"the {role} rank" if len(others) == 1 else f"all {role} ranks"
        many = f" {len(others)}" if full and len(others) > 1 else ""
        words.append(f"{rest}{many} {_is(others)} {between} taken")
    return ", ".join(words)
