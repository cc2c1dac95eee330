"""The load table that others embed: it refuses what cannot be meant, and changes nothing then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from controller_world import hello, load
from msgspec.structs import replace

from bus.wire.messages import MAX_ROOM, Ack, Sent, SentTo
from controller import LoadTable
from controller.load.groups import Metric
from controller.load.rank import RankLoad

ME = 77


def one(**settings: Any) -> tuple[LoadTable, RankLoad]:
    table = LoadTable(ME, **settings)
    rank = table.open(hello("i", 0))
    table.apply(rank.key, 1, load(1), 0.0)
    table.set_ready(rank, True)
    return table, rank


def seen(table: LoadTable, rank: RankLoad) -> tuple[object, ...]:
    """Everything that its user can see of it."""
    table.validate()
    names = [name for name in dir(rank) if not name.startswith("_") and name != "leaves"]
    records = {name: getattr(rank, name) for name in names}
    return records, table.counters(), table.turn, dict(table.ranks), table.group("unified").least(Metric.TOKENS)


ODD: dict[str, Callable[[LoadTable, Any], object]] = {
    "no hello": lambda table, _: table.open({}),  # type: ignore[arg-type]
    "a hello with a number for a name": lambda table, _: table.open(hello(5)),  # type: ignore[arg-type]
    "another rank's hello": lambda table, rank: table.revise(rank, hello("i", 1)),
    "another start's hello": lambda table, rank: table.revise(rank, replace(rank.info, epoch=9)),
    "another role's hello": lambda table, rank: table.revise(rank, replace(rank.info, role="prefill")),
    "half a token": lambda table, rank: table.charge(rank, 0.5),  # type: ignore[arg-type]
    "fewer tokens than none": lambda table, rank: table.charge(rank, -1),
    "more tokens than a count has": lambda table, rank: table.charge(rank, MAX_ROOM + 1),
    "a key for a rank": lambda table, rank: table.charge(rank.key, 5),
    "what was not charged ends": lambda table, rank: table.end(rank, 5),
    "what was not charged is undone": lambda table, rank: table.undo(rank, 5),
    "what has not failed is undone": lambda table, rank: table.undo(rank, 3, given_up=True),
    "other tokens end": lambda table, rank: table.end(rank, 4),
    "text for a rank": lambda table, _: table.set_ready("i", True),  # type: ignore[arg-type]
    "readiness without a truth value": lambda table, rank: table.set_ready(rank, NoTruth()),  # type: ignore[arg-type]
    "a rank that is none reconnects": lambda table, _: table.reconnected(None),  # type: ignore[arg-type]
    "a rank that is none is not believed": lambda table, _: table.disbelieve(None),  # type: ignore[arg-type]
    "a rank that is none is closed": lambda table, _: table.close(None),  # type: ignore[arg-type]
    "a report at no time": lambda table, rank: table.apply(rank.key, 1, load(2), math.nan),
    "counters at no time": lambda table, _: table.apply_sent(Sent("o", 5, 1, ()), math.inf),
    "an age at no time": lambda table, _: table.age("now"),  # type: ignore[arg-type]
    "no role": lambda table, _: table.group("both"),  # type: ignore[arg-type]
    "no model": lambda table, _: table.group("unified", 5),  # type: ignore[arg-type]
    "no metric": lambda table, _: table.group("unified").least("tokens"),  # type: ignore[arg-type]
}


class NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


@pytest.mark.parametrize("what", ODD)
def test_an_odd_argument_is_refused_and_changes_nothing(what: str) -> None:
    table, rank = one()
    table.charge(rank, 3)
    before = seen(table, rank)
    with pytest.raises((TypeError, ValueError)):
        ODD[what](table, rank)
    assert seen(table, rank) == before
    table.end(rank, 3)
    table.validate()


def test_each_dispatch_ends_once_with_the_tokens_it_was_charged_with() -> None:
    table, rank = one()
    for tokens in (5, 5, 7, 0):
        table.charge(rank, tokens)
    table.end(rank, 5)
    table.end(rank, 7, ok=False)
    table.undo(rank, 7, given_up=True)
    table.undo(rank, 0)
    table.end(rank, 5)
    for again in (lambda: table.end(rank, 5), lambda: table.undo(rank, 7, given_up=True), lambda: table.undo(rank, 0)):
        with pytest.raises(ValueError, match="no dispatch"):
            again()
    assert rank.outstanding == rank.outstanding_tokens == 0
    table.validate()


def test_a_record_that_has_left_stays_as_it_is() -> None:
    """Its requests end after their rank has gone or was started again: that is no mistake."""
    table, old = one()
    table.charge(old, 5)
    new = table.open(hello("i", 0, epoch=2))
    table.charge(new, 3)
    before = seen(table, old), seen(table, new)
    table.end(old, 5)
    table.undo(old, 5)
    table.set_ready(old, True)
    table.close(old)
    table.reconnected(old)
    table.disbelieve(old)
    table.revise(old, old.info)
    with pytest.raises(ValueError, match="not in this table"):
        table.charge(old, 5)
    assert (seen(table, old), seen(table, new)) == before


@pytest.mark.parametrize("sent", [{}, None, Sent("o", 5, "1", ()), Sent("o", 5, 1, (SentTo("i", 0, 1, -1, 0),))])
def test_counters_that_could_not_come_over_the_wire_are_dropped_and_counted(sent: Any) -> None:
    table, rank = one()
    assert table.apply_sent(sent, 0.0) is False
    assert table.counts == {"sent_invalid": 1}
    assert not table.shared
    assert rank.requests == 0


@pytest.mark.parametrize(("key", "epoch"), [("i", 1), (("i", 0), "1"), (("i", None), 1), ([], 1), (("i", 0), 2)])
def test_a_report_of_no_rank_is_dropped_and_counted(key: Any, epoch: Any) -> None:
    table, rank = one()
    assert table.apply(key, epoch, load(2, running=1), 0.1) is None
    table.declare(key, epoch, 1.0)
    assert table.counts == {"report_unknown": 1}
    assert (rank.requests, rank.interval_s) == (0, 0.0)


@pytest.mark.parametrize("settings", [{"stale_s": math.nan}, {"kv_overcommit": 0}, {"request_overcommit": "2"}])
def test_a_setting_that_cannot_be_meant_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        LoadTable(ME, **settings)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"running": -5},
        {"waiting_tokens": -(10**6)},
        {"running": None},
        {"running": float("nan")},
        {"kv_tokens": 1e30},
        {"running": 2**80},
        {"acks": (Ack(ME, -3, -9),)},
        {"acks": (Ack(ME, None, None),)},  # type: ignore[arg-type]
        {"acks": None},
        {"seq": "7"},
        {"step": object()},
    ],
)
def test_a_report_that_is_none_changes_nothing(nonsense: dict[str, Any]) -> None:
    table, rank = one()
    table.charge(rank, 10)
    table.apply(rank.key, 1, load(2, running=2, acks=[(ME, 1, 10)]), 0.0)
    assert table.apply(rank.key, 1, replace(load(3), **nonsense), 0.1) is None
    assert (rank.requests, table.counts) == (2, {"report_invalid": 1})
    table.validate()
    assert table.apply(rank.key, 1, load(3, running=1, acks=[(ME, 1, 10)]), 0.2) is rank
