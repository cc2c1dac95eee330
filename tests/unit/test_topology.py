"""Topology: epochs, leases, readiness per unique rank, contradictions within an instance."""

from __future__ import annotations

from typing import Any

import pytest
from broker_world import member

from bus.broker import topology
from bus.broker.topology import FORGET_S, Membership
from bus.wire.messages import InstanceInfo


def info(table: Membership, now: float) -> InstanceInfo:
    (only,) = table.infos("prefill-0", now)
    return only


def test_ready_when_every_unique_rank_is() -> None:
    """M41."""
    table = Membership()
    table.introduce(member(0), 0.0)
    table.introduce(member(0), 0.1)
    assert not info(table, 0.1).ready, "one rank said so twice"
    for state in ("starting", "draining"):
        table.introduce(member(1, state=state), 0.2)
        assert not info(table, 0.2).ready
    table.introduce(member(1), 0.3)
    assert info(table, 0.3).ready
    assert [rank.dp_rank for rank in info(table, 0.3).ranks] == [0, 1]


def test_a_rank_silent_past_its_lease_is_not_ready() -> None:
    """M41."""
    table = Membership()
    table.introduce(member(0), 0.0)
    table.introduce(member(1), 2.0)
    assert info(table, 3.0).ready
    assert not info(table, 3.1).ready
    table.seen("prefill-0", 0, 1, 3.2)
    assert info(table, 3.2).ready, "any publication is a sign of life"


def test_follow_bootstrap_room_when_every_rank_says_so() -> None:
    table = Membership()
    table.introduce(member(0, follow_bootstrap_room=True), 0.0)
    assert info(table, 0.0).follow_bootstrap_room
    table.introduce(member(1), 0.0)
    assert not info(table, 0.0).follow_bootstrap_room
    table.introduce(member(1, state="gone"), 0.1)
    assert info(table, 0.1).follow_bootstrap_room
    table.introduce(member(0, state="gone"), 0.2)
    assert not info(table, 0.2).follow_bootstrap_room


def test_an_old_epoch_does_not_come_back() -> None:
    table = Membership()
    table.introduce(member(epoch=5), 0.0)
    table.introduce(member(epoch=3), 1.0)
    assert table.introduce(member(epoch=5), 1.1) is None
    assert table.seen("prefill-0", 0, 5, 1.2) is None
    assert info(table, 1.2).ranks[0].epoch == 3
    assert table.counts["stale_epoch"] == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dp_size": 4}, "dp_size_mismatch"),
        ({"role": "decode"}, "role_mismatch"),
        ({"model": "other"}, "model_mismatch"),
        ({"dp_rank": 2}, "bad_rank"),
    ],
)
def test_contradictions_are_refused_and_counted(fields: dict[str, Any], reason: str) -> None:
    table = Membership()
    table.introduce(member(0), 0.0)
    assert table.introduce(member(**({"dp_rank": 1, "epoch": 9} | fields)), 1.0) is None
    assert table.counts[reason] == 1
    assert [rank.dp_rank for rank in info(table, 1.0).ranks] == [0]


def test_an_instance_may_come_back_in_another_shape_when_nobody_is_left() -> None:
    table = Membership()
    table.introduce(member(0), 0.0)
    table.introduce(member(1), 0.0)
    table.introduce(member(0, state="gone"), 1.0)
    assert table.introduce(member(0, epoch=2, dp_size=1), 1.1) is None, "rank 1 is still there"
    assert table.introduce(member(0, epoch=2, dp_size=1), 3.5) is not None, "rank 1 is past its lease"
    assert info(table, 3.5).dp_size == 1
    assert info(table, 3.5).ready
    assert [rank.dp_rank for rank in info(table, 3.5).ranks] == [0]


def test_ranks_away_for_long_are_forgotten() -> None:
    table = Membership()
    table.introduce(member(0), 0.0)
    table.introduce(member(1), 30.0)
    assert [rank.dp_rank for rank in table.forget(FORGET_S + 3.1)] == [0]
    assert [rank.dp_rank for rank in table.forget(FORGET_S + 33.1)] == [1]
    assert table.size == 0
    assert table.infos("", 1000.0) == ()


def test_a_table_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "MAX_RANKS", 2)
    table = Membership()
    assert table.introduce(member(0, dp_size=8), 0.0)
    assert table.introduce(member(1, dp_size=8), 0.0)
    assert table.introduce(member(2, dp_size=8), 0.0) is None
    assert table.introduce(member(1, dp_size=8), 0.1)
    assert table.counts["too_many_ranks"] == 1


def test_infos_of_all_or_of_one() -> None:
    table = Membership()
    table.introduce(member(instance="b", dp_size=1), 0.0)
    table.introduce(member(instance="a", dp_size=1, role="decode"), 0.0)
    table.seen("heard-only", 0, 1, 0.0)
    assert [each.instance for each in table.infos("", 0.0)] == ["a", "b"]
    assert [each.instance for each in table.infos("b", 0.0)] == ["b"]
    assert table.infos("nobody", 0.0) == ()
