"""The verdict on a fleet at its last sample: a headline, and sentences, the worst first: what is wrong, which requests
wait, which ranks do badly and why. None: all is well. Terminal, page and `pdbus status` have the same. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from bus.wire.messages import MemberKey, QueuedKind, QueueStatus, RankStatus, Role, Status
from pdbus.fleet.conditions import WAITS_S, WORDS, sentence_of, taken
from pdbus.fleet.figures import DEAD, Sample, dead_sentence, slo_of, unserved_of
from pdbus.fleet.formatting import age, by_number, share
from pdbus.fleet.history import FEW, WINDOW_S, History, Losses

MISSED_SHARE = 0.1  # SLOs are worth a sentence when more of them than this were missed
CROWDED = 0.8  # a role is short of room when its ranks are taken by more than this, on average
ALIKE = 3  # sentences of one kind that are given in full

Level = Literal["bad", "late", "warn", "note", "well"]
Kind = Literal["unserved", "dead", "broker", "failing", "queue", "slo", "slow", "full", "link", "cold", "note"]
_LEVELS: dict[Kind, Level] = {  # the worst first
    "failing": "bad", "unserved": "bad", "dead": "bad", "broker": "bad", "queue": "late", "slo": "late",
    "slow": "warn", "full": "warn", "link": "warn", "cold": "warn", "note": "note",
}  # fmt: skip
_ORDER = tuple(_LEVELS)
_MORE = {"dead": ("does not serve", "do not serve")} | {what: (words[0], words[2]) for what, words in WORDS.items()}
MARKS: dict[Level, str] = {"bad": "!", "late": "*", "warn": "~", "well": ""}  # before a line in a terminal


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


def headline_of(lines: Sequence[Line], history: History) -> tuple[Level, str]:
    """Return the level of `lines_of`, and the headline: where all is well, how much room there is."""
    kinds = [kind for kind in dict.fromkeys(line.kind for line in lines) if kind != "note"]
    if not kinds or history.last is None:
        return "well", "; ".join(filter(None, ("All is well", _room(history))))
    words = ", and ".join(filter(None, (_headline(kind, lines, history, history.last.status) for kind in kinds)))
    return _LEVELS[kinds[0]], words[0].upper() + words[1:]


def _room(history: History) -> str:
    """Return how much of each role's ranks is taken, and how busy prefill ranks are."""
    parts = []
    for role in ("decode", "unified", "prefill"):
        ranks = _ready(history.last.status, role) if history.last is not None else []
        known = [value for rank in ranks if (value := taken(rank)) is not None]
        busy = history.prefill_busy() if role == "prefill" else None
        if busy is not None or known:
            much = f"{share(busy)} busy" if busy is not None else f"{share(sum(known) / len(known))} taken"
            parts.append(f"{role} ranks are {much}" if len(ranks) > 1 else f"the {role} rank is {much}")
    return ", ".join(parts)


def shortened(lines: Sequence[Line], alike: int = ALIKE) -> list[Line]:
    """Return the lines with `alike` of a kind at most, and how many more there are."""
    number: Counter[Kind] = Counter()
    kept: list[Line] = []
    for line in lines:
        number[line.kind] += 1
        if number[line.kind] <= alike:
            kept.append(line)
    more = [Line(kind, _more(kind, count - alike)) for kind, count in number.items() if count > alike]
    return sorted([*kept, *more], key=lambda line: _ORDER.index(line.kind))


def _more(kind: Kind, count: int) -> str:
    words = _MORE.get(kind)
    return f"and {count} more {words[count > 1]}" if words is not None else f"and {count} more"


def _lines(history: History, sample: Sample, asks_broker: bool) -> Iterator[Line]:
    status = sample.status
    dead = [rank for rank in status.ranks if rank.state in DEAD]
    if (losses := history.losses()) is not None:
        yield Line("failing", f"{_losses_sentence(losses)}{_since(history, 'failing')}")
    for sentence in unserved_of(status):
        yield Line("unserved", sentence)
    reasons = _reasons(history) if dead else {}
    for rank in sorted(dead, key=lambda rank: by_number((rank.instance, rank.dp_rank))):
        key = rank.instance, rank.dp_rank
        why = reasons.get((*key, rank.state))
        left = _left(rank, status.ranks)
        yield Line("dead", "; ".join((dead_sentence(rank) + (f" ({why})" if why else ""), left)), key)
    if asks_broker and sample.broker is None and any(rank.endpoint for rank in status.ranks):
        yield Line("broker", "no broker answers: prefill ranks cannot be found by room, and loads do not come")
    if status.queue is not None and status.queue.oldest_s >= WAITS_S:
        yield Line("queue", f"{_queue_sentence(status.queue, status)}{_since(history, 'queue')}")
    kept, missed = history.slos_lately()
    if kept + missed >= FEW and missed > MISSED_SHARE * (kept + missed):
        yield Line("slo", f"{share(missed / (kept + missed))} of first tokens missed their SLO in the last minute")
    found = history.conditions()
    poor = [(each, key) for key, some in found.items() for each in some]
    for each, key in sorted(poor, key=lambda pair: (_ORDER.index(pair[0].what), -pair[0].worse, by_number(pair[1]))):
        yield Line(each.what, sentence_of(sample.by_key[key], each), key)
    if status.ranks and not any(rank.endpoint for rank in status.ranks):
        yield Line("note", "loads, events and the queue are shown to a viewer's or an admin's key alone")
    elif status.ranks and status.events is None:
        yield Line("note", "this controller is older than this page, and keeps no events and no figures of its queue")


def _since(history: History, what: str) -> str:
    lasted_s = history.lasted_s(what)
    return f"; this began {age(lasted_s)} ago" if lasted_s is not None and lasted_s >= 1.0 else ""


def _losses_sentence(losses: Losses) -> str:
    refused, failed = losses.refused, losses.failed
    lost = sum(refused.values()) + sum(failed.values())
    words = "were refused" if not failed else "failed or were refused" if refused else "failed"
    ended = f"{lost:,} of {lost + losses.done:,} requests that ended in the last {WINDOW_S:.0f} seconds {words}"
    codes = Counter(dict(refused) | dict(failed)).most_common(ALIKE)
    return f"{ended}: {', '.join(f'{count:,} with the code {code}' for code, count in codes)}"


def _losses_headline(losses: Losses) -> str:
    """Return how many requests a second are refused and fail, each with its most frequent code, and are done."""

    def a_second(count: int) -> str:
        rate = count / losses.window_s if losses.window_s else 0.0
        return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}"

    parts = [
        f"{a_second(sum(codes.values()))} requests/s {verb} ({max(codes, key=lambda code: codes[code])})"
        for codes, verb in ((losses.refused, "are refused"), (losses.failed, "fail"))
        if codes
    ]
    return ", ".join([*parts, f"{a_second(losses.done)}/s are done"])


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


def _headline(kind: Kind, lines: Sequence[Line], history: History, status: Status) -> str:
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
            return _losses_headline(losses) if (losses := history.losses()) is not None else ""
        case "dead":
            return ", and ".join(_dead(role, some) for role, some in _by_role(ranks))
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


def _dead(role: Role, ranks: Sequence[RankStatus]) -> str:
    states = {rank.state for rank in ranks}
    return f"{_counted(role, ranks)} {_is(ranks)} {states.pop() if len(states) == 1 else 'lost, hung or silent'}"


def _all(some: Sequence[object]) -> str:
    return "both" if len(some) == 2 else f"all {len(some)}"


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
        return f"the {role} rank is full" if len(full) == 1 else f"{_all(full)} {role} ranks are full"
    if known and share(min(known)) == "100%":
        pool, has = (f"the {role} rank", "has") if len(ready) == 1 else (f"{_all(ready)} {role} ranks", "have")
        it = "it" if len(ready) == 1 else "they"
        return f"{pool} {has} as many requests as {it} can take, counting those on their way"
    words = [f"{len(full)} of {len(ready)} {role} ranks {_is(full)} full"] if full else []
    if known:
        least, most = share(min(known)), share(max(known))
        between = most if least == most else f"{least.removesuffix('%')} to {most}"
        rest = "the other" if full else f"the {role} rank" if len(others) == 1 else f"{_all(others)} {role} ranks"
        many = f" {len(others)}" if full and len(others) > 1 else ""
        words.append(f"{rest}{many} {_is(others)} {between} taken")
    return ", ".join(words)
