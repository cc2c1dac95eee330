"""The load table: estimates, acknowledgements, ages, ties, credit (docs/protocol.md M24-M27)."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from controller_world import hello, load
from msgspec.structs import replace
from retained import retained

from bus.wire import codec
from bus.wire.messages import MAX_ROOM, PUBLICATIONS, Role, Sent, SentTo
from controller.load.groups import Metric
from controller.load.rank import RankLoad
from controller.load.table import MAX_CLOSED, MAX_CONTROLLERS, SEQ_JUMP, LoadTable
from controller.speeds import queued_tokens

ME, OTHER = 77, 88


def table_with(count: int, role: Role = "unified", **settings: float) -> tuple[LoadTable, list[RankLoad]]:
    table = LoadTable(ME, **settings)
    ranks = [table.open(hello("i", n, role=role, dp_size=count)) for n in range(count)]
    for rank in ranks:
        table.set_ready(rank, True)
    return table, ranks


def sent(epoch: int, seq: int, dispatches: int, tokens: int, node_epoch: int = 1) -> Sent:
    return Sent("other", epoch, seq, (SentTo("i", 0, node_epoch, dispatches, tokens),))


def test_a_charge_raises_the_estimate_at_once_and_a_report_without_it_does_not_erase_it() -> None:
    """M24"""
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(1), 0.0)
    assert table.charge(rank, 10) == 1
    assert (rank.requests, rank.tokens) == (1, 10)
    table.apply(rank.key, 1, load(2, acks=[(ME, 0, 0)]), 0.1)
    assert (rank.requests, rank.tokens) == (1, 10)
    table.apply(rank.key, 1, load(3, waiting=1, waiting_tokens=10, acks=[(ME, 1, 10)]), 0.2)
    assert (rank.requests, rank.tokens) == (1, 10)
    table.apply(rank.key, 1, load(4, acks=[(ME, 1, 10)]), 0.3)
    assert (rank.requests, rank.tokens) == (0, 0)
    table.validate()


def test_counters_can_be_sent_whatever_a_rank_claims_to_have_taken_in() -> None:
    """Else no controller takes the whole message, with those of all other ranks."""
    table, (rank,) = table_with(1)
    table.charge(rank, 10)
    table.apply(rank.key, 1, load(1, acks=[(ME, MAX_ROOM, MAX_ROOM)]), 0.0)
    table.charge(rank, 10)
    message = Sent("me", ME, 1, table.counters())
    assert codec.decode(codec.encode(message), PUBLICATIONS) == message


def test_an_old_report_is_dropped_and_counted() -> None:
    """M25"""
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(5, running=3), 0.0)
    assert table.apply(rank.key, 1, load(5, running=1), 0.0) is None
    assert table.apply(rank.key, 1, load(4, running=1), 0.0) is None
    assert table.apply(rank.key, 9, load(6, running=1), 0.0) is None
    assert rank.requests == 3
    assert table.counts == {"report_old": 2, "report_unknown": 1}


def test_a_new_epoch_voids_what_the_old_one_had_not_acknowledged() -> None:
    """M27"""
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(9), 0.0)
    table.charge(rank, 10)
    new = table.open(hello("i", 0, dp_size=1, epoch=2))
    table.set_ready(new, True)
    assert (new.requests, new.tokens, new.dispatched_total) == (0, 0, 1)
    table.apply(new.key, 2, load(1, running=2), 0.1)
    assert new.requests == 2
    assert table.apply(new.key, 1, load(10, running=7), 0.2) is None
    assert table.charge(new, 1) == 1
    table.validate()


def test_what_is_remembered_of_starts_that_left_is_bounded() -> None:
    table = LoadTable(ME)
    for epoch in range(1, MAX_CLOSED + 3):  # each replaces the one before
        assert table.charge(table.open(hello("i", 0, dp_size=1, epoch=epoch)), 10) == 1
    table.open(hello("i", 0, dp_size=1, epoch=MAX_CLOSED + 3))
    assert table.charge(table.open(hello("i", 0, dp_size=1, epoch=MAX_CLOSED + 2)), 10) == 2
    assert table.charge(table.open(hello("i", 0, dp_size=1, epoch=1)), 10) == 1
    table.validate()


def test_totals_go_on_over_starts_of_a_rank_also_when_an_old_one_comes_back() -> None:
    table = LoadTable(ME)
    first = table.open(hello("i", 0, dp_size=1, epoch=1))
    for _ in range(3):
        table.charge(first, 10)
    table.undo(first, 10)
    table.end(first, 10)
    second = table.open(hello("i", 0, dp_size=1, epoch=2))
    table.charge(second, 10)
    assert (second.dispatched_total, second.ended_total, second.failed_total) == (4, 3, 1), "one was lost"
    back = table.open(hello("i", 0, dp_size=1, epoch=1))
    assert (back.dispatched_total, back.ended_total, back.failed_total) == (4, 4, 2)
    assert table.charge(back, 10) == 4, "numbered on, over what was undone"
    assert (back.dispatched_total, back.ended_total) == (5, 4)
    table.close(back)
    forgotten = table.open(hello("i", 0, dp_size=1, epoch=1))
    assert (forgotten.dispatched_total, forgotten.ended_total) == (0, 0)
    table.validate()


def test_acks_of_other_controllers_are_not_mine() -> None:
    """M26"""
    table, (rank,) = table_with(1)
    table.charge(rank, 10)
    table.apply(rank.key, 1, load(1, acks=[(OTHER, 5, 50)]), 0.0)
    assert (rank.requests, rank.tokens) == (1, 10)


def test_what_another_controller_sent_counts_until_the_rank_acknowledges_it() -> None:
    table, (rank, _) = table_with(2)
    table.apply(rank.key, 1, load(1, acks=[(OTHER, 2, 20)]), 0.0)
    assert table.apply_sent(sent(OTHER, 1, 5, 50), 0.0)
    assert (rank.requests, rank.tokens) == (3, 30)
    assert not table.apply_sent(sent(OTHER, 1, 6, 60), 0.0)  # repeated
    assert not table.apply_sent(sent(ME, 9, 6, 60), 0.0)  # my own
    table.apply_sent(sent(OTHER, 2, 9, 90, node_epoch=4), 0.0)  # to another start of the rank
    assert (rank.requests, rank.tokens) == (3, 30)
    table.apply(rank.key, 1, load(2, acks=[(OTHER, 7, 70)]), 0.1)  # its counters are late
    assert (rank.requests, rank.tokens) == (0, 0)
    table.validate()


def test_a_controller_that_falls_silent_is_forgotten() -> None:
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(1, acks=[(OTHER, 0, 0)]), 0.0)
    table.apply_sent(sent(OTHER, 1, 5, 50), 0.0)
    assert rank.requests == 5
    table.apply(rank.key, 1, load(2, acks=[(OTHER, 0, 0)]), 6.0)
    table.age(6.0)
    assert rank.requests == 0
    table.validate()


def test_no_more_controllers_are_heard_than_there_may_be() -> None:
    table, (rank,) = table_with(1)
    everybody = [(OTHER + controller, 0, 0) for controller in range(MAX_CONTROLLERS)]
    table.apply(rank.key, 1, load(1, acks=everybody), 0.0)
    for controller in range(MAX_CONTROLLERS):
        assert table.apply_sent(sent(OTHER + controller, 1, 1, 10), 0.0)
    assert not table.apply_sent(sent(OTHER + MAX_CONTROLLERS, 1, 1, 10), 0.0)
    assert table.apply_sent(sent(OTHER, 2, 2, 20), 0.0), "who is known is heard on"
    assert (rank.requests, table.counts["sent_too_many"]) == (MAX_CONTROLLERS + 1, 1)
    table.validate()


def test_a_controller_that_the_rank_does_not_name_has_sent_it_nothing() -> None:
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(1, running=1), 0.0)
    table.apply_sent(sent(OTHER, 1, 2**30, 2**40), 0.0)
    assert (rank.requests, rank.tokens) == (1, 0)
    table.apply(rank.key, 1, load(2, acks=[(OTHER, 2**30 - 1, 2**40 - 10)]), 0.1)
    assert (rank.requests, rank.tokens) == (1, 10), "what it said holds once the rank knows it"
    table.validate()


def test_what_failed_is_told_apart_from_what_ended() -> None:
    table, (rank,) = table_with(1)
    for ok in (True, True, False):
        table.charge(rank, 1)
        table.end(rank, 1, ok=ok)
    assert (rank.ended_total, rank.failed_total) == (3, 1)


def test_a_stale_report_gives_way_to_my_own_count() -> None:
    table, (rank,) = table_with(1, stale_s=1.0)
    table.apply(rank.key, 1, load(1, running=50, kv_tokens=500), 0.0)
    table.charge(rank, 7)
    assert table.age(0.9) == []
    assert rank.requests == 51
    assert table.age(1.1) == [rank]
    assert (rank.requests, rank.tokens) == (1, 7)
    table.end(rank, 7)
    assert (rank.requests, rank.tokens) == (0, 0)
    table.apply(rank.key, 1, load(2, running=4, acks=[(ME, 1, 7)]), 1.2)
    assert rank.requests == 4
    table.validate()


def test_a_forged_seq_silences_a_rank_no_longer_than_its_report_is_believed() -> None:
    """M25"""
    table, (rank,) = table_with(1, stale_s=1.0)
    table.apply(rank.key, 1, load(1, running=2), 0.0)
    assert table.apply(rank.key, 1, load(2**63 - 1, running=900), 0.1) is None, "nobody comes so far"
    assert table.apply(rank.key, 1, load(1 + SEQ_JUMP, running=900), 0.1) is rank
    assert table.apply(rank.key, 1, load(2, running=3), 0.2) is None
    assert table.age(1.2) == [rank]
    assert table.apply(rank.key, 1, load(7, running=4), 1.3) is rank
    assert rank.requests == 4
    assert table.apply(rank.key, 1, load(6, running=5), 1.4) is None, "as ever"
    table.validate()


def test_a_report_that_is_not_believed_gives_way_to_my_own_count_at_once() -> None:
    table, (rank,) = table_with(1)
    table.apply(rank.key, 1, load(900, running=900), 0.0)
    table.charge(rank, 7)
    table.disbelieve(rank)
    table.disbelieve(rank)
    assert (rank.requests, rank.tokens, table.counts["report_forged"]) == (1, 7, 1)
    table.validate()
    assert table.apply(rank.key, 1, load(2, running=3, acks=[(ME, 0, 0)]), 0.1) is rank
    assert rank.requests == 4
    assert table.age(60.0) == [rank], "looked at once, as ever"
    table.validate()


def test_more_acknowledged_than_sent_is_counted_and_never_negative() -> None:
    table, (rank,) = table_with(1)
    table.charge(rank, 5)
    table.apply(rank.key, 1, load(1, acks=[(ME, 900, 2**62)]), 0.0)
    assert (rank.requests, rank.tokens) == (0, 0)
    assert table.counts["ack_ahead"] == 1
    table.charge(rank, 5)  # counting goes on from there
    assert (rank.requests, rank.tokens) == (1, 5)
    table.apply(rank.key, 1, load(2, acks=[(ME, 901, 2**62 + 5)]), 0.1)
    assert (rank.requests, rank.tokens) == (0, 0)
    table.apply(rank.key, 1, load(3, acks=[(ME, 0, 0)]), 0.1)
    table.validate()


def test_what_a_lost_connection_swallowed_is_in_flight_no_more() -> None:
    table, (rank,) = table_with(1)
    for _ in range(3):
        table.charge(rank, 10)
    table.apply(rank.key, 1, load(1, running=1, acks=[(ME, 1, 10)]), 0.0)
    table.reconnected(rank)
    assert rank.requests == 3
    table.apply(rank.key, 1, load(2, running=1, acks=[(ME, 1, 10)]), 0.1)
    assert (rank.requests, rank.in_flight, rank.in_flight_tokens) == (1, 0, 0)
    table.charge(rank, 4)
    assert rank.in_flight == 1
    table.apply(rank.key, 1, load(3, running=2, acks=[(ME, 2, 14)]), 0.2)
    assert (rank.requests, rank.in_flight_tokens) == (2, 0)
    table.validate()


def test_tokens_of_work_depend_on_the_role() -> None:
    for role, tokens in (("prefill", 30), ("decode", 130), ("unified", 130)):
        table = LoadTable(ME)
        rank = table.open(hello("i", role=role))
        table.apply(rank.key, 1, load(1, waiting_tokens=30, kv_tokens=100), 0.0)
        assert rank.tokens == tokens, role


@pytest.mark.parametrize("metric", list(Metric))
def test_ties_rotate(metric: Metric) -> None:
    table, _ = table_with(5)
    group = table.group("unified")
    picked = []
    for n in range(15):
        rank = group.least(metric)
        assert rank is not None
        picked.append(rank.key[1])
        table.charge(rank, 10)
        table.apply(rank.key, 1, load(n + 1, acks=[(ME, rank.sent, rank.sent_tokens)]), 0.0)
    assert picked == [0, 1, 2, 3, 4] * 3


def test_the_least_wins_whatever_the_order_of_updates() -> None:
    table, ranks = table_with(9, role="prefill")
    requests, tokens = table.group("prefill").least, table.group("prefill").least
    for n, rank in enumerate(ranks):
        table.apply(rank.key, 1, load(1, waiting=abs(n - 6), waiting_tokens=abs(n - 2)), 0.0)
    assert requests(Metric.REQUESTS) is ranks[6]
    assert tokens(Metric.TOKENS) is ranks[2]
    table.set_ready(ranks[2], False)
    assert tokens(Metric.TOKENS) in (ranks[1], ranks[3])
    table.close(ranks[6])
    assert requests(Metric.REQUESTS) in (ranks[5], ranks[7])
    table.validate()


def test_credit_closes_a_rank_and_a_report_opens_it_again() -> None:
    table, (rank,) = table_with(1, request_overcommit=1.0)  # four run slots
    group = table.group("unified")
    for _ in range(4):
        assert group.least(Metric.TURN) is rank
        table.charge(rank, 1)
    assert group.least(Metric.TURN) is None
    assert group.ready == {"m": 1}
    assert not rank.full
    table.apply(rank.key, 1, load(1, running=3, acks=[(ME, 4, 4)]), 0.0)
    assert group.least(Metric.TURN) is rank
    table.apply(rank.key, 1, load(2, running=1, kv_tokens=1000, acks=[(ME, 4, 4)]), 0.0)
    assert group.least(Metric.TURN) is None
    table.validate()


def test_a_slow_starter_gets_one_at_a_time_until_it_reports() -> None:
    table, (rank,) = table_with(1)
    table.set_ready(rank, True, slow=True)
    group = table.group("unified")
    table.charge(rank, 1)
    assert group.least(Metric.TURN) is None
    table.end(rank, 1)
    assert group.least(Metric.TURN) is rank
    table.charge(rank, 1)
    table.apply(rank.key, 1, load(1, acks=[(ME, 2, 2)]), 0.0)
    assert group.least(Metric.TURN) is rank


def test_groups_follow_model_and_instance_and_keep_only_what_is_used() -> None:
    table = LoadTable(ME)
    a, b = table.open(hello("a", model="x")), table.open(hello("b", model="y"))
    for rank in (a, b):
        table.set_ready(rank, True)
    assert table.group("unified").facts().models == {"x", "y"}
    assert list(table.group("unified", "x")) == [a]
    assert list(table.group("unified", "", "b")) == [b]
    rounds = []
    for each in range(3):
        for n in range(1000):
            table.group("unified", f"made-up-{each}-{n}")
        rounds.append(retained(table))
    assert max(rounds) - min(rounds) < 500, "a group each would be tens of thousands of objects"
    table.open(hello("a", 1, model="x"))
    table.validate()
    table.close(b)
    assert [len(ranks) for ranks in table.group("unified").instances()] == [2]


def test_an_undone_charge_leaves_no_trace_but_its_number() -> None:
    table, (rank,) = table_with(1)
    table.charge(rank, 3)
    table.charge(rank, 4)
    table.undo(rank, 4)
    assert (rank.sent, rank.sent_tokens, rank.outstanding, rank.requests) == (1, 3, 1, 1)
    assert table.charge(rank, 4) == 3
    table.validate()


def test_what_a_rank_only_fetches_is_in_its_estimate_and_no_work_for_it() -> None:
    """In flight, once reported, and where there is no report."""
    table = LoadTable(ME)
    table.count_queue_only("decode")
    rank = table.open(replace(hello("i", 0, role="decode"), prefills=True))
    table.set_ready(rank, True)

    def seen() -> tuple[int, int, int]:
        table.validate()
        return rank.requests, rank.tokens, queued_tokens(rank)

    assert table.charge(rank, 640, fetches=True) == 1
    assert seen() == (1, 640, 0), "no report came yet"
    table.apply(rank.key, 1, load(1, acks=[(ME, 0, 0)]), 0.0)
    assert seen() == (1, 640, 0), "it is in flight"
    table.charge(rank, 100)
    table.charge(rank, 320, fetches=True)
    assert seen() == (3, 1060, 100)
    table.apply(rank.key, 1, load(2, waiting=1, waiting_tokens=640, to_compute_tokens=0, acks=[(ME, 1, 640)]), 0.1)
    assert seen() == (3, 1060, 100)
    waiting = {"waiting": 3, "waiting_tokens": 1060}
    table.apply(rank.key, 1, load(3, to_compute_tokens=100, acks=[(ME, 3, 1060)], **waiting), 0.2)
    assert seen() == (3, 1060, 100)
    table.apply(rank.key, 1, load(4, acks=[(ME, 3, 1060)], **waiting), 0.3)
    assert seen() == (3, 1060, 1060), "it does not say what it computes"
    table.age(6.0)
    assert seen() == (3, 1060, 100), "my own count"
    table.end(rank, 640, fetches=True)
    table.end(rank, 100)
    assert seen() == (1, 320, 0)
    table.apply(rank.key, 1, load(5, acks=[(ME, 3, 1060)]), 6.1)
    table.charge(rank, 64, fetches=True)
    table.charge(rank, 32)
    assert seen() == (2, 96, 32)
    table.undo(rank, 32)
    assert seen() == (1, 64, 64), "whichever is on its way counts as work, until it is acknowledged"
    table.undo(rank, 64, fetches=True)
    assert seen() == (0, 0, 0)
    table.age(12.0)
    assert seen() == (1, 320, 0)


def test_a_charge_that_a_rebase_took_for_ingested_can_be_undone() -> None:
    table, (rank,) = table_with(1)
    table.reconnected(rank)
    table.charge(rank, 10)
    table.apply(rank.key, 1, load(1), 0.0)
    assert rank.in_flight == 0
    table.undo(rank, 10)
    assert (rank.sent, rank.acked, rank.requests, rank.tokens) == (0, 0, 0, 0)
    table.charge(rank, 4)
    assert (rank.requests, rank.tokens) == (1, 4)
    table.apply(rank.key, 1, load(2, waiting=1, waiting_tokens=4, acks=[(ME, 1, 4)]), 0.1)
    assert (rank.requests, rank.tokens, rank.in_flight) == (1, 4, 0)
    table.validate()


def test_absurd_numbers_do_not_break_the_index() -> None:
    table, (a, _) = table_with(2)
    huge = 2**63 - 1
    table.apply(a.key, 1, load(1, running=huge, waiting=huge, waiting_tokens=huge, kv_tokens=huge), 0.0)
    table.apply_sent(Sent("o", OTHER, 1, (SentTo("i", 1, 1, huge, huge),)), 0.0)
    table.validate()
    table.age(100.0)
    assert table.group("unified").least(Metric.TOKENS) is not None


def test_what_was_lost_with_a_connection_is_in_flight_for_no_other_controller() -> None:
    """M92"""
    table, (rank,) = table_with(1)
    for tokens in (10, 20):
        table.charge(rank, tokens)
        table.end(rank, tokens, ok=False)
    table.reconnected(rank)
    table.apply(rank.key, 1, load(1, acks=[(ME, 1, 10)]), 0.0)
    (counter,) = table.counters()
    assert (counter.dispatches, counter.tokens) == (1, 10)
    table.charge(rank, 5)
    (counter,) = table.counters()
    assert (counter.dispatches, counter.tokens) == (2, 15)


def test_names_that_clients_make_up_cost_no_look_at_every_rank() -> None:
    table, _ = table_with(200)
    table.group("unified").facts()
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        calls[event] += 1

    sys.setprofile(profile)
    try:
        for number in range(10):
            table.group("unified", f"model-{number}")
            table.group("unified", "", f"instance-{number}")
            table.group("unified", "m", f"instance-{number}")
    finally:
        sys.setprofile(None)
    assert calls["call"] < 10 * 200


def test_an_undone_charge_that_was_given_up_before_leaves_no_trace_either() -> None:
    table, (rank,) = table_with(1)
    table.charge(rank, 3)
    table.end(rank, 3, ok=False)
    table.undo(rank, 3, given_up=True)
    assert (rank.sent, rank.sent_tokens, rank.requests) == (0, 0, 0)
    assert (rank.dispatched_total, rank.ended_total, rank.failed_total) == (1, 1, 1), "what was counted stays"
    assert table.charge(rank, 4) == 2
    table.validate()
