"""PublisherCore: batching, piggybacked loads, refreshes, restatements."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import laws
import pytest
from msgspec import structs

from bus.actions import Publish
from bus.embed.publications import CHUNK, REPORT_GAP_S, PublisherCore
from bus.wire.messages import (
    Beacon,
    Conflict,
    Drop,
    Load,
    LoadReport,
    Location,
    Member,
    Message,
    Registration,
    Resync,
    Rooms,
)


def core(**fields: Any) -> PublisherCore:
    given: dict[str, Any] = {
        "instance": "prefill-0", "dp_rank": 1, "epoch": 9, "role": "prefill", "model": "tiny", "dp_size": 2,
        "endpoint": "tcp://10.0.0.7:7001", "interval_s": 0.5, "room_ttl_s": 120.0, "state": "ready",
    }  # fmt: skip
    return laws.watched(PublisherCore(**(given | fields)))


def load(running: int = 0) -> Load:
    return Load(
        seq=0,
        step=0,
        running=running,
        waiting=0,
        waiting_tokens=0,
        kv_tokens=0,
        kv_capacity=1024,
        max_running=16,
    )


def messages(publications: list[Publish]) -> list[Any]:
    return [publication.message for publication in publications]


def rooms(publications: list[Publish]) -> list[Rooms]:
    return [message for message in messages(publications) if isinstance(message, Rooms)]


def test_one_turn_is_one_message_with_the_load_piggybacked() -> None:
    publisher = core()
    for room in (7, 8):
        assert publisher.register(room, 1, 0.0) == []
    assert publisher.drop(9, 1, "prefill_failed", 0.0) == []
    publisher.report(load(3), 0.0)
    (message,) = messages(publisher.flush(0.0))
    assert isinstance(message, Rooms)
    assert message.register == (Registration(7, 1), Registration(8, 1))
    assert message.drop == (Drop(9, 1, "prefill_failed"),)
    assert (message.seq, message.epoch, message.endpoint) == (1, 9, "tcp://10.0.0.7:7001")
    assert message.load is not None
    assert (message.load.running, message.load.seq) == (3, 1)
    assert publisher.flush(0.1) == []


def test_the_last_word_of_a_turn_on_a_room_counts() -> None:
    publisher = core()
    publisher.register(1, 1, 0.0)
    publisher.drop(1, 1, "ok", 0.0)
    publisher.drop(2, 1, "ok", 0.0)
    publisher.register(2, 1, 0.0)
    publisher.register(3, 2, 0.0)
    publisher.drop(3, 1, "ok", 0.0)  # of an attempt that is over
    (message,) = rooms(publisher.flush(0.0))
    assert message.register == (Registration(2, 1), Registration(3, 2))
    assert message.drop == (Drop(1, 1),)
    assert publisher.live_rooms == 2


def test_a_changing_load_goes_alone_at_a_bounded_rate_and_the_newest_wins() -> None:
    publisher = core(interval_s=10.0)
    publisher.tick(0.0)
    sent: list[tuple[float, LoadReport]] = []
    for step in range(1001):
        now = step / 1000
        publisher.report(load(step), now)
        sent += [(now, message) for message in messages(publisher.flush(now)) if isinstance(message, LoadReport)]
    assert len(sent) == pytest.approx(1.0 / REPORT_GAP_S, abs=1)
    assert all(round(now * 1000) == message.load.running for now, message in sent)
    assert [message.seq for _, message in sent] == list(range(1, len(sent) + 1))
    assert all(a[1].load.seq < b[1].load.seq for a, b in pairwise(sent))


def test_that_all_work_is_done_is_published_at_once_and_then_only_at_the_bounded_rate() -> None:
    """Else the client's next request, for which this rank has the cache, would find it busy for one gap more."""
    publisher = core(interval_s=10.0)
    publisher.tick(0.0)
    publisher.report(load(1), 0.0)
    publisher.flush(0.0)
    publisher.report(load(2), 0.01)
    assert publisher.flush(0.01) == []
    publisher.report(load(0), 0.02)
    assert publisher.due_s(0.02) == 0.0
    (message,) = messages(publisher.flush(0.02))
    assert message.load.running == 0
    publisher.report(structs.replace(load(0), kv_tokens=5), 0.03)
    assert publisher.flush(0.03) == [], "it had none before"
    assert publisher.due_s(0.03) == pytest.approx(0.02 + REPORT_GAP_S - 0.03)
    publisher.report(load(1), 0.04)
    assert publisher.flush(0.04) == []


def test_an_unchanged_load_is_repeated_at_the_interval_only() -> None:
    publisher = core(interval_s=0.5)
    publisher.report(load(1), 0.0)
    times = []
    for step in range(200):
        now = step / 100
        publisher.report(load(1), now)
        times += [now for message in messages(publisher.flush(now)) if isinstance(message, LoadReport)]
    assert times == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(("running", "at_most_s"), [(1, 0.25), (0, 1.0)])
def test_members_and_loads_come_at_least_each_interval(running: int, at_most_s: float) -> None:
    """M15 M28: of an idle rank less often, as its member says."""
    publisher, now = core(interval_s=0.25), 100.0
    due = 100.0
    heard: dict[type, list[float]] = {Member: [], Load: []}
    for turn in range(400):
        now = 100.0 + turn * 0.01
        publisher.report(load(running), now)
        for message in messages(publisher.tick(now)):
            if isinstance(message, Member):
                heard[Member].append(now)
                due = now + message.interval_s
            if message.load is not None:
                heard[Load].append(now)
        assert now <= due + 0.011
    for times in heard.values():
        longest = max(b - a for a, b in pairwise([100.0, *times, now]))
        assert longest == pytest.approx(at_most_s, abs=0.011)


def test_numbers_rise_by_one_for_each_tag() -> None:
    """M14: and those of load reports over all tags (M25 rests on it)."""
    publisher, seqs, loads = core(interval_s=0.25), dict[type, int](), list[int]()
    for turn in range(300):
        now = 100.0 + turn * 0.02
        publisher.report(load(turn % 5), now)
        if turn % 7 == 0:
            publisher.register(turn, 1, now)
        restated = publisher.on_message(Resync("prefill-0", 1, 9), now) if turn % 50 == 0 else []
        for message in messages(restated + publisher.tick(now)):
            assert message.seq == seqs.get(type(message), 0) + 1
            seqs[type(message)] = message.seq
            if message.load is not None:
                loads.append(message.load.seq)
    assert seqs.keys() == {Member, Rooms, LoadReport}
    assert loads == sorted(loads)


def test_a_scheduler_that_says_nothing_new_repeats_no_load() -> None:
    publisher = core(interval_s=0.5)
    publisher.report(load(1), 0.0)
    assert len(publisher.flush(0.0)) == 1
    assert publisher.flush(5.0) == []


def test_membership_is_repeated_and_told_at_once_on_change() -> None:
    """M15."""
    publisher = core(state="starting")
    (first,) = messages(publisher.tick(0.0))
    assert isinstance(first, Member)
    assert (first.state, first.seq, first.rooms_seq, first.interval_s) == ("starting", 1, 0, 0.5)
    assert publisher.tick(0.4) == []
    (changed,) = messages(publisher.set_state("ready", 0.45))
    assert (changed.state, changed.seq) == ("ready", 2)
    assert publisher.set_state("ready", 0.46) == []
    assert len(publisher.tick(0.96)) == 1
    (follow,) = messages(publisher.set_follow(True, 1.0))
    assert follow.follow_bootstrap_room


def test_membership_tells_the_seq_of_the_last_rooms_message_sent() -> None:
    """M18 rests on it."""
    publisher = core()
    publisher.register(7, 1, 0.0)
    first, second = messages(publisher.set_state("draining", 0.0))
    assert isinstance(first, Rooms)
    assert isinstance(second, Member)
    assert second.rooms_seq == first.seq == 1


def test_rooms_are_refreshed_before_half_their_ttl_while_they_live() -> None:
    publisher = core(interval_s=1000.0)
    publisher.register(7, 3, 0.0)
    publisher.register(8, 1, 0.0)
    publisher.flush(0.0)
    publisher.drop(8, 1, "ok", 1.0)
    publisher.flush(1.0)
    assert rooms(publisher.tick(59.9)) == []
    (message,) = rooms(publisher.tick(60.0))
    assert message.register == (Registration(7, 3),)
    assert rooms(publisher.tick(61.0)) == []
    assert len(rooms(publisher.tick(120.0))) == 1


def test_a_room_that_nobody_drops_is_forgotten_in_the_end() -> None:
    publisher = core(interval_s=1e6)
    publisher.register(7, 1, 0.0)
    refreshes = sum(len(rooms(publisher.tick(float(second)))) for second in range(0, 5000, 10))
    assert publisher.live_rooms == 0
    assert refreshes == 1 + 19
    assert publisher.counts["evicted"] == 1


def test_too_many_live_rooms_push_out_the_oldest() -> None:
    publisher = core(max_rooms=2)
    for room in (1, 2, 3):
        publisher.register(room, 1, 0.0)
    (message,) = rooms(publisher.flush(0.0))
    assert [each.room for each in message.register] == [2, 3]
    assert publisher.counts["evicted"] == 1


def test_a_new_broker_hears_membership_then_every_live_room() -> None:
    """M16."""
    publisher = core()
    publisher.register(7, 1, 0.0)
    publisher.register(8, 2, 0.0)
    publisher.flush(0.0)
    member, snapshot = messages(publisher.on_message(Beacon(1, 1, 0.25), 1.0))
    assert isinstance(member, Member)
    assert snapshot.snapshot
    assert snapshot.register == (Registration(7, 1), Registration(8, 2))
    assert (member.rooms_seq, snapshot.seq) == (1, 2)
    assert publisher.on_message(Beacon(1, 2, 0.25), 1.25) == []
    assert publisher.broker_epoch == 1
    assert len(publisher.on_message(Beacon(2, 1, 0.25), 2.0)) == 2


def test_a_restatement_with_nothing_live_says_so() -> None:
    publisher = core()
    _, snapshot = messages(publisher.on_message(Beacon(1, 1, 0.25), 1.0))
    assert snapshot.snapshot
    assert snapshot.register == ()


def test_a_resync_is_for_its_addressee_and_at_a_bounded_rate() -> None:
    """M17."""
    publisher = core()
    mine = Resync("prefill-0", 1, 9)
    publisher.register(7, 1, 0.0)
    publisher.register(8, 2, 0.0)
    publisher.drop(7, 1, "ok", 0.0)
    publisher.flush(0.0)
    for other in (Resync("prefill-0", 0, 9), Resync("prefill-0", 1, 8), Resync("prefill-1", 1, 9)):
        assert publisher.on_message(other, 0.0) == []
    member, snapshot = messages(publisher.on_message(mine, 0.0))
    assert isinstance(member, Member)
    assert (snapshot.register, snapshot.snapshot) == ((Registration(8, 2),), True)
    assert publisher.on_message(mine, 0.01) == []
    assert [type(message) for message in messages(publisher.tick(0.06))] == [Member, Rooms], "late, but not lost"
    assert publisher.tick(0.2) == []


def test_a_large_restatement_is_spread_over_flushes_without_what_ended_meanwhile() -> None:
    publisher = core()
    for room in range(20 * CHUNK):
        publisher.register(room, 1, 0.0)
        publisher.flush(0.0)
    first = rooms(publisher.on_message(Beacon(1, 1, 0.25), 1.0))
    assert 1 < len(first) < 10
    last = 20 * CHUNK - 1
    publisher.drop(last, 1, "ok", 1.0)
    later = [message for step in range(10) for message in rooms(publisher.flush(1.0 + step / 50))]
    stated = [each.room for message in first + later if message.snapshot for each in message.register]
    assert stated == list(range(last))
    assert all(len(message.register) <= CHUNK for message in first + later)
    assert [message.seq for message in first + later] == list(range(first[0].seq, first[0].seq + len(first + later)))


def test_a_lost_claim_is_not_refreshed_and_its_owner_is_told() -> None:
    told: list[Conflict] = []
    publisher = core(on_conflict=told.append)
    publisher.register(7, 1, 0.0)
    publisher.register(8, 1, 0.0)
    publisher.flush(0.0)
    other = Location("prefill-0", 0, 3, "tcp://10.0.0.7:7000")
    publisher.on_message(Conflict("prefill-0", 1, 9, 7, 1, other, False), 1.0)
    publisher.on_message(Conflict("prefill-0", 1, 9, 8, 1, other, True), 1.0)
    publisher.on_message(Conflict("prefill-0", 0, 9, 8, 1, other, False), 1.0)
    assert [(conflict.room, conflict.kept) for conflict in told] == [(7, False), (8, True)]
    assert list(publisher.conflicts) == told
    (message,) = rooms(publisher.tick(60.0))
    assert message.register == (Registration(8, 1),)


def test_a_claim_that_is_lost_before_it_was_published_never_is() -> None:
    publisher = core()
    publisher.register(7, 1, 0.0)
    other = Location("prefill-0", 0, 3, "tcp://10.0.0.7:7000")
    publisher.on_message(Conflict("prefill-0", 1, 9, 7, 1, other, False), 0.0)
    assert publisher.flush(0.0) == []


def test_goodbye_is_the_last_membership_and_leaves_no_rooms() -> None:
    """M15 M50."""
    publisher = core()
    publisher.register(7, 1, 0.0)
    *_, last = messages(publisher.goodbye(1.0))
    assert isinstance(last, Member)
    assert last.state == "gone"
    assert publisher.live_rooms == 0


@pytest.mark.parametrize(("room", "attempt"), [(-1, 1), (2**63, 1), (1, 0), (1, 1_000_001), ("7", 1), (7.5, 1)])
def test_a_bad_number_is_counted_and_spoils_no_message(room: Any, attempt: int) -> None:
    publisher = core()
    publisher.register(room, attempt, 0.0)
    publisher.drop(room, attempt, "ok", 0.0)
    assert publisher.flush(0.0) == []
    assert publisher.counts["invalid"] == 2


def test_a_turn_that_collects_very_much_does_not_wait_for_its_end() -> None:
    publisher = core()
    early = [message for room in range(3 * CHUNK) for message in rooms(publisher.register(room, 1, 0.0))]
    late = rooms(publisher.flush(0.0))
    assert len(early) >= 1
    assert sorted(each.room for message in early + late for each in message.register) == list(range(3 * CHUNK))


def test_messages_that_are_not_for_publishers_are_ignored() -> None:
    stranger: Message = LoadReport("x", 0, 1, 1, load())
    assert core().on_message(stranger, 0.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_tick_has_nothing_to_do_before_it_is_due(seed: int) -> None:
    """So a publisher in an engine's process may sleep until then. One that is asked all the same goes on as before."""
    rng, now = random.Random(seed), 100.0
    publishers = [core(interval_s=0.25, room_ttl_s=2.0) for _ in range(2)]

    def both(call: str, *arguments: Any) -> Any:
        one, other = (getattr(publisher, call)(*arguments) for publisher in publishers)
        assert one == other
        return one

    both("tick", now)
    for _ in range(200):
        room = rng.randrange(4)
        match rng.randrange(6):
            case 0:
                both("register", room, 1, now)
            case 1:
                both("drop", room, 1, "ok", now)
            case 2:
                both("report", load(rng.randrange(2)), now)
            case 3:
                both("on_message", Beacon(rng.randrange(1, 3), 1, 0.25), now)
        both("flush", now)
        due_s = both("due_s", now)
        if due_s > 1e-6:
            assert publishers[0].tick(now + due_s - 1e-6) == []
        now += due_s + 1e-6
        assert both("tick", now) != []
        now += rng.choice((0.0, 0.01, 0.1))
